// The window's decay, the same on every device.
#pragma once

#include <cmath>
#include <cstdint>

namespace flashgla::ops::hyena_filter {

// |delta| of the first channel, and from one channel to the next.
struct Decays {
  double first, step;

  explicit Decays(std::int64_t channels)
      : first(std::log(100.0) / 1.5),
        step((std::log(100.0) / 0.3 - first) / static_cast<double>(channels > 1 ? channels - 1 : 1)) {}
};

}  // namespace flashgla::ops::hyena_filter
