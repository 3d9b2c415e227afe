// A shared library that is looked for when the program runs.
#pragma once

#include <string>

namespace flashgla {

// Stays opened for the program's life.
class SharedLibrary {
 public:
  // `file`: a path, or a name that the system's loader looks for. Throws Error with the loader's words.
  explicit SharedLibrary(const std::string& file);

  // Throws Error "<file> has no <name>".
  template <class Function>
  void find(Function& function, const char* name) const {
    function = reinterpret_cast<Function>(address_of(name));
  }

 private:
  void* address_of(const char* name) const;

  std::string file_;
  void* opened_;
};

}  // namespace flashgla
