// The kernel over an instruction set `Isa`, which the including source defines; included inside that source's anonymous
// namespace, where its code may use those instructions. Compiled with -ffp-contract=off: every instruction set rounds
// alike.

// A group of x. Codes go where Isa's multiplication wants them.
inline void encode_group(const float* x, std::uint8_t* codes, std::int32_t& offset, float& scale) {
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < kGroup; ++i) {
    largest = std::max(largest, std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffu);
  }
  const auto top = std::bit_cast<float>(largest);
  std::int32_t values[kGroup] = {};
  scale = 0.0f;
  if (largest >= 0x7f800000u) {  // not finite: neither are the sums
    scale = std::bit_cast<float>(0x7fc00000u);
  } else if (top >= kNothing) {
    scale = top / kLargestInteger;
    const float inverse = kLargestInteger / top;
    for (std::int64_t i = 0; i < kGroup; ++i) {
      const float shifted = x[i] * inverse + kToInteger;
      values[i] = std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kToInteger);
    }
  }
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < kGroup; ++i) sum += values[i];
  offset = -128 * sum;
  Isa::place(values, codes);
}

inline void encode(const float* x, std::int64_t count, std::int64_t groups, const Activations& to) {
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t rest = count - g * kGroup;
    float padded[kGroup];
    const float* from = x + g * kGroup;
    if (rest < kGroup) {
      for (std::int64_t i = 0; i < kGroup; ++i) padded[i] = i < rest ? from[i] : 0.0f;
      from = padded;
    }
    encode_group(from, to.codes + g * kCodeBytes, to.offsets[g], to.scales[g]);
  }
}

constexpr std::int64_t kVector = 64;  // bytes from four columns of a panel to the next four
constexpr int kVectors = 8;           // of a block, once they are bytes
constexpr int kParts = static_cast<int>(kPanelRows) / Isa::kLanes;

// Vectors of bytes that a block has on its way from memory, and how many are made of one: four columns each.
template <Format kFormat>
constexpr int kLoads = kFormat == Format::q8 ? kVectors : kVectors / 2;

// The k-th of them: bytes above 0 of four columns of q8, of four and of four of the other half of the columns of q4.
template <Format kFormat>
inline void load_vectors(const std::uint8_t* codes, int k, typename Isa::Bytes (&w)[kVectors / kLoads<kFormat>]) {
  const typename Isa::Bytes loaded = Isa::load(codes + kVector * k);
  if constexpr (kFormat == Format::q8) {
    w[0] = loaded;
  } else {
    w[0] = Isa::values_of_low(loaded);
    w[1] = Isa::values_of_high(loaded);
  }
}

// Sums of kRows rows of x from row m on by kPanels panels, `spacing` bytes from one to the next: several streams keep
// the memory busy, and so does asking ahead.
template <Format kFormat, int kPanels, int kRows>
inline void multiply_panel(const std::uint8_t* panel, std::int64_t spacing, std::int64_t groups, const Activations& x,
                           std::int64_t m, float (&sums)[kPanels][kRows][kPanelRows]) {
  constexpr std::int64_t kAhead = 2048;  // bytes
  for (int part = 0; part < kParts; ++part) {
    typename Isa::Floats totals[kPanels][kRows];
    for (int p = 0; p < kPanels; ++p) {
      for (int r = 0; r < kRows; ++r) totals[p][r] = Isa::zero();
    }
    const std::uint8_t* block = panel;
    for (std::int64_t g = 0; g < groups; ++g, block += block_bytes(kFormat)) {
      if (part == 0) {
        for (int p = 0; p < kPanels; ++p) {
          for (std::int64_t line = 0; line < block_bytes(kFormat); line += 64) {
            __builtin_prefetch(block + p * spacing + kAhead + line);
          }
        }
      }
      typename Isa::Sum products[kPanels][kRows];
      for (int p = 0; p < kPanels; ++p) {
        for (int r = 0; r < kRows; ++r) products[p][r] = Isa::begin(x.offsets[(m + r) * groups + g]);
      }
      const std::uint8_t* codes = block + kScaleBytes + 4 * Isa::kLanes * part;
      for (int k = 0; k < kLoads<kFormat>; ++k) {
        for (int p = 0; p < kPanels; ++p) {
          typename Isa::Bytes w[kVectors / kLoads<kFormat>];
          load_vectors<kFormat>(codes + p * spacing, k, w);
          for (int r = 0; r < kRows; ++r) {
            const std::uint8_t* own = x.codes + ((m + r) * groups + g) * kCodeBytes;
            for (int half = 0; half < kVectors / kLoads<kFormat>; ++half) {
              Isa::add_products(products[p][r], w[half], own + 8 * (k + half * kLoads<kFormat>));
            }
          }
        }
      }
      for (int p = 0; p < kPanels; ++p) {
        const typename Isa::Floats scales = Isa::load_f16(block + p * spacing + 2 * Isa::kLanes * part);
        for (int r = 0; r < kRows; ++r) {
          const typename Isa::Floats scale = Isa::multiply(scales, Isa::all(x.scales[(m + r) * groups + g]));
          totals[p][r] = Isa::add(totals[p][r], Isa::multiply(Isa::total(products[p][r]), scale));
        }
      }
    }
    for (int p = 0; p < kPanels; ++p) {
      for (int r = 0; r < kRows; ++r) Isa::store(totals[p][r], sums[p][r] + part * Isa::kLanes);
    }
  }
}

inline void store_row(const Call& call, std::int64_t m, std::int64_t first, const float* sums) {
  float* out = call.y.as<float>() + m * call.y.stride[0];
  const std::int64_t count = std::min(kPanelRows, call.y.size(1) - first);
  const TensorView& bias = call.options.bias;
  for (std::int64_t r = 0; r < count; ++r) {
    float value = sums[r];
    if (call.options.accumulate) value += out[first + r];
    if (bias) {
      value += bias.dtype == DType::f32 ? static_cast<const float*>(bias.data)[first + r]
                                        : static_cast<float>(static_cast<const BFloat16*>(bias.data)[first + r]);
    }
    out[first + r] = value;
  }
}

template <Format kFormat, int kPanels, int kRows>
inline void multiply_rows(const Call& call, std::int64_t panel, std::int64_t spacing, std::int64_t m) {
  float sums[kPanels][kRows][kPanelRows];
  multiply_panel<kFormat, kPanels, kRows>(call.weight + panel * call.panel_bytes(), spacing * call.panel_bytes(),
                                          call.groups, call.x, m, sums);
  for (int p = 0; p < kPanels; ++p) {
    for (int r = 0; r < kRows; ++r) store_row(call, m + r, (panel + p * spacing) * kPanelRows, sums[p][r]);
  }
}

// One or two rows of x, which wait for memory: panels side by side, `spacing` of them apart.
template <Format kFormat, int kPanels>
inline void multiply_few_rows(const Call& call, std::int64_t panel, std::int64_t spacing) {
  if (call.y.size(0) == 1) return multiply_rows<kFormat, kPanels, 1>(call, panel, spacing, 0);
  multiply_rows<kFormat, kPanels, 2>(call, panel, spacing, 0);
}

// Rows [m, rows) of x.
template <Format kFormat>
inline void multiply_all_rows(const Call& call, std::int64_t panel, std::int64_t m, std::int64_t rows) {
  for (; m + 4 <= rows; m += 4) multiply_rows<kFormat, 1, 4>(call, panel, 0, m);
  if (rows - m == 3) multiply_rows<kFormat, 1, 3>(call, panel, 0, m);
  if (rows - m == 2) multiply_rows<kFormat, 1, 2>(call, panel, 0, m);
  if (rows - m == 1) multiply_rows<kFormat, 1, 1>(call, panel, 0, m);
}

// Of few rows four panels at once, a quarter of the range apart, and the rest beside each other. Of many rows some stay
// in the cache while all panels of the range pass by.
template <Format kFormat>
inline void multiply_panels(const Call& call, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kRowsInCache = 64;
  constexpr int kStreams = 4;
  const std::int64_t rows = call.y.size(0);
  if (rows <= 2) {
    const std::int64_t quarter = (end - begin) / kStreams, rest = begin + kStreams * quarter;
    for (std::int64_t i = 0; i < quarter; ++i) multiply_few_rows<kFormat, kStreams>(call, begin + i, quarter);
    if (end - rest == 3) multiply_few_rows<kFormat, 3>(call, rest, 1);
    if (end - rest == 2) multiply_few_rows<kFormat, 2>(call, rest, 1);
    if (end - rest == 1) multiply_few_rows<kFormat, 1>(call, rest, 1);
    return;
  }
  for (std::int64_t m = 0; m < rows; m += kRowsInCache) {
    for (std::int64_t panel = begin; panel < end; ++panel) {
      multiply_all_rows<kFormat>(call, panel, m, std::min(rows, m + kRowsInCache));
    }
  }
}

inline void multiply(const Call& call, std::int64_t begin, std::int64_t end) {
  if (call.format == Format::q8) return multiply_panels<Format::q8>(call, begin, end);
  multiply_panels<Format::q4>(call, begin, end);
}

template <Format kFormat>
inline void decode_panel(const std::uint8_t* panel, std::int64_t groups, float* out, std::int64_t stride) {
  for (int part = 0; part < kParts; ++part) {
    const std::uint8_t* block = panel;
    float* column = out + part * Isa::kLanes;
    for (std::int64_t g = 0; g < groups; ++g, block += block_bytes(kFormat)) {
      const typename Isa::Floats scales = Isa::load_f16(block + 2 * Isa::kLanes * part);
      const std::uint8_t* codes = block + kScaleBytes + 4 * Isa::kLanes * part;
      for (int k = 0; k < kLoads<kFormat>; ++k) {
        typename Isa::Bytes w[kVectors / kLoads<kFormat>];
        load_vectors<kFormat>(codes, k, w);
        for (int half = 0; half < kVectors / kLoads<kFormat>; ++half) {
          float* to = column + 4 * (k + half * kLoads<kFormat>)*stride;
          for (int j = 0; j < 4; ++j) Isa::store(Isa::multiply(scales, Isa::value(w[half], j)), to + j * stride);
        }
      }
      column += kGroup * stride;
    }
  }
}

inline void decode_to(Format format, const std::uint8_t* panel, std::int64_t groups, float* out, std::int64_t stride) {
  if (format == Format::q8) return decode_panel<Format::q8>(panel, groups, out, stride);
  decode_panel<Format::q4>(panel, groups, out, stride);
}

constexpr Kernel kKernel{encode, multiply, decode_to};
