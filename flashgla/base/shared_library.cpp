#include "flashgla/base/shared_library.h"

#include <dlfcn.h>

#include "flashgla/base/error.h"

namespace flashgla {

SharedLibrary::SharedLibrary(const std::string& file)
    : file_(file), opened_(::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (opened_ != nullptr) return;
  const char* reason = ::dlerror();
  throw Error(reason != nullptr ? reason : file + " cannot be opened");
}

void* SharedLibrary::address_of(const char* name) const {
  void* const address = ::dlsym(opened_, name);
  if (address == nullptr) throw Error(file_ + " has no " + name);
  return address;
}

}  // namespace flashgla
