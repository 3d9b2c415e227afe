// Numbers as people write them, in flags and configuration files. All throw Error that quotes the text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace flashgla {

// A finite number.
double parse_number(const std::string& text);

// A whole number: "15B", "0.5M", "2k", "1e3", "8192"; units of 1000, at most 2^53 either side of 0.
std::int64_t parse_count(const std::string& text);

// Bytes: "24GiB", "2GB", "500 MB", "1.5G", "4096"; units in either case, GB and G of 1000, GiB of 1024.
std::size_t parse_bytes(const std::string& text);

}  // namespace flashgla
