// What share of a device's arithmetic a run uses is said of this denominator.
#pragma once

#include <string_view>

namespace flashgla::train {

// Dense bf16 products with f32 sums a second, by the maker's data sheet, of a device by its name ("NVIDIA H200"); 0 for
// one that is not known here, of which no share is said.
double peak_rate(std::string_view device_name);

}  // namespace flashgla::train
