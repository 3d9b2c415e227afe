// Rows copied to aligned ones and back: the kernel, and which tensors of a call.
#include <algorithm>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kPieceBytes = 16;

// ---- device ----

// [batches, tokens, heads] rows; strides in bytes.
struct RowsInBytes {
  char* data;
  std::int64_t batch, token, head;
};

// One tensor, as the caller has it, and its aligned copy, which may have more tokens (the keys of a state) and wider
// rows than it.
struct RowCopy {
  RowsInBytes theirs, aligned;
  std::int64_t pieces, tokens, their_tokens;  // pieces: of the copy
  int heads, pieces_a_row, their_width;       // width: bytes
  int word;                                   // bytes that can be moved at once on their side: 2, 4, 8 or 16
};
constexpr int kMostCopies = 9;  // before the backward: of q, k, v, g, gv, h0, ht, do, dht
struct RowCopies {
  RowCopy of[kMostCopies];
};

// A piece of the copy, of which so many bytes are in the caller's row: from there, zeros beyond it, or (kBack) to
// there.
template <class Word, bool kBack>
__device__ __forceinline__ void move_piece(char* theirs, char* aligned, int inside) {
  constexpr int kWords = static_cast<int>(kPieceBytes / sizeof(Word));
  union {
    uint4 piece;
    Word words[kWords];
  } x;
  if constexpr (kBack) x.piece = *reinterpret_cast<const uint4*>(aligned);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    Word* const word = reinterpret_cast<Word*>(theirs) + i;
    const bool there = i * static_cast<int>(sizeof(Word)) < inside;
    if constexpr (kBack) {
      if (there) *word = x.words[i];
    } else {
      x.words[i] = there ? *word : Word{};
    }
  }
  if constexpr (!kBack) *reinterpret_cast<uint4*>(aligned) = x.piece;
}

// Thread: a piece. Grid: blocks of the largest copy x copies. Index: of all pieces of a copy.
template <class Index, bool kBack>
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(const __grid_constant__ RowCopies copies) {
  const RowCopy& c = copies.of[blockIdx.y];
  const Index at = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= static_cast<Index>(c.pieces)) return;
  const Index pieces_a_row = c.pieces_a_row, heads = c.heads, tokens = static_cast<Index>(c.tokens);
  const Index row = at / pieces_a_row, token_row = row / heads;
  const std::int64_t head = row % heads, token = token_row % tokens, batch = token_row / tokens;
  const int begin = static_cast<int>(at % pieces_a_row) * static_cast<int>(kPieceBytes);
  const int inside = token < c.their_tokens ? c.their_width - begin : 0;
  const auto place = [&](const RowsInBytes& s) {
    return s.data + batch * s.batch + token * s.token + head * s.head + begin;
  };
  char *const theirs = place(c.theirs), *const aligned = place(c.aligned);
  switch (c.word) {
    case 2:
      return move_piece<std::uint16_t, kBack>(theirs, aligned, inside);
    case 4:
      return move_piece<std::uint32_t, kBack>(theirs, aligned, inside);
    case 8:
      return move_piece<uint2, kBack>(theirs, aligned, inside);
    default:
      return move_piece<uint4, kBack>(theirs, aligned, inside);
  }
}

// ---- host ----

// The copies of one call, before its kernels, or (kBack) behind them what these have written.
template <bool kBack>
class Copies {
 public:
  Copies(Context& context, const Problem& problem) : context_(context), aligned_(with_aligned_rows(problem)) {}

  // The tensor itself where it is aligned and as wide, else room for a copy.
  TensorView keys(const TensorView& view) { return rows(view, aligned_.key_dim); }
  TensorView values(const TensorView& view) { return rows(view, aligned_.value_dim); }
  TensorView state(const TensorView& view) {  // [N, G, K, V]
    const std::int64_t K = aligned_.key_dim, V = aligned_.value_dim;
    if (!view || (view.size(2) == K && view.size(3) == V)) return view;
    return copy_of(view, {view.size(0), view.size(1), K, V}, 2, 1);
  }

  void launch() const {
    if (context_.planning() || most_pieces_ == 0) return;
    const auto blocks = static_cast<unsigned>((most_pieces_ + kThreads - 1) / kThreads);
    const auto kernel = most_pieces_ < std::int64_t{1} << 31 ? copy_rows_kernel<std::uint32_t, kBack>
                                                             : copy_rows_kernel<std::uint64_t, kBack>;
    flashgla::cuda::launch("gated_linear_attention copies of rows", kernel, dim3(blocks, static_cast<unsigned>(count_)),
                           kThreads, 0, static_cast<cudaStream_t>(context_.stream()),
                           flashgla::cuda::Begin::after_previous, copies_);
  }

 private:
  TensorView rows(const TensorView& view, std::int64_t width) {
    if (!view || (is_aligned(view) && view.size(3) == width)) return view;
    return copy_of(view, {view.size(0), view.size(1), view.size(2), width}, 1, 2);
  }
  // token, head: which of the dimensions are tokens (of a state its keys) and heads.
  TensorView copy_of(const TensorView& theirs, const Shape& shape, int token, int head) {
    const TensorView aligned = context_.scratch().tensor(shape, theirs.dtype, "gla: aligned rows");
    const auto bytes = static_cast<std::int64_t>(size_of(theirs.dtype));
    const auto in_bytes = [&](const TensorView& x) {
      return RowsInBytes{static_cast<char*>(x.data), x.stride[0] * bytes, x.stride[token] * bytes,
                         x.stride[head] * bytes};
    };
    RowCopy& copy = copies_.of[count_++];
    copy = {.theirs = in_bytes(theirs),
            .aligned = in_bytes(aligned),
            .pieces = static_cast<std::int64_t>(aligned.bytes()) / kPieceBytes,
            .tokens = aligned.size(token),
            .their_tokens = theirs.size(token),
            .heads = static_cast<int>(theirs.size(head)),
            .pieces_a_row = static_cast<int>(aligned.size(3) * bytes / kPieceBytes),
            .their_width = static_cast<int>(theirs.size(3) * bytes),
            .word = static_cast<int>(kPieceBytes)};
    const RowsInBytes& r = copy.theirs;
    const auto all = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(r.data)) | r.batch | r.token | r.head |
                     copy.their_width;
    while (all % copy.word != 0) copy.word /= 2;
    most_pieces_ = std::max(most_pieces_, copy.pieces);
    return aligned;
  }

  Context& context_;
  Problem aligned_;
  RowCopies copies_{};
  int count_ = 0;
  std::int64_t most_pieces_ = 0;
};

}  // namespace

void run_with_aligned_rows(Context& context, const Problem& problem, const Tensors& tensors, const RestOfCall& rest) {
  const ArenaScope scope(context.scratch());
  Copies<false> before(context, problem);
  Copies<true> behind(context, problem);
  Tensors to = tensors;
  const auto& [in, out, d_out, d_in] = tensors;
  to.in.q = before.keys(in.q);
  to.in.k = before.keys(in.k);
  to.in.v = before.values(in.v);
  if (has_gate_rows(problem)) to.in.g = before.keys(in.g);
  to.in.gv = before.values(in.gv);
  to.in.h0 = before.state(in.h0);
  to.out.o = behind.values(out.o);
  to.out.ht = behind.state(out.ht);
  to.d_out.d_o = before.values(d_out.d_o);
  to.d_out.d_ht = before.state(d_out.d_ht);
  to.d_in.dq = behind.keys(d_in.dq);
  to.d_in.dk = behind.keys(d_in.dk);
  to.d_in.dv = behind.values(d_in.dv);
  if (has_gate_rows(problem)) to.d_in.dg = behind.keys(d_in.dg);
  to.d_in.dgv = behind.values(d_in.dgv);
  to.d_in.dh0 = behind.state(d_in.dh0);
  before.launch();
  rest(to);
  behind.launch();
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
