#include "flashgla/ops/gated_linear_attention/cuda/estimates.h"

#include <algorithm>
#include <cmath>

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

// Bytes a microsecond of kernels that move many.
constexpr double kRate = 3.45e6, kPreparationRate = 4.86e6, kEndsRate = 2.5e6, kStatesRate = 4.2e6;

constexpr std::int64_t in_parts(std::int64_t of, std::int64_t each) { return (of + each - 1) / each; }

double times(std::int64_t count, double each) { return static_cast<double>(count) * each; }

// Bytes of a chunk's rows of so many channels in 16 bits.
double chunk_bytes(std::int64_t channels) { return static_cast<double>(channels * kChunk * 2); }

// By kind of gate.
struct ByGate {
  double none, constant, scalar, key;
  double of(GateKind gate) const {
    return gate == GateKind::none       ? none
           : gate == GateKind::constant ? constant
           : gate == GateKind::scalar   ? scalar
                                        : key;
  }
};

// Tensors of k's width that a chunk of a kv head has beside q: k, and gates over keys, which in f32 are two.
std::int64_t gate_tensors(const Params& p) { return p.gate != GateKind::key ? 0 : p.gate_dtype == DType::f32 ? 2 : 1; }
std::int64_t key_tensors(const Params& p) { return 1 + gate_tensors(p); }

// Whether sequences differ in length.
bool differ(const Sequences& s) { return s.packed && s.count > 1; }

// Chunks of the longest sequence. Where of packed ones the mean alone is known, lengths are exponentially distributed,
// and the longest of N is 1 + 1/2 + .. + 1/N means.
std::int64_t longest_in_chunks(const Sequences& s) {
  const std::int64_t all = s.chunks_each();
  if (!differ(s)) return all;
  if (s.longest > 0) return in_parts(s.longest, kChunk);
  const auto count = static_cast<double>(s.count);
  const double means = std::log(count) + 0.5772 + 0.5 / count;
  return std::min(all, static_cast<std::int64_t>(std::ceil(means * static_cast<double>(all) / count)));
}

// Where those that walk through segments of at most so many chunks share what there is room for, a share of all chunks
// each: whatever is ready takes the place of what has ended, and the last may begin late.
double unlike(double chunks, double share) { return std::max(chunks, share) + 0.5 * std::min(chunks, share); }

// Chunks one after the other where so many blocks walk through a sequence each, in rounds of as many as there is room
// for.
double chunks_in_turn(const Sequences& s, std::int64_t blocks, std::int64_t room) {
  const std::int64_t longest = longest_in_chunks(s);
  if (!differ(s)) return times(in_parts(blocks, room), static_cast<double>(longest));
  const double each = static_cast<double>(blocks) / static_cast<double>(s.count);
  return unlike(static_cast<double>(longest), times(s.most_chunks, each / static_cast<double>(room)));
}

// Where chunks wait for one another and all of them for memory: more than the longer one, less than the sum.
double beside(double chunks, double memory) { return std::hypot(chunks, memory); }

double preparation_microseconds(const Params& p) {
  const std::int64_t blocks = tiles_of(p.key_dim);
  const std::int64_t written = 1 + (p.gate == GateKind::none ? 0 : 2 * blocks);  // tiles
  return times(p.sequences.most_chunks * p.heads * p.group,
               chunk_bytes((1 + key_tensors(p)) * p.key_dim + written * kTile) / kPreparationRate);
}

}  // namespace

TimeCut cut_time(const Params& p, std::int64_t out_heads, int multiprocessors) {
  const Sequences& s = p.sequences;
  const int blocks = tiles_of(p.key_dim), values = tiles_of(p.value_dim), KB = blocks_of_launch(blocks);
  const std::int64_t each = out_heads * in_parts(values, 2),  // blocks of a segment
      busy = std::max<std::int64_t>(s.count * each, 1),
                     slots = std::int64_t{multiprocessors} * recurrence_blocks(KB, values > 1 ? 2 : 1);
  const std::int64_t all = s.chunks_each(), longest = longest_in_chunks(s);
  const double step = recurrence_launches(blocks) * (0.4 + 0.45 * KB), end_step = 0.7;  // of a chunk
  const double ends_bytes = times(s.most_chunks * p.heads, chunk_bytes((blocks + values) * kTile)),
               state_bytes = times(p.heads * blocks * values, kTile * kTile * 4);  // of a segment
  // Chunks one after the other, in segments of at most so many.
  const auto walked = [&](std::int64_t chunks) {
    const std::int64_t full = differ(s) ? all / chunks * each : in_parts(all, chunks) * busy;
    const double in_turn = times(in_parts(full, slots), static_cast<double>(chunks));
    if (!differ(s)) return in_turn;
    const double share = times(s.most_chunks * each, 1.0 / static_cast<double>(slots));
    return std::max(in_turn, unlike(static_cast<double>(chunks), share));
  };
  TimeCut best;
  best.microseconds = chunks_in_turn(s, busy, slots) * step;
  // Alike, no more segments than there is room for at once.
  const std::int64_t limit = differ(s) ? all / 2 : std::min(slots / busy, all / 2);
  // Eighths apart, for this is worked out in every call; up to the limit itself.
  for (std::int64_t most = 2, next; most <= limit; most = next) {
    next = most == limit ? limit + 1 : std::min(limit, most + std::max<std::int64_t>(most / 8, 1));
    const std::int64_t chunks = in_parts(all, most), segments = in_parts(all, chunks),
                       places = differ(s) ? segments + s.count : segments * s.count;
    // Ends are written, read, made start states, the longest sequence's one after the other, and these read.
    const double to_walk = walked(chunks);
    const double microseconds = to_walk * step + std::max(to_walk * end_step, ends_bytes / kEndsRate) + 4.0 +
                                times(in_parts(longest, chunks), 0.2) + times(places, 4 * state_bytes / kStatesRate);
    if (microseconds < best.microseconds) {
      best = {static_cast<int>(segments), static_cast<int>(chunks), microseconds};
    }
  }
  return best;
}

double one_pass_microseconds(const Params& p, int multiprocessors) {
  const std::int64_t slices = tiles_of(p.value_dim), groups = p.sequences.count * p.heads * p.group * slices;
  constexpr ByGate kStep{.none = 0.75, .constant = 1.15, .scalar = 1.65, .key = 1.58};
  // What several slices of V read comes out of the L2 but for the first.
  const double keys = 1.0 + 0.23 * static_cast<double>(slices - 1);
  const double bytes =
      times(p.sequences.most_chunks * p.heads,
            keys * chunk_bytes((p.group + key_tensors(p)) * p.key_dim) + chunk_bytes((p.group + 1) * p.value_dim));
  return 5.0 + beside(chunks_in_turn(p.sequences, groups, 4 * multiprocessors) * kStep.of(p.gate), bytes / kRate);
}

double wide_pass_microseconds(const Params& p, int multiprocessors) {
  const bool wide_keys = p.key_dim > kTile, wide_values = p.value_dim > kTile;
  const std::int64_t slices = in_parts(p.value_dim, 2 * kTile), blocks = p.sequences.count * p.heads * p.group * slices;
  const bool in_pairs = wide_keys && wide_values && slices % 2 == 0,
             by_token = p.gate == GateKind::constant || p.gate == GateKind::scalar;
  const double step = in_pairs ? 1.79 : wide_keys ? (wide_values ? 2.58 : 2.23) : wide_values ? 1.24 : 1.03;
  const double bytes = times(p.sequences.most_chunks * p.heads, chunk_bytes((p.group + key_tensors(p)) * p.key_dim) +
                                                                    chunk_bytes((p.group + 1) * p.value_dim));
  return (in_pairs ? 8.3 : 7.1) +
         beside(chunks_in_turn(p.sequences, blocks, multiprocessors) * (step + (by_token ? 0.14 : 0.0)), bytes / kRate);
}

double two_passes_microseconds(const Params& p, int multiprocessors) {
  const std::int64_t key_blocks = tiles_of(p.key_dim), query_heads = p.heads * p.group;
  // Images of q~, k~ and P, v and o.
  const double bytes = times(p.sequences.most_chunks * query_heads,
                             chunk_bytes((2 * key_blocks + 1) * kTile) + chunk_bytes(2 * p.value_dim));
  return (key_blocks > 1 ? 10.4 : 9.3) + preparation_microseconds(p) +
         beside(cut_time(p, query_heads, multiprocessors).microseconds, bytes / kRate);
}

Form fastest_form(const Params& p, bool one_pass_fits, bool wide_pass_fits, int multiprocessors) {
  Form best = Form::two_passes;
  double least = two_passes_microseconds(p, multiprocessors);
  const auto consider = [&](Form form, double microseconds) {
    if (microseconds < least) {
      least = microseconds;
      best = form;
    }
  };
  if (one_pass_fits) consider(Form::one_pass, one_pass_microseconds(p, multiprocessors));
  if (wide_pass_fits) consider(Form::one_wide_pass, wide_pass_microseconds(p, multiprocessors));
  return best;
}

double one_kernel_backward_microseconds(const Params& p, int multiprocessors) {
  const std::int64_t blocks = p.sequences.count * p.heads;
  const bool by_key = p.gate == GateKind::key;
  constexpr ByGate kBegin{.none = 5.0, .constant = 8.0, .scalar = 5.5, .key = 7.5};
  constexpr ByGate kStep{.none = 1.31, .constant = 1.95, .scalar = 2.02, .key = 4.1};
  // A block of key gates shares a multiprocessor with a second one, and is slower for it.
  const double step = by_key && blocks > multiprocessors ? 3.55 : kStep.of(p.gate);
  const double bytes = times(p.sequences.most_chunks * p.heads,
                             chunk_bytes((4 + 2 * gate_tensors(p)) * p.key_dim + 3 * p.value_dim) + kImageBytes);
  return kBegin.of(p.gate) + beside(chunks_in_turn(p.sequences, blocks, multiprocessors) * step, bytes / kRate);
}

double backward_by_chunks_microseconds(const Params& p, int multiprocessors) {
  constexpr ByGate kBegin{.none = 7.0, .constant = 18.0, .scalar = 15.0, .key = 15.0};
  constexpr ByGate kPair{.none = 5.0, .constant = 8.5, .scalar = 7.0, .key = 7.7};  // of chunks, of dq dk dg
  const std::int64_t pairs = in_parts(p.sequences.most_chunks, 2) * p.heads;
  return kBegin.of(p.gate) + preparation_microseconds(p) + cut_time(p, p.heads, multiprocessors).microseconds +
         times(in_parts(pairs, multiprocessors), kPair.of(p.gate));
}

bool one_kernel_is_faster(const Params& p, int multiprocessors) {
  return one_kernel_backward_microseconds(p, multiprocessors) < backward_by_chunks_microseconds(p, multiprocessors);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
