// Chunk form, backward: one sequence and key-value head, chunks in reverse. With q, k, v gated as in chunk_operands,
// h the state before the chunk, H the state after it and dH its gradient (README.md):
//   dP = tril(do v^T)          dq = do h^T + dP k              dk = total * (v dH^T) + dP^T q
//   dv = (total * k) dH + P^T do      dh = total * dH + q^T do
//   dg_t = sum over V of dh * h  -  sum over i < t in the chunk of (q_i dq_i - k_i dk_i)
// so that the sums over the sequence never grow past a chunk. From the chunk's start: whatever is taken away again, a
// gate before it has let through; of dH * H none may have. dgv the other way, from the chunk's end, for do o has the
// rounding of o. Compiled once per SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/gated_linear_attention/cpu/chunk_backward.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "flashgla/ops/gated_linear_attention/cpu/chunk_anchored-inl.h"
#include "flashgla/ops/gated_linear_attention/cpu/chunk_operands-inl.h"
#include "flashgla/ops/gated_linear_attention/cpu/chunk_problem.h"

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::gated_linear_attention::chunk::HWY_NAMESPACE {

struct BackwardBuffers {
  Keys keys;
  Anchored anchored;
  // [kBlock][ldk]
  float* q;
  float* q_plain;  // scale * phi(q), for chunks out of range
  float* dq;
  float* dk;
  float* dg;  // q dq - k dk
  // [ldk][kBlock]
  float* k_t;
  float* k_update_t;
  // [kBlock][ldv]
  float* d_o;
  float* o;
  float* dv;
  float* dgv;
  // [ldv][kBlock]
  float* v_t;
  float* dv_t;
  // [kBlock][kBlock]
  float* p;
  float* dp;
  float* row_k;       // [ldk]
  float* row_v;       // [ldv]
  float* boundary_k;  // [ldk] sum over V of dh * h
  float* boundary_v;  // [ldv] sum over K of dH * H
  Ahead ahead;
  float* d_state;  // [values][ldk]
  float* states;   // kSegmentBlocks + 1 of them: before each chunk of the segment, and after the last

  static std::int64_t floats(const Shapes& s) {
    return Keys::floats(s) + Anchored::floats(s) + kBlock * (7 * s.ldk + 6 * s.ldv + 2 * kBlock) + 2 * (s.ldk + s.ldv) +
           (kSegmentBlocks + 2) * s.state_floats();
  }
  BackwardBuffers(const Shapes& s, float* memory) : keys(Keys::take(memory, s)), anchored(Anchored::take(memory, s)) {
    auto take = [&](std::initializer_list<float**> pointers, std::int64_t floats) {
      for (float** pointer : pointers) {
        *pointer = memory;
        memory += floats;
      }
    };
    take({&q, &q_plain, &dq, &dk, &dg, &k_t, &k_update_t}, kBlock * s.ldk);
    take({&d_o, &o, &dv, &dgv, &v_t, &dv_t}, kBlock * s.ldv);
    take({&p, &dp}, kBlock * kBlock);
    take({&row_k, &boundary_k}, s.ldk);
    take({&row_v, &boundary_v}, s.ldv);
    take({&d_state, &states}, s.state_floats());
  }
};

// Sums over V of a state times its gradient, [ldk].
HWY_NOINLINE void SumOverValues(const Shapes& s, const float* d_state, const float* state, float* sums) {
  const D d;
  FillZero(sums, s.ldk);
  for (std::int64_t v = 0; v < s.values; ++v) {
    for (std::int64_t k = 0; k < padded(s.K); k += Lanes()) {
      const Vec product = hn::Mul(hn::LoadU(d, d_state + v * s.ldk + k), hn::LoadU(d, state + v * s.ldk + k));
      hn::StoreU(hn::Add(hn::LoadU(d, sums + k), product), d, sums + k);
    }
  }
}
// And over K, [values].
HWY_NOINLINE void SumOverKeys(const Shapes& s, const float* d_state, const float* state, float* sums) {
  const D d;
  for (std::int64_t v = 0; v < s.values; ++v) {
    Vec row = hn::Zero(d);
    for (std::int64_t k = 0; k < padded(s.K); k += Lanes()) {
      row = hn::Add(row, hn::Mul(hn::LoadU(d, d_state + v * s.ldk + k), hn::LoadU(d, state + v * s.ldk + k)));
    }
    sums[v] = hn::GetLane(hn::SumOfLanes(d, row));
  }
}

// target (+ or -)= x * y
template <int kSign>
HWY_INLINE void AccumulateProduct(std::int64_t n, const float* x, const float* y, float* target) {
  const D d;
  for (std::int64_t i = 0; i < n; i += Lanes()) {
    const Vec a = hn::LoadU(d, x + i);
    const Vec t = hn::LoadU(d, target + i);
    hn::StoreU(kSign > 0 ? hn::MulAdd(a, hn::LoadU(d, y + i), t) : hn::NegMulAdd(a, hn::LoadU(d, y + i), t), d,
               target + i);
  }
}

// Over rows [count][ld].
template <int kSign>
HWY_INLINE void AccumulateProducts(std::int64_t count, std::int64_t n, std::int64_t ld, const float* x, const float* y,
                                   float* target) {
  for (std::int64_t t = 0; t < count; ++t) AccumulateProduct<kSign>(n, x + t * ld, y + t * ld, target + t * ld);
}

// Loads do; with a normaliser turns it into the gradient of the undivided output and of the divisor:
// do / den and -(do . o) / den.
HWY_NOINLINE void LoadOutputGradients(const Shapes& s, const BackwardTask& task, std::int64_t begin, std::int64_t count,
                                      std::int64_t head, const float* state, BackwardBuffers& b) {
  const D d;
  for (std::int64_t t = 0; t < count; ++t) {
    float* row = b.d_o + t * s.ldv;
    LoadRow(task.d_o.dtype, task.d_o.row(begin + t, head), s.V, s.ldv, row);
    if (!s.normalize) continue;
    LoadRow(task.o.dtype, task.o.row(begin + t, head), s.V, s.ldv, b.row_v);
    Vec dot = hn::Zero(d);
    for (std::int64_t v = 0; v < s.ldv; v += Lanes()) {
      dot = hn::MulAdd(hn::LoadU(d, row + v), hn::LoadU(d, b.row_v + v), dot);
    }
    Vec divisor = hn::Zero(d);
    for (std::int64_t k = 0; k < padded(s.K); k += Lanes()) {
      divisor = hn::MulAdd(hn::LoadU(d, b.q + t * s.ldk + k), hn::LoadU(d, state + s.V * s.ldk + k), divisor);
    }
    for (std::int64_t j = 0; j <= t / kLane * kLane; j += kLane) {
      for (std::int64_t i = j; i < j + kLane; i += Lanes())
        divisor = hn::Add(divisor, hn::LoadU(d, b.p + t * kBlock + i));
    }
    const float inverse = 1.0f / (hn::GetLane(hn::SumOfLanes(d, divisor)) + static_cast<float>(kNormalizerEpsilon));
    for (std::int64_t v = 0; v < s.ldv; v += Lanes()) {
      hn::StoreU(hn::Mul(hn::LoadU(d, row + v), hn::Set(d, inverse)), d, row + v);
    }
    row[s.V] = -hn::GetLane(hn::SumOfLanes(d, dot)) * inverse;
  }
  FillZero(b.d_o + count * s.ldv, (padded(count) - count) * s.ldv);
}

// The state's gradient from after the chunk to before it; `head` after head of the group.
HWY_NOINLINE void AdvanceGradient(const Shapes& s, const Gates& gates, const Gates& gates_values, std::int64_t count,
                                  std::int64_t head, BackwardBuffers& b) {
  const D d;
  const std::int64_t wide_k = padded(s.K);
  if (head == 0) {
    if (s.gate_values) {
      for (std::int64_t v = 0; v < s.values; ++v) {
        const Vec total = hn::Set(d, gates_values.total[v]);
        float* row = b.d_state + v * s.ldk;
        for (std::int64_t k = 0; k < s.ldk; k += Lanes()) hn::StoreU(hn::Mul(hn::LoadU(d, row + k), total), d, row + k);
      }
    }
    Gemm<Start::scale>(s.values, wide_k, count, {b.d_o, 1, s.ldv}, b.q, s.ldk, b.d_state, s.ldk, nullptr, gates.total,
                       &b.ahead);
  } else {
    Gemm<Start::add>(s.values, wide_k, count, {b.d_o, 1, s.ldv}, b.q, s.ldk, b.d_state, s.ldk, nullptr, nullptr,
                     &b.ahead);
  }
}

// dq of one query head, and its part of dk, dv, dg and of the state's gradient.
HWY_NOINLINE void BackwardQueries(const Shapes& s, const BackwardTask& task, std::int64_t begin, std::int64_t count,
                                  std::int64_t head, const float* state, BackwardBuffers& b) {
  const D d;
  Keys& keys = b.keys;
  const std::int64_t tokens = padded(count);
  const std::int64_t wide_k = padded(s.K);
  PrepareQueries(s, task, begin, count, head, &keys.gates.before, b.q);
  if (keys.in_range) {
    for (std::int64_t i = 0; i < tokens; i += kLane) {
      Gemm<Start::zero>(kLane, i + kLane, s.K, {b.q + i * s.ldk, s.ldk, 1}, b.k_t, kBlock, b.p + i * kBlock, kBlock);
    }
    MaskAbove(0, tokens, tokens, b.p);
  }
  LoadOutputGradients(s, task, begin, count, head, state, b);
  if (s.gate_values) {
    for (std::int64_t t = 0; t < count; ++t) {
      LoadRow(task.o.dtype, task.o.row(begin + t, head), s.V, s.ldv, b.row_v);
      AccumulateProduct<1>(s.ldv, b.row_v, b.d_o + t * s.ldv, b.dgv + t * s.ldv);
    }
    if (!keys.in_range) {
      PrepareQueries(s, task, begin, count, head, nullptr, b.q_plain);
      std::memcpy(b.o, b.d_o, static_cast<std::size_t>(count * s.ldv) * sizeof(float));
    }
    MultiplyRows(keys.gates_values.before, 0, count, s.ldv, s.ldv, b.d_o, b.d_o);
  } else if (!keys.in_range) {
    PrepareQueries(s, task, begin, count, head, nullptr, b.q_plain);
  }

  Gemm<Start::zero>(count, wide_k, s.values, {b.d_o, s.ldv, 1}, state, s.ldk, b.dq, s.ldk, nullptr, nullptr, &b.ahead);
  Factors back = keys.gates.before;  // from b.dq to the gradient of phi(q), less the scale
  if (keys.in_range) {
    for (std::int64_t i = 0; i < tokens; i += kLane) {
      Gemm<Start::zero>(kLane, i + kLane, s.values, {b.d_o + i * s.ldv, s.ldv, 1}, b.v_t, kBlock, b.dp + i * kBlock,
                        kBlock);
    }
    MaskAbove(0, tokens, tokens, b.dp);
    for (std::int64_t i = 0; i < count; i += kLane) {
      Gemm<Start::add>(HWY_MIN(kLane, count - i), wide_k, HWY_MIN(i + kLane, count), {b.dp + i * kBlock, kBlock, 1},
                       keys.k, s.ldk, b.dq + i * s.ldk, s.ldk);
      Gemm<Start::add>(HWY_MIN(kLane, count - i), wide_k, count - i, {b.dp + i * kBlock + i, 1, kBlock},
                       b.q + i * s.ldk, s.ldk, b.dk + i * s.ldk, s.ldk);
      Gemm<Start::add>(s.values, i + kLane, HWY_MIN(kLane, count - i), {b.d_o + i * s.ldv, 1, s.ldv}, b.p + i * kBlock,
                       kBlock, b.dv_t, kBlock);
    }
    AccumulateProducts<1>(count, wide_k, s.ldk, b.q, b.dq, b.dg);
  } else {
    MultiplyRows(back, 0, count, wide_k, s.ldk, b.dq, b.dq);
    AnchoredBackward(s, keys, b.q_plain, s.gate_values ? b.o : b.d_o, count, b.anchored, b.dq, b.dk, b.dv);
    AccumulateProducts<1>(count, wide_k, s.ldk, b.q_plain, b.dq, b.dg);
  }
  if (task.dq) {
    const Vec scale = hn::Set(d, s.scale);
    for (std::int64_t t = 0; t < count; ++t) {
      float* row = b.dq + t * s.ldk;
      if (keys.in_range) MultiplyRow(back, t, wide_k, row, row);
      for (std::int64_t k = 0; k < wide_k; k += Lanes()) hn::StoreU(hn::Mul(hn::LoadU(d, row + k), scale), d, row + k);
      if (s.feature_map != FeatureMap::identity) {
        LoadRow(task.in.q.dtype, task.in.q.row(begin + t, head), s.K, s.ldk, b.row_k);
        MultiplyFeatureDerivative(s.feature_map, s.K, b.row_k, row);
      }
      StoreRow(task.dq.dtype, row, s.K, task.dq.row(begin + t, head));
    }
  }
  AdvanceGradient(s, keys.gates, keys.gates_values, count, head, b);
}

// The gate's gradient from its per-token terms [count][ld]: the boundary's less the sums before each token, or the
// boundary's and the sums from it on.
template <bool kFromStart>
HWY_NOINLINE void StoreGateGradients(const Gates& gates, const Rows& target, std::int64_t begin, std::int64_t count,
                                     std::int64_t channels, std::int64_t ld, const float* terms, float* sum,
                                     double* total, float* row) {
  const D d;
  if (gates.log2.step == 1) {
    for (std::int64_t n = 0; n < count; ++n) {
      const std::int64_t t = kFromStart ? n : count - 1 - n;
      for (std::int64_t i = 0; i < padded(channels); i += Lanes()) {
        const Vec before = hn::LoadU(d, sum + i), term = hn::LoadU(d, terms + t * ld + i);
        const Vec after = kFromStart ? hn::Sub(before, term) : hn::Add(before, term);
        const Vec value = kFromStart ? before : after;
        hn::StoreU(after, d, sum + i);
        // exp(-inf) h = 0 whatever h; the sums only approach it.
        hn::StoreU(hn::IfThenZeroElse(hn::Eq(gates.log2.at(t, i), hn::Set(d, -HUGE_VALF)), value), d, row + i);
      }
      StoreRow(target.dtype, row, channels, target.row(begin + t));
    }
    return;
  }
  double running = 0.0;
  for (std::int64_t i = 0; i < channels; ++i) running += static_cast<double>(sum[i]);
  for (std::int64_t n = 0; n < count; ++n) {
    const std::int64_t t = kFromStart ? n : count - 1 - n;
    Vec token = hn::Zero(d);
    for (std::int64_t i = 0; i < padded(channels); i += Lanes())
      token = hn::Add(token, hn::LoadU(d, terms + t * ld + i));
    const auto term = static_cast<double>(hn::GetLane(hn::SumOfLanes(d, token)));
    if (!kFromStart) running += term;
    const bool reset = gates.log2.row(t)[0] == -HUGE_VALF;
    if (total != nullptr && !reset) *total += running;
    if (target) {
      row[0] = reset ? 0.0f : static_cast<float>(running);
      StoreRow(target.dtype, row, 1, target.row(begin + t));
    }
    if (kFromStart) running -= term;
  }
}

HWY_NOINLINE void BackwardBlock(const Shapes& s, const BackwardTask& task, std::int64_t begin, std::int64_t count,
                                const float* state, const float* next_state, double* dg_sum, BackwardBuffers& b) {
  Keys& keys = b.keys;
  const std::int64_t tokens = padded(count);
  const std::int64_t wide_k = padded(s.K);
  const std::int64_t wide_v = padded(s.values);
  const bool wants_dg = static_cast<bool>(task.dg) || dg_sum != nullptr;
  PrepareKeys(s, task, begin, count, keys);
  if (task.dgv) SumOverKeys(s, b.d_state, next_state, b.boundary_v);
  FillZero(b.dg, kBlock * s.ldk);
  FillZero(b.dgv, kBlock * s.ldv);

  Transpose(tokens, wide_v, keys.v, s.ldv, b.v_t, kBlock);
  Transpose(tokens, wide_k, keys.k_update, s.ldk, b.k_update_t, kBlock);
  Gemm<Start::zero>(count, wide_k, s.values, {keys.v_update, s.ldv, 1}, b.d_state, s.ldk, b.dk, s.ldk, nullptr, nullptr,
                    &b.ahead);
  Gemm<Start::zero>(s.values, tokens, s.K, {b.d_state, s.ldk, 1}, b.k_update_t, kBlock, b.dv_t, kBlock, nullptr,
                    nullptr, &b.ahead);
  FillZero(b.dv_t + s.values * kBlock, (wide_v - s.values) * kBlock);
  const Factors totals = {keys.gates.total, 0, 1};
  if (keys.in_range) {
    Transpose(tokens, wide_k, keys.k, s.ldk, b.k_t, kBlock);
    for (std::int64_t t = 0; t < count; ++t) MultiplyRow(totals, 0, wide_k, b.dk + t * s.ldk, b.dk + t * s.ldk);
    if (s.gate_values) {
      for (std::int64_t v = 0; v < s.values; ++v) {
        for (std::int64_t t = 0; t < tokens; ++t) b.dv_t[v * kBlock + t] *= keys.gates_values.total[v];
      }
    }
  } else {
    MultiplyRows(keys.gates.after, 0, count, wide_k, s.ldk, b.dk, b.dk);
    Transpose(wide_v, tokens, b.dv_t, kBlock, b.dv, s.ldv);
    if (s.gate_values) {
      MultiplyRows(keys.gates_values.after, 0, count, wide_v, s.ldv, b.dv, b.dv);
    }
  }
  for (std::int64_t head = 0; head < s.group; ++head) BackwardQueries(s, task, begin, count, head, state, b);
  if (keys.in_range) Transpose(wide_v, tokens, b.dv_t, kBlock, b.dv, s.ldv);

  for (std::int64_t t = 0; t < count; ++t) {
    float* dk = b.dk + t * s.ldk;
    float* dv = b.dv + t * s.ldv;
    AccumulateProduct<-1>(wide_k, keys.k + t * s.ldk, dk, b.dg + t * s.ldk);
    if (s.gate_values) AccumulateProduct<-1>(wide_v, keys.v + t * s.ldv, dv, b.dgv + t * s.ldv);
    if (keys.in_range) {
      MultiplyRow(keys.gates.inverse, t, wide_k, dk, dk);
      if (s.gate_values) MultiplyRow(keys.gates_values.inverse, t, wide_v, dv, dv);
    }
    if (task.dk) {
      if (s.feature_map != FeatureMap::identity) {
        LoadRow(task.in.k.dtype, task.in.k.row(begin + t), s.K, s.ldk, b.row_k);
        MultiplyFeatureDerivative(s.feature_map, s.K, b.row_k, dk);
      }
      StoreRow(task.dk.dtype, dk, s.K, task.dk.row(begin + t));
    }
    if (task.dv) StoreRow(task.dv.dtype, dv, s.V, task.dv.row(begin + t));
  }
  if (wants_dg) {
    SumOverValues(s, b.d_state, state, b.boundary_k);
    StoreGateGradients<true>(keys.gates, task.dg, begin, count, s.K, s.ldk, b.dg, b.boundary_k, dg_sum, b.row_k);
  }
  if (task.dgv) {
    StoreGateGradients<false>(keys.gates_values, task.dgv, begin, count, s.V, s.ldv, b.dgv, b.boundary_v, nullptr,
                              b.row_v);
  }
}

// What chunk i of the segment should find near: its own results' memory, and its share of the chunk before it and of
// the segment before.
HWY_NOINLINE void LookAhead(const Shapes& s, const BackwardTask& task, std::int64_t segment, std::int64_t i,
                            BackwardBuffers& b) {
  const std::int64_t begin = segment * kSegment + i * kBlock;
  const std::int64_t count = HWY_MIN(kBlock, task.length - begin);
  const std::int64_t gate_channels = s.key_gates() ? s.K : 1;
  b.ahead.Restart(count * s.K * s.values * (2 + 2 * s.group));
  AddRows(b.ahead, task.dq, begin, count, s.K, s.group);
  if (segment > 0) {
    AddRows(b.ahead, task.in.g, begin - kSegment, kBlock, gate_channels);
    AddRows(b.ahead, task.in.gv, begin - kSegment, kBlock, s.V);
    AddRows(b.ahead, task.in.k, begin - kSegment, kBlock, s.K);
    AddRows(b.ahead, task.in.v, begin - kSegment, kBlock, s.V);
    const std::int64_t share = s.state_floats() / kSegmentBlocks;
    b.ahead.Add(task.states + (segment - 1) * s.kept_floats + i * share, 1, 0,
                share * static_cast<std::int64_t>(sizeof(float)));
  }
  if (begin > 0) {
    AddRows(b.ahead, task.in.q, begin - kBlock, kBlock, s.K, s.group);
    AddRows(b.ahead, task.d_o, begin - kBlock, kBlock, s.V, s.group);
    if (s.gate_values || s.normalize) AddRows(b.ahead, task.o, begin - kBlock, kBlock, s.V, s.group);
  }
  AddRows(b.ahead, task.dk, begin, count, s.K);
  AddRows(b.ahead, task.dv, begin, count, s.V);
  AddRows(b.ahead, task.dg, begin, count, gate_channels);
  AddRows(b.ahead, task.dgv, begin, count, s.V);
}

HWY_INLINE void LoadEnd(const Shapes& s, const BackwardTask& task, float* d_state) {
  if (task.d_end != nullptr) {
    CopyState(s, task.d_end, d_state);
  } else {
    LoadState(s, task.d_ht, task.d_zt, d_state);
  }
}

void BackwardTaskKernel(const Shapes& s, const BackwardTask& task, float* workspace) {
  BackwardBuffers b(s, workspace);
  const std::int64_t size = s.state_floats();
  LoadEnd(s, task, b.d_state);
  const std::int64_t segments = (task.length + kSegment - 1) / kSegment;
  for (std::int64_t segment = segments; segment-- > 0;) {
    const std::int64_t first = segment * kSegment;
    const std::int64_t blocks = HWY_MIN(kSegmentBlocks, (task.length - first + kBlock - 1) / kBlock);
    const bool last = segment + 1 == segments;
    // The state after the segment is the one before the next.
    if (!last) CopyState(s, b.states, b.states + kSegmentBlocks * size);
    CopyState(s, task.states + segment * s.kept_floats, b.states);
    if (task.dg_sum != nullptr) task.dg_sum[segment] = 0.0;
    for (std::int64_t i = 0; i < (last ? blocks : blocks - 1); ++i) {
      const std::int64_t begin = first + i * kBlock;
      const std::int64_t count = HWY_MIN(kBlock, task.length - begin);
      PrepareKeys(s, task, begin, count, b.keys);
      AdvanceState(s, b.keys, count, b.states + i * size, b.states + (i + 1) * size, nullptr);
    }
    for (std::int64_t i = blocks; i-- > 0;) {
      const std::int64_t begin = first + i * kBlock;
      LookAhead(s, task, segment, i, b);
      BackwardBlock(s, task, begin, HWY_MIN(kBlock, task.length - begin), b.states + i * size,
                    b.states + (i + 1) * size, task.dg_sum == nullptr ? nullptr : task.dg_sum + segment, b);
    }
  }
  StoreState(s, b.d_state, task.dh0, task.dz0);
}

void BackwardStatesKernel(const Shapes& s, const BackwardTask& task, float* workspace) {
  BackwardBuffers b(s, workspace);
  Keys& keys = b.keys;
  LoadEnd(s, task, b.d_state);
  for (std::int64_t begin = (task.length + kBlock - 1) / kBlock * kBlock; (begin -= kBlock) >= 0;) {
    const std::int64_t count = HWY_MIN(kBlock, task.length - begin);
    if (begin + kBlock >= task.length || (begin + kBlock) % kSegment == 0) {
      CopyState(s, b.d_state, task.d_states + begin / kSegment * s.kept_floats);
    }
    b.ahead.Restart(count * s.K * s.values * s.group);
    if (begin > 0) {
      AddRows(b.ahead, task.in.g, begin - kBlock, kBlock, s.key_gates() ? s.K : 1);
      AddRows(b.ahead, task.in.gv, begin - kBlock, kBlock, s.V);
      AddRows(b.ahead, task.in.q, begin - kBlock, kBlock, s.K, s.group);
      AddRows(b.ahead, task.d_o, begin - kBlock, kBlock, s.V, s.group);
    }
    LoadGates(task.in.g, begin, count, s.K, keys.gates);
    ComputeFactors(count, keys.gates);
    if (s.gate_values) {
      LoadGates(task.in.gv, begin, count, s.V, keys.gates_values);
      ComputeFactors(count, keys.gates_values);
    }
    for (std::int64_t head = 0; head < s.group; ++head) {
      PrepareQueries(s, task, begin, count, head, &keys.gates.before, b.q);
      LoadOutputGradients(s, task, begin, count, head, nullptr, b);
      if (s.gate_values) {
        MultiplyRows(keys.gates_values.before, 0, count, s.ldv, s.ldv, b.d_o, b.d_o);
      }
      AdvanceGradient(s, keys.gates, keys.gates_values, count, head, b);
    }
  }
  StoreState(s, b.d_state, task.dh0, nullptr);
}

std::int64_t BackwardWorkspace(const Shapes& s) { return BackwardBuffers::floats(s); }

}  // namespace flashgla::ops::gated_linear_attention::chunk::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::gated_linear_attention::chunk {
HWY_EXPORT(BackwardTaskKernel);
HWY_EXPORT(BackwardStatesKernel);
HWY_EXPORT(BackwardWorkspace);

std::int64_t backward_workspace(const Shapes& s) { return HWY_DYNAMIC_DISPATCH(BackwardWorkspace)(s); }
void backward_task(const Shapes& s, const BackwardTask& task, float* workspace) {
  HWY_DYNAMIC_DISPATCH(BackwardTaskKernel)(s, task, workspace);
}
void backward_states_task(const Shapes& s, const BackwardTask& task, float* workspace) {
  HWY_DYNAMIC_DISPATCH(BackwardStatesKernel)(s, task, workspace);
}
}  // namespace flashgla::ops::gated_linear_attention::chunk
#endif
