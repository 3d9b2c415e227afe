// The one exception type of the library. Library code never prints and never exits.
#pragma once

#include <stdexcept>
#include <string>

namespace flashgla {

class Error : public std::runtime_error {
 public:
  // A plain message: one line that names the thing and, where there is one, the remedy.
  explicit Error(const std::string& message) : std::runtime_error(message) {}

  // An argument that is not what it must be:
  // "gated_linear_attention: g has shape [2,128,4,64]; expected [2,128,4,128] (as k)".
  Error(const std::string& operation, const std::string& argument, const std::string& actual,
        const std::string& expected)
      : std::runtime_error(operation + ": " + argument + " " + actual + "; expected " + expected),
        operation_(operation),
        argument_(argument) {}

  const std::string& operation() const { return operation_; }
  const std::string& argument() const { return argument_; }

 private:
  std::string operation_;
  std::string argument_;
};

}  // namespace flashgla
