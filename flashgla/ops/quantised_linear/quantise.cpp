#include "flashgla/ops/quantised_linear/quantise.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "flashgla/ops/quantised_linear/blocks.h"

namespace flashgla::ops::quantised_linear {

namespace {

// The nearest of kValuesOfQ4 to v, by floor(2 v) + 256: values lie between whole numbers, so that borders between two
// of them are multiples of a half.
const std::array<std::uint8_t, 512>& nearest_of_q4() {
  static const std::array<std::uint8_t, 512> table = [] {
    std::array<std::uint8_t, 512> codes{};
    for (int i = 0; i < 512; ++i) {
      const double v = (i - 256) / 2.0 + 0.25;  // the middle of the half
      std::size_t best = 0;
      for (std::size_t code = 1; code < kValuesOfQ4.size(); ++code) {
        if (std::abs(kValuesOfQ4[code] - v) < std::abs(kValuesOfQ4[best] - v)) best = code;
      }
      codes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(best);
    }
    return codes;
  }();
  return table;
}

std::uint8_t nearest(Format format, float v) {
  if (format == Format::q8) {
    return static_cast<std::uint8_t>(128 + static_cast<int>(std::lrintf(std::clamp(v, -127.0f, 127.0f))));
  }
  const float place = std::floor(2.0f * std::clamp(v, -127.0f, 127.0f)) + 256.0f;
  return nearest_of_q4()[static_cast<std::size_t>(place)];
}

void code_all(Format format, std::span<const float> x, float scale, std::uint8_t* codes) {
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  for (std::size_t i = 0; i < x.size(); ++i) codes[i] = nearest(format, std::isfinite(inverse) ? x[i] * inverse : 0.0f);
}

}  // namespace

int value_of(Format format, std::uint8_t code) { return format == Format::q8 ? code - 128 : kValuesOfQ4[code]; }

std::uint8_t nearest_code(Format format, float x, float scale) {
  std::uint8_t code;
  code_all(format, {&x, 1}, scale, &code);
  return code;
}

QuantisedGroup quantise_group(Format format, std::span<const float> x, std::span<const float> importance) {
  QuantisedGroup best;
  float extreme = 0.0f;
  double all = 0.0;
  const auto weight = [&](std::size_t i) { return importance.empty() ? 1.0 : static_cast<double>(importance[i]); };
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::abs(x[i]) > std::abs(extreme)) extreme = x[i];
    all += weight(i) * x[i] * x[i];
  }
  code_all(format, x, 0.0f, best.codes);
  best.error = all;  // of zeros
  if (extreme == 0.0f) return best;
  // Where the extreme value comes to lie: q8's at 123 to 130, q4's near either end of its values.
  const auto try_scale = [&](float scale) {
    QuantisedGroup tried;
    code_all(format, x, scale, tried.codes);
    double products = 0.0, squares = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double value = value_of(format, tried.codes[i]);
      products += weight(i) * x[i] * value;
      squares += weight(i) * value * value;
    }
    const double fitted = squares > 0.0 ? products / squares : static_cast<double>(scale);
    tried.scale = static_cast<float>(Float16(fitted));
    if (!std::isfinite(tried.scale)) return;
    code_all(format, x, tried.scale, tried.codes);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double rest = x[i] - static_cast<double>(tried.scale) * value_of(format, tried.codes[i]);
      tried.error += weight(i) * rest * rest;
    }
    if (tried.error < best.error) best = tried;
  };
  if (format == Format::q8) {
    for (int i = -4; i <= 3; ++i) try_scale(std::abs(extreme) / (127.0f + static_cast<float>(i)));
  } else {
    for (int i = -20; i <= 16; i += 4) try_scale(extreme / (-127.0f - static_cast<float>(i)));
    for (int i = -20; i <= 16; i += 4) try_scale(extreme / (113.0f + static_cast<float>(i)));
  }
  return best;
}

void store_group(const TensorView& packed, std::int64_t row, std::int64_t group, const QuantisedGroup& quantised) {
  const Format format = format_of(packed);
  auto* block = packed.as<std::uint8_t>() + (row / kPanelRows * packed.size(1) + group) * block_bytes(format);
  const std::int64_t r = row % kPanelRows;
  const Float16 scale(quantised.scale);
  std::memcpy(block + 2 * r, &scale.bits, sizeof(scale.bits));
  for (std::int64_t c = 0; c < kGroup; ++c) {
    const Place place = place_of(format, r, c);
    std::uint8_t& byte = block[kScaleBytes + place.byte];
    if (format == Format::q8) {
      byte = quantised.codes[c];
    } else {
      byte = static_cast<std::uint8_t>((byte & (0xf0 >> place.shift)) | (quantised.codes[c] << place.shift));
    }
  }
}

void quantise(Context& context, const TensorView& values, const TensorView& importance, const TensorView& packed) {
  const std::int64_t columns = values.size(1);
  const Format format = format_of(packed);
  if (!values.is_contiguous() || !(packed.shape == packed_shape(format, values.size(0), columns))) {
    throw Error("quantise: values " + to_string(values.shape) + " do not become " + to_string(packed.shape));
  }
  const auto refuse = [&](std::int64_t row, std::int64_t column, const std::string& why) {
    throw Error("holds " + std::to_string(values.as<float>()[row * columns + column]) + " at [" + std::to_string(row) +
                "," + std::to_string(column) + "]" + why);
  };
  // Whole panels, since the bytes of q4 are shared by the columns of a row alone but written in turn.
  parallel_for(context, packed.size(0), [&](std::int64_t panel) {
    for (std::int64_t r = 0; r < kPanelRows; ++r) {
      const std::int64_t row = panel * kPanelRows + r;
      for (std::int64_t group = 0; group < packed.size(1); ++group) {
        std::array<float, kGroup> x{}, weights{};
        const std::int64_t begin = group * kGroup, count = std::min(kGroup, columns - begin);
        for (std::int64_t c = 0; c < count && row < values.size(0); ++c) {
          x[static_cast<std::size_t>(c)] = values.as<float>()[row * columns + begin + c];
          if (importance) weights[static_cast<std::size_t>(c)] = importance.as<float>()[begin + c];
          const float magnitude = std::abs(x[static_cast<std::size_t>(c)]);
          if (!std::isfinite(magnitude)) refuse(row, begin + c, "");
          if (magnitude > 65504.0f * 100.0f) refuse(row, begin + c, ", which is too large for the scales of f16");
        }
        store_group(packed, row, group,
                    quantise_group(format, x, importance ? std::span<const float>(weights) : std::span<const float>()));
      }
    }
  });
}

}  // namespace flashgla::ops::quantised_linear
