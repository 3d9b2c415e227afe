// What the backwards in one kernel share: where a walk back in time is, and rows of gradients on their way out.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/gates.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// Where the walk is in each tensor, in shared memory: registers are too few, and what the compiler would spill goes to
// the L2. [parity of the chunk under way][tensor] addresses, then [tensor] bytes from a chunk to the one before. Null,
// and 0, of what is not there: of gradients that are not wanted.
struct Places {
  enum Tensor { q, d_o, k, v, states, g, dq, dk, dv, dg, count };
  std::uint32_t shared;
  __device__ __forceinline__ std::uint32_t at(int index, int tensor) const {
    return shared + ((index & 1) * count + tensor) * 8;
  }
  static __device__ __forceinline__ std::uint64_t load(std::uint32_t address) {
    std::uint64_t x;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(x) : "r"(address) : "memory");
    return x;
  }
  static __device__ __forceinline__ void store(std::uint32_t address, std::uint64_t x) {
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
  }
  template <class T>
  __device__ __forceinline__ T* get(int index, Tensor tensor) const {
    return reinterpret_cast<T*>(load(at(index, tensor)));
  }
  __device__ __forceinline__ void start(int index, Tensor tensor, const void* place, std::int64_t step) const {
    store(at(index, tensor), reinterpret_cast<std::uint64_t>(place));
    store(at(0, 2 * count + tensor), static_cast<std::uint64_t>(step));
  }
  __device__ __forceinline__ std::int64_t step(int tensor) const {
    return static_cast<std::int64_t>(load(at(0, 2 * count + tensor)));
  }
  // Thread `tensor` of one warp: its place one chunk back.
  __device__ __forceinline__ void step_back(int index, int tensor) const {
    if (tensor < count) store(at(index - 1, tensor), load(at(index, tensor)) - step(tensor));
  }
};

// The first tiles of a stage where a block's two groups share a walk: the first has q, do, dq and dv, the second k, v,
// h, dk and dh.
struct InputTiles {
  static constexpr int q = 0, k = kTileBytes, d_o = 2 * kTileBytes, v = 3 * kTileBytes, h = 4 * kTileBytes,
                       inputs_end = 5 * kTileBytes;
};
// A chunk's, of each group its own.
__device__ __forceinline__ void copy_inputs(std::uint32_t stage, const Params& p, const Gradients& d, bool first_group,
                                            int rows, const char* q_or_k, const char* d_o_or_v, const char* state) {
  const int thread = fresh_thread();
  const std::uint32_t group = first_group ? 0 : kTileBytes;
  const auto elements = [](const char* x) { return reinterpret_cast<const __nv_bfloat16*>(x); };
  copy_tile(stage + InputTiles::q + group, elements(q_or_k), static_cast<int>(first_group ? p.q.token : p.k.token),
            rows, p.key_dim, thread);
  copy_tile(stage + InputTiles::d_o + group, elements(d_o_or_v),
            static_cast<int>(first_group ? d.d_o.token : p.v.token), rows, p.value_dim, thread);
  if (!first_group) copy_image(stage + InputTiles::h, state, thread);
}

// The sequence and head that such a block walks over.
struct OwnSequence {
  const Params& p;
  int head;
  Span span;
  __device__ __forceinline__ OwnSequence(const Params& of, int block)
      : p(of), head(block % of.heads), span(span_of(of.sequences, block / of.heads)) {}
  __device__ __forceinline__ int chunks() const { return static_cast<int>((span.length + kChunk - 1) / kChunk); }
  __device__ __forceinline__ int rows(int last) const {  // of the last chunk, or more
    return static_cast<int>(span.length - static_cast<std::int64_t>(last) * kChunk);
  }
  // Address of a chunk in a tensor of `element` bytes, and of the state before it.
  __device__ __forceinline__ char* place(const Strided& s, std::int64_t index, int element = 2) const {
    return static_cast<char*>(s.data) +
           (span.batch * s.batch + (span.begin + index * kChunk) * s.token + head * s.head) * element;
  }
  __device__ __forceinline__ std::int64_t states_step() const { return p.heads * kImageBytes; }
  __device__ __forceinline__ const char* state(int index) const {
    return static_cast<const char*>(p.states) + (span.chunk_begin + index) * states_step() + head * kImageBytes;
  }
  // Where a walk from chunk `last` back begins: what is read is asked for a chunk ahead, gates so many.
  __device__ __forceinline__ void start(const Places& places, const Gradients& d, int last, int gate_bytes,
                                        int gates_ahead) const {
    const auto start = [&](Places::Tensor tensor, const Strided& s, int index, int element = 2) {
      const bool there = s.data != nullptr;
      places.start(last, tensor, there ? place(s, index, element) : nullptr, there ? s.token * kChunk * element : 0);
    };
    start(Places::q, p.q, last - 1);
    start(Places::d_o, d.d_o, last - 1);
    start(Places::k, p.k, last - 1);
    start(Places::v, p.v, last - 1);
    places.start(last, Places::states, state(last - 1), states_step());
    start(Places::g, p.g, last - gates_ahead, gate_bytes);
    start(Places::dq, d.dq, last);
    start(Places::dk, d.dk, last);
    start(Places::dv, d.dv, last);
    start(Places::dg, d.dg, last, gate_bytes);
  }
};

// This warp's rows of a tile to a matrix.
__device__ __forceinline__ void store_tile_rows(std::uint32_t tile, __nv_bfloat16* matrix, int stride, int rows,
                                                int columns, int thread) {
  const int piece = thread & 7;
  const int first = (thread >> 5) * 16 + ((thread & 31) >> 3), inside = piece * 8 < columns ? rows - first : 0;
  __nv_bfloat16* to = matrix + first * stride + piece * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (4 * i < inside) store_global_16(to, load_shared_16(tile + tile_piece(first + 4 * i, piece)));
    to += 4 * stride;
  }
  __syncwarp();
}
// Rows of an accumulator, rounded, to a matrix, through the warp's own rows of a tile.
template <class Core, bool kAgain = true>
__device__ __forceinline__ void store_through(std::uint32_t tile, __nv_bfloat16* matrix, int stride,
                                              const Accumulator& a, int rows, int columns) {
  const auto own = [] { return kAgain ? thread_shuffled<Core>(fresh_thread()) : fresh_thread(); };
  put_rounded<Core>(tile, a, own());
  __syncwarp();
  store_tile_rows(tile, matrix, stride, rows, columns, own());
}

// Whether this thread is of the block's first group, as the compiler sees it to be the same for the warp.
__device__ __forceinline__ bool in_first_group() {
  return __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0) == 0;
}

// Sum over the columns of a tile times an accumulator, of this thread's two rows and columns.
__device__ __forceinline__ float2 dot_rows(std::uint32_t tile, const Accumulator& a, int thread) {
  std::uint32_t x[16];
  load_operand<Stored::k_inner>(x, tile, thread);
  return dot_rows(a, two_of_operand(x));
}

// What the quad of this thread's lanes has found of its two rows, to a vector of 64 floats.
__device__ __forceinline__ void put_rows(std::uint32_t vector, float2 of_rows, int thread) {
  if (thread % 4 != 0) return;
  const int row = row_of_element(thread, 0);
  put_float(vector, row, of_rows.x);
  put_float(vector, row + 8, of_rows.y);
}

// Of a sequence and head, in f32 [N,G,K,V].
template <class T>
__device__ __forceinline__ T* state_of(T* states, const Params& p, unsigned unit) {
  return states == nullptr ? nullptr : states + unit * (static_cast<std::int64_t>(p.key_dim) * p.value_dim);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
