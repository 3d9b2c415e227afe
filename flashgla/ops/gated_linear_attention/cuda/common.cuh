// Device helpers shared by the forward, backward and step kernels.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/params.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// The same value, but the compiler may not know it: what is computed from it is computed anew where it is used instead
// of being held in registers through a loop.
__device__ __forceinline__ int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ std::int64_t anew(std::int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
__device__ __forceinline__ float anew(float x) {
  asm volatile("" : "+f"(x));
  return x;
}
template <class T>
__device__ __forceinline__ T* anew(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

// ---- elements ----

template <class T>
struct Element;
template <>
struct Element<float> {
  static __device__ __forceinline__ float load(const float* p) { return *p; }
  static __device__ __forceinline__ void store(float* p, float x) { *p = x; }
};
template <>
struct Element<__nv_bfloat16> {
  static __device__ __forceinline__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
  static __device__ __forceinline__ void store(__nv_bfloat16* p, float x) { *p = __float2bfloat16_rn(x); }
};
template <>
struct Element<__half> {
  static __device__ __forceinline__ float load(const __half* p) { return __half2float(*p); }
  static __device__ __forceinline__ void store(__half* p, float x) { *p = __float2half_rn(x); }
};

// Element `offset` of memory whose dtype is known at run time only (f32, bf16, f16): for gates and slow paths.
__device__ __forceinline__ float load_as(DType dtype, const void* data, std::int64_t offset) {
  switch (dtype) {
    case DType::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[offset]);
    case DType::f16:
      return __half2float(static_cast<const __half*>(data)[offset]);
    default:
      return static_cast<const float*>(data)[offset];
  }
}
// An element of a tensor whose dtype is known at run time, as it lies: loaded without a branch, so that many may be
// under way together.
struct Bits {
  std::uint32_t bits = 0;
  Bits() = default;
  __device__ __forceinline__ Bits(DType dtype, const void* data, std::int64_t offset, bool wanted) {
    const bool wide = dtype == DType::f32;
    asm volatile(
        "{\n.reg .pred wide, narrow;\nsetp.eq.s32 wide, %2, 1;\nsetp.eq.s32 narrow, %2, 2;\n"
        "@wide ld.global.b32 %0, [%1];\n@narrow ld.global.u16 %0, [%1];\n}"
        : "+r"(bits)
        : "l"(static_cast<const char*>(data) + offset * (wide ? 4 : 2)), "r"(!wanted ? 0
                                                                             : wide  ? 1
                                                                                     : 2));
  }
  __device__ __forceinline__ float as_float(DType dtype) const {
    return dtype == DType::f32    ? __uint_as_float(bits)
           : dtype == DType::bf16 ? __uint_as_float(bits << 16)
                                  : __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
};

// A gate of a bf16 call, bf16 or f32, in two parts, of which only the second waits for memory.
__device__ __forceinline__ std::uint32_t load_gate_bits(DType dtype, const void* data, std::int64_t offset) {
  return dtype == DType::f32 ? static_cast<const std::uint32_t*>(data)[offset]
                             : static_cast<const std::uint16_t*>(data)[offset];
}
__device__ __forceinline__ float gate_from_bits(DType dtype, std::uint32_t bits) {
  return __uint_as_float(dtype == DType::f32 ? bits : bits << 16);
}
__device__ __forceinline__ void store_as(DType dtype, void* data, std::int64_t offset, float x) {
  switch (dtype) {
    case DType::bf16:
      static_cast<__nv_bfloat16*>(data)[offset] = __float2bfloat16_rn(x);
      break;
    case DType::f16:
      static_cast<__half*>(data)[offset] = __float2half_rn(x);
      break;
    default:
      static_cast<float*>(data)[offset] = x;
  }
}

// ---- gates ----

// Below this a gate of one token, in base 2, is as good as -inf: 2^x is 0 in every dtype. Clamping keeps sums finite.
constexpr float kHardReset = -4096.0f;

// A natural-log gate in base 2; -inf becomes kHardReset, and NaN does not pass for it.
__device__ __forceinline__ float base_2_gate(float g) { return ptx::larger_or_nan(g * kLog2E, kHardReset); }

// Gate of token t (within batch element b), key-value head h, channel k, in base 2; 0 for no gate.
__device__ __forceinline__ float key_gate(const Params& p, std::int64_t b, std::int64_t t, int h, int k) {
  if (p.gate == GateKind::none || p.g.data == nullptr) return 0.0f;
  const std::int64_t channel = p.gate == GateKind::key || p.gate == GateKind::key_value ? k : 0;
  return base_2_gate(load_as(p.gate_dtype, p.g.data, b * p.g.batch + t * p.g.token + h * p.g.head + channel));
}

// ---- feature maps (features/features.cu has them for many elements at once) ----

// phi(x), and its slope.
__device__ __forceinline__ float feature(FeatureMap map, float x) {
  switch (map) {
    case FeatureMap::elu_plus_one:
      return x > 0.0f ? x + 1.0f : expf(x);
    case FeatureMap::relu:
      return fmaxf(x, 0.0f);
    default:
      return x;
  }
}
__device__ __forceinline__ float feature_slope(FeatureMap map, float x) {
  switch (map) {
    case FeatureMap::elu_plus_one:
      return x > 0.0f ? 1.0f : expf(x);
    case FeatureMap::relu:
      return x > 0.0f ? 1.0f : 0.0f;
    default:
      return 1.0f;
  }
}

// ---- sums over lanes of a warp, which all ask for them; over all: base/cuda/sums.cuh ----

// Of this and earlier lanes, and of this and later ones.
template <class T>
__device__ __forceinline__ T sum_so_far(T x, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}
__device__ __forceinline__ float sum_to_come(float x, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_down_sync(0xffffffffu, x, distance);
    if (lane + distance < 32) x += other;
  }
  return x;
}
// Of the four that share rows of an accumulator.
__device__ __forceinline__ float sum_of_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float2 sum_of_quad(float2 x) { return make_float2(sum_of_quad(x.x), sum_of_quad(x.y)); }

// ---- sequences and chunks ----

struct Span {
  std::int64_t batch = 0;        // batch element; 0 when packed
  std::int64_t begin = 0;        // first token within the batch element
  std::int64_t length = 0;       // tokens; 0 for an empty sequence
  std::int64_t chunk_begin = 0;  // number of the sequence's first chunk among all chunks of the call
};

__device__ __forceinline__ std::int64_t sequence_start(const Sequences& s, std::int64_t n) {
  return s.wide ? static_cast<const std::int64_t*>(s.cu_seqlens)[n] : static_cast<const std::int32_t*>(s.cu_seqlens)[n];
}

// Sequence n. chunk_begin is only valid after plan_chunks when packed.
__device__ __forceinline__ Span span_of(const Sequences& s, std::int64_t n) {
  if (s.cu_seqlens == nullptr) return {n, 0, s.length, n * s.chunks_each()};
  const std::int64_t begin = sequence_start(s, n);
  return {0, begin, sequence_start(s, n + 1) - begin, s.chunk_begin == nullptr ? 0 : s.chunk_begin[n]};
}

// Which sequence chunk number `chunk` of the call belongs to; -1 beyond the last chunk (grids are sized by the bound
// most_chunks).
__device__ __forceinline__ std::int64_t sequence_of_chunk(const Sequences& s, std::int64_t chunk) {
  if (s.cu_seqlens == nullptr) {  // a grid has less than 2^31 chunks; division of 64 bits would be a call
    return static_cast<std::uint32_t>(chunk) / static_cast<std::uint32_t>(s.chunks_each());
  }
  if (chunk >= s.chunk_begin[s.count]) return -1;
  std::int64_t low = 0, high = s.count;  // chunk_begin[low] <= chunk < chunk_begin[high]
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (s.chunk_begin[middle] <= chunk ? low : high) = middle;
  }
  return low;  // the last n with chunk_begin[n] <= chunk: empty sequences before it are passed over
}

// ---- two ways to run a call (plan_chunks_by_length) ----

// Of the first way's kernels, where the host does not know the longest sequence: those of the second may begin, which
// end at once where there are no tokens for them. Behind plan_chunks_by_length.
__device__ __forceinline__ void release_other_way(const Sequences& s) {
  if (s.packed && s.longest == 0) flashgla::cuda::release_next();
}
// Whether a block of the second way has nothing to do but to end. Asked before wait_for_previous: chunks have been
// numbered before the first way began. The kernel has not ended before those ahead of it have.
__device__ __forceinline__ bool ends_idle(const Sequences& s) {
  if (!s.may_be_idle || __ldcg(s.chunk_begin + s.count) != 0) return false;
  flashgla::cuda::release_next();
  if (blockIdx.x + blockIdx.y == 0) flashgla::cuda::wait_for_previous();
  return true;
}

// ---- 64x64 tiles of 16-bit elements in shared memory ----
// A tile is 64 rows of 128 bytes; the 16-byte piece p of row r lies at piece p ^ (r % 8): ldmatrix, wgmma (128-byte
// swizzle, tile aligned to 1024 bytes) and 16-byte copies are all free of bank conflicts. Wider matrices are several
// tiles side by side.
constexpr int kTileBytes = 64 * 128;

// Byte offset of the 16-byte piece that holds column 8 * piece of a row.
__device__ __forceinline__ std::uint32_t tile_piece(int row, int piece) {
  return static_cast<std::uint32_t>(row * 128 + ((piece ^ (row & 7)) << 4));
}

// To global memory, also where the compiler does not see that the address is one of it.
__device__ __forceinline__ void store_global_16(void* place, uint4 x) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(place), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(std::uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_shared_16(std::uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ std::uint32_t load_shared_4(std::uint32_t address) {
  std::uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ uint2 load_shared_uint2(std::uint32_t address) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void store_shared_uint2(std::uint32_t address, uint2 x) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}
__device__ __forceinline__ void store_shared_4(std::uint32_t address, std::uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
// Number i of floats there, and two at once.
__device__ __forceinline__ float float_at(std::uint32_t address, int i = 0) {
  return __uint_as_float(load_shared_4(address + 4 * i));
}
__device__ __forceinline__ void put_float(std::uint32_t address, int i, float x) {
  store_shared_4(address + 4 * i, __float_as_uint(x));
}
__device__ __forceinline__ float2 load_shared_float2(std::uint32_t address) {
  const uint2 x = load_shared_uint2(address);
  return make_float2(__uint_as_float(x.x), __uint_as_float(x.y));
}
__device__ __forceinline__ void store_shared_float2(std::uint32_t address, float2 x) {
  store_shared_uint2(address, make_uint2(__float_as_uint(x.x), __float_as_uint(x.y)));
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
