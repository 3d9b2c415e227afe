// XXH3-64 of bytes that come in pieces.
#pragma once

#include <cstddef>
#include <string>

struct XXH3_state_s;

namespace flashgla::model {

class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;

  void add(const void* data, std::size_t bytes);
  std::string text() const;  // of all so far: 16 hexadecimal digits

 private:
  XXH3_state_s* state_;
};

}  // namespace flashgla::model
