#include "flashgla/base/quantities.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "flashgla/base/error.h"

namespace flashgla {

double parse_number(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);  // of what is too small the nearest number, perhaps 0
  const bool whole = !text.empty() && end == text.c_str() + text.size();
  if (!whole || !std::isfinite(value)) throw Error("'" + text + "' is not a number");
  return value;
}

std::int64_t parse_count(const std::string& text) {
  constexpr std::string_view kLetters = "kKmMBGT";
  constexpr double kUnits[] = {1e3, 1e3, 1e6, 1e6, 1e9, 1e9, 1e12};
  constexpr std::int64_t kMost = std::int64_t{1} << 53;  // up to here a double is exact
  std::int64_t exact = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), exact);
  if (failure == std::errc() && end == text.data() + text.size()) {
    if (exact > kMost || exact < -kMost) throw Error("'" + text + "' is too large");
    return exact;
  }
  double unit = 1.0;
  std::string number = text;
  if (const std::size_t letter = text.empty() ? std::string_view::npos : kLetters.find(text.back());
      letter != std::string_view::npos) {
    unit = kUnits[letter];
    number.pop_back();
  }
  double value = 0.0;
  try {
    value = parse_number(number) * unit;
  } catch (const Error&) {
    throw Error("'" + text + "' is not a number");
  }
  if (std::abs(value) > static_cast<double>(kMost)) throw Error("'" + text + "' is too large");
  if (std::abs(value - std::round(value)) > 1e-6 * unit) throw Error("'" + text + "' is not a whole number");
  return std::llround(value);
}

std::size_t parse_bytes(const std::string& text) {
  constexpr std::string_view kPowers = "KMGT";
  const std::size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  std::string unit = text.substr(std::min(text.find_first_not_of(' ', digits), text.size()));
  for (char& c : unit) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  const std::size_t power = unit.empty() || unit == "B" ? 0 : kPowers.find(unit.front()) + 1;  // 0 again: unknown
  const std::string rest = unit.empty() ? unit : unit.substr(1);
  const bool known = unit.empty() || unit == "B" || (power > 0 && (rest.empty() || rest == "B" || rest == "IB"));
  if (digits == 0 || !known) throw Error("'" + text + "' is not a number of bytes, such as 24GiB");
  const double bytes =
      parse_number(text.substr(0, digits)) * std::pow(rest == "IB" ? 1024.0 : 1000.0, static_cast<double>(power));
  if (bytes > 0x1p60) throw Error("'" + text + "' is more than there is of any memory");
  return static_cast<std::size_t>(bytes);
}

}  // namespace flashgla
