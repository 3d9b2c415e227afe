#include "flashgla/model/checksum.h"

#include <xxhash.h>

#include <cstdio>

namespace flashgla::model {

Checksum::Checksum() : state_(XXH3_createState()) { XXH3_64bits_reset(state_); }
Checksum::~Checksum() { XXH3_freeState(state_); }

void Checksum::add(const void* data, std::size_t bytes) { XXH3_64bits_update(state_, data, bytes); }

std::string Checksum::text() const {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(XXH3_64bits_digest(state_)));
  return digits;
}

}  // namespace flashgla::model
