#pragma once

#include <string>
#include <string_view>

namespace flashgla::text {

// 16 hexadecimal digits of XXH3-64.
std::string fingerprint_of(std::string_view definition);

}  // namespace flashgla::text
