// Chunk form, forward: one sequence and key-value head, chunk after chunk. Compiled once per SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/gated_linear_attention/cpu/chunk_forward.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "flashgla/ops/gated_linear_attention/cpu/chunk_anchored-inl.h"
#include "flashgla/ops/gated_linear_attention/cpu/chunk_operands-inl.h"
#include "flashgla/ops/gated_linear_attention/cpu/chunk_problem.h"

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::gated_linear_attention::chunk::HWY_NAMESPACE {

struct ForwardBuffers {
  Keys keys;
  Anchored anchored;
  float* q;      // [kBlock][ldk]
  float* q_t;    // [ldk][kBlock]
  float* p_t;    // [kBlock][kBlock], P transposed
  float* o_t;    // [ldv][kBlock]
  float* o;      // [kBlock][ldv]
  float* state;  // [values][ldk]
  Ahead ahead;

  static std::int64_t floats(const Shapes& s) {
    return Keys::floats(s) + Anchored::floats(s) + 2 * kBlock * (s.ldk + s.ldv) + kBlock * kBlock + s.state_floats();
  }
  ForwardBuffers(const Shapes& s, float* memory) : keys(Keys::take(memory, s)), anchored(Anchored::take(memory, s)) {
    q = memory;
    q_t = q + kBlock * s.ldk;
    o_t = q_t + kBlock * s.ldk;
    o = o_t + kBlock * s.ldv;
    p_t = o + kBlock * s.ldv;
    state = p_t + kBlock * kBlock;
  }
};

// o of one query head for tokens [begin, begin + count): before * (q h) + P v, transposed so that tokens lie along
// vectors: o^T = h^T q^T + v^T P^T.
HWY_NOINLINE void ForwardOutputs(const Shapes& s, const ForwardTask& task, std::int64_t begin, std::int64_t count,
                                 std::int64_t head, ForwardBuffers& b) {
  const D d;
  const std::int64_t tokens = padded(count);
  Keys& keys = b.keys;
  PrepareQueries(s, task, begin, count, head, &keys.gates.before, b.q);
  Transpose(tokens, padded(s.K), b.q, s.ldk, b.q_t, kBlock);
  Gemm<Start::zero>(s.values, tokens, s.K, {b.state, s.ldk, 1}, b.q_t, kBlock, b.o_t, kBlock, nullptr, nullptr,
                    &b.ahead);
  if (keys.in_range) {
    // Only columns i >= j of P^T, in blocks of kLane.
    for (std::int64_t j = 0; j < tokens; j += kLane) {
      Gemm<Start::zero>(kLane, tokens - j, s.K, {keys.k + j * s.ldk, s.ldk, 1}, b.q_t + j, kBlock,
                        b.p_t + j * kBlock + j, kBlock);
    }
    MaskBelow(tokens, b.p_t);
    for (std::int64_t j = 0; j < tokens; j += kLane) {
      Gemm<Start::add>(s.values, tokens - j, HWY_MIN(kLane, count - j), {keys.v + j * s.ldv, 1, s.ldv},
                       b.p_t + j * kBlock + j, kBlock, b.o_t + j, kBlock);
    }
  }
  FillZero(b.o_t + s.values * kBlock, (padded(s.values) - s.values) * kBlock);
  Transpose(padded(s.values), tokens, b.o_t, kBlock, b.o, s.ldv);
  if (s.gate_values) {
    MultiplyRows(keys.gates_values.before, 0, count, padded(s.V), s.ldv, b.o, b.o);
  }
  if (!keys.in_range) {
    PrepareQueries(s, task, begin, count, head, nullptr, b.q);
    AnchoredForward(s, keys, b.q, count, b.anchored, b.o);
  }
  for (std::int64_t t = 0; t < count; ++t) {
    float* row = b.o + t * s.ldv;
    if (s.normalize) {
      const Vec inverse = hn::Set(d, 1.0f / (row[s.V] + static_cast<float>(kNormalizerEpsilon)));
      for (std::int64_t v = 0; v < s.V; v += Lanes()) hn::StoreU(hn::Mul(hn::LoadU(d, row + v), inverse), d, row + v);
    }
    StoreRow(task.o.dtype, row, s.V, task.o.row(begin + t, head));
  }
}

void ForwardTaskKernel(const Shapes& s, const ForwardTask& task, float* workspace) {
  ForwardBuffers b(s, workspace);
  if (task.start != nullptr) {
    CopyState(s, task.start, b.state);
  } else {
    LoadState(s, task.h0, task.z0, b.state);
  }
  for (std::int64_t begin = 0; begin < task.length; begin += kBlock) {
    const std::int64_t count = HWY_MIN(kBlock, task.length - begin);
    if (task.states != nullptr && begin % kSegment == 0) {
      CopyState(s, b.state, task.states + begin / kSegment * s.kept_floats);
    }
    PrepareKeys(s, task, begin, count, b.keys);
    const std::int64_t next = begin + kBlock;
    const std::int64_t next_count = HWY_MIN(kBlock, task.length - next);
    b.ahead.Restart(kBlock * s.K * s.values * (task.o ? 1 + s.group : 1));
    if (task.o) AddRows(b.ahead, task.o, begin, count, s.V, s.group);
    AddRows(b.ahead, task.in.g, next, next_count, s.key_gates() ? s.K : 1);
    AddRows(b.ahead, task.in.gv, next, next_count, s.V);
    AddRows(b.ahead, task.in.k, next, next_count, s.K);
    AddRows(b.ahead, task.in.v, next, next_count, s.V);
    if (task.o) AddRows(b.ahead, task.in.q, next, next_count, s.K, s.group);
    if (task.o) {
      for (std::int64_t head = 0; head < s.group; ++head) ForwardOutputs(s, task, begin, count, head, b);
    }
    AdvanceState(s, b.keys, count, b.state, b.state, &b.ahead);
  }
  StoreState(s, b.state, task.ht, task.zt);
}

std::int64_t ForwardWorkspace(const Shapes& s) { return ForwardBuffers::floats(s); }

}  // namespace flashgla::ops::gated_linear_attention::chunk::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::gated_linear_attention::chunk {
HWY_EXPORT(ForwardTaskKernel);
HWY_EXPORT(ForwardWorkspace);

std::int64_t forward_workspace(const Shapes& s) { return HWY_DYNAMIC_DISPATCH(ForwardWorkspace)(s); }
void forward_task(const Shapes& s, const ForwardTask& task, float* workspace) {
  HWY_DYNAMIC_DISPATCH(ForwardTaskKernel)(s, task, workspace);
}
}  // namespace flashgla::ops::gated_linear_attention::chunk
#endif
