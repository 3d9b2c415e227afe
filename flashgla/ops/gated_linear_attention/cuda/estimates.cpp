#include "flashgla/ops/gated_linear_attention/cuda/estimates.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "flashgla/ops/gated_linear_attention/cuda/plan.h"

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

// Chunks of the longest sequence: of packed ones, where it is not known, all there are.
std::int64_t longest_in_chunks(const Sequences& s) {
  const std::int64_t all = s.chunks_each();
  return differ(s) && s.longest > 0 ? std::min(all, in_parts(s.longest, kChunk)) : all;
}

// Where those that walk through segments of at most so many chunks share what there is room for, a share of all chunks
// each: whatever is ready takes the place of what has ended, and the last may begin late, of the part whose lengths
// differ.
double unlike(double chunks, double share, double part) {
  return std::max(chunks, share) + 0.5 * std::min(chunks, part);
}

// Chunks one after the other where so many blocks walk through a sequence each, in rounds of as many as there is room
// for.
double chunks_in_turn(const Sequences& s, std::int64_t blocks, std::int64_t room) {
  const std::int64_t longest = longest_in_chunks(s);
  if (!differ(s)) return times(in_parts(blocks, room), static_cast<double>(longest));
  const double each = static_cast<double>(blocks) / static_cast<double>(s.count);
  const double share = times(s.most_chunks, each / static_cast<double>(room));
  return unlike(static_cast<double>(longest), share, share);
}

// Where chunks wait for one another and all of them for memory: more than the longer one, less than the sum.
double beside(double chunks, double memory) { return std::hypot(chunks, memory); }

double preparation_microseconds(const Params& p) {
  const std::int64_t blocks = tiles_of(p.key_dim);
  const std::int64_t written = 1 + (p.gate == GateKind::none ? 0 : 2 * blocks);  // tiles
  return times(p.sequences.most_chunks * p.heads * p.group,
               chunk_bytes((1 + key_tensors(p)) * p.key_dim + written * kTile) / kPreparationRate);
}

// Of the recurrence of a call: uncut (chunks 0) or in segments of so many chunks, with all that the cut adds to it.
class RecurrenceTime {
 public:
  RecurrenceTime(const Params& p, Direction direction, int multiprocessors) : s_(p.sequences) {
    const int blocks = tiles_of(p.key_dim), values = tiles_of(p.value_dim), KB = blocks_of_launch(blocks);
    each_ = p.heads * (direction == Direction::forward ? p.group : 1) * in_parts(values, 2);
    slots_ = std::int64_t{multiprocessors} * recurrence_blocks(KB, values > 1 ? 2 : 1);
    step_ = recurrence_launches(blocks) * (0.4 + 0.45 * KB);
    cut_ = blocks == 2 && !differ(s_) && (direction == Direction::forward || values != 2) ? 7.0 : 4.0;
    ends_ = times(s_.most_chunks * p.heads, chunk_bytes((blocks + values) * kTile)) / kEndsRate;
    state_ = times(p.heads * blocks * values, kTile * kTile * 4) * 4 / kStatesRate;
    all_ = s_.chunks_each();
    longest_ = longest_in_chunks(s_);
    share_ = times(each_, 1.0 / static_cast<double>(slots_));
  }

  double microseconds(std::int64_t chunks) const {
    const std::int64_t busy = blocks();
    if (chunks == 0) return chunks_in_turn(s_, busy, slots_) * step_;
    const std::int64_t of_longest = in_parts(longest_, chunks);
    if (!differ(s_)) {
      const double walked = times(in_parts(of_longest * busy, slots_), static_cast<double>(chunks));
      return with_ends(of_longest, walked, walked, 1.0, of_longest * s_.count);
    }
    // Of segments those end in a state that others follow: of as many sequences as may be as long as the longest.
    const std::int64_t joins = std::min(all_ / chunks, all_ / std::max<std::int64_t>(longest_, 1) * (of_longest - 1));
    const double full = times(in_parts(joins * each_, slots_), static_cast<double>(chunks)),
                 one = static_cast<double>(std::min(longest_, chunks));
    // Segments of a sequence that has most of the chunks are alike: they leave no place waiting for others.
    const bool alike_most = of_longest > 1 && 2 * longest_ > all_;
    const auto walked = [&](std::int64_t of_all, std::int64_t alike) {
      return std::max(full, unlike(one, times(of_all, share_), times(of_all - (alike_most ? alike : 0), share_)));
    };
    const double part = static_cast<double>(joins * chunks) / static_cast<double>(std::max<std::int64_t>(all_, 1));
    const double ended = joins == 0 ? 0.0 : walked(joins * chunks, (of_longest - 1) * chunks);
    return with_ends(of_longest, walked(s_.most_chunks, longest_), ended, part, joins);
  }

  // How many chunks a segment may have, for eighths more of segments each time, since this is worked out in every call.
  std::vector<std::int64_t> cuts() const {
    // Alike, no more segments than there is room for at once; up to the limit itself.
    const std::int64_t limit = differ(s_) ? all_ / 2 : std::min(slots_ / blocks(), all_ / 2);
    std::vector<std::int64_t> chunks = {0};
    chunks.reserve(64);
    for (std::int64_t most = 2, next; most <= limit; most = next) {
      next = most == limit ? limit + 1 : std::min(limit, most + std::max<std::int64_t>(most / 8, 1));
      chunks.push_back(in_parts(all_, most));
    }
    return chunks;
  }

 private:
  std::int64_t blocks() const { return std::max<std::int64_t>(s_.count * each_, 1); }
  // Ends of a part of all chunks are written, read, made start states, the longest sequence's one after the other, and
  // these read.
  double with_ends(std::int64_t of_longest, double walked, double ended, double part, std::int64_t states) const {
    return walked * step_ + std::max(ended * kEndStep, part * ends_) + cut_ + times(of_longest, 0.2) +
           times(states, state_);
  }

  static constexpr double kEndStep = 0.7;  // of a chunk
  const Sequences& s_;
  std::int64_t each_, slots_, all_, longest_;  // blocks of a segment; room for blocks; chunks of all and of the longest
  double step_, ends_, state_, share_;         // of a chunk; of all ends, of a segment's states; blocks over room
  double cut_;                                 // of the kernels that a cut adds
};

double two_passes_microseconds(const Params& p, std::int64_t chunks, int multiprocessors) {
  const std::int64_t key_blocks = tiles_of(p.key_dim), query_heads = p.heads * p.group;
  // Images of q~, k~ and P, v and o.
  const double bytes = times(p.sequences.most_chunks * query_heads,
                             chunk_bytes((2 * key_blocks + 1) * kTile) + chunk_bytes(2 * p.value_dim));
  return (key_blocks > 1 ? 10.4 : 9.3) + preparation_microseconds(p) +
         beside(RecurrenceTime(p, Direction::forward, multiprocessors).microseconds(chunks), bytes / kRate);
}

double backward_by_chunks_microseconds(const Params& p, std::int64_t chunks, int multiprocessors) {
  constexpr ByGate kBegin{.none = 7.0, .constant = 18.0, .scalar = 15.0, .key = 15.0};
  constexpr ByGate kPair{.none = 5.0, .constant = 8.5, .scalar = 7.0, .key = 7.7};  // of chunks, of dq dk dg
  const std::int64_t pairs = in_parts(p.sequences.most_chunks, 2) * p.heads;
  return kBegin.of(p.gate) + preparation_microseconds(p) +
         RecurrenceTime(p, Direction::backward, multiprocessors).microseconds(chunks) +
         times(in_parts(pairs, multiprocessors), kPair.of(p.gate));
}

}  // namespace

// Segments of sequences that differ take longer than is estimated, of a cut that was to take 0.95 of the time, 1.4:
// uncut they are taken to be as much faster.
constexpr double kUncut = 0.9;
constexpr double kIdleLaunches = 8.0;  // microseconds of launches that find no tokens

bool longest_is_unknown(const Params& p) { return differ(p.sequences) && p.sequences.longest == 0; }

static Params with_longest(Params p, std::int64_t tokens) {
  p.sequences.longest = std::max<std::int64_t>(tokens, 1);
  return p;
}
Params with_all_alike(const Params& p) { return with_longest(p, in_parts(p.sequences.length, p.sequences.count)); }
Params with_one_long(const Params& p) { return with_longest(p, p.sequences.length - (p.sequences.count - 1)); }

TimeCut cut_time(const Params& p, Direction direction, int multiprocessors) {
  const bool unknown = longest_is_unknown(p);
  const Params alike = unknown ? with_all_alike(p) : p, one_long = unknown ? with_one_long(p) : p;
  const RecurrenceTime if_alike(alike, direction, multiprocessors), if_long(one_long, direction, multiprocessors);
  struct Cut {
    std::int64_t chunks;
    double alike, one_long;
  };
  const double uncut = differ(p.sequences) && !unknown ? kUncut : 1.0;
  std::vector<Cut> cuts;
  cuts.reserve(64);
  double least_alike = std::numeric_limits<double>::infinity(), least_long = least_alike;
  for (const std::int64_t chunks : if_alike.cuts()) {
    const double microseconds = if_alike.microseconds(chunks) * (chunks == 0 ? uncut : 1.0);
    cuts.push_back({chunks, microseconds, unknown ? if_long.microseconds(chunks) : microseconds});
    least_alike = std::min(least_alike, cuts.back().alike);
    least_long = std::min(least_long, cuts.back().one_long);
  }
  // That which is fewest times slower than the fastest for either: where lengths are known, the fastest.
  const auto regret = [&](const Cut& cut) { return std::max(cut.alike / least_alike, cut.one_long / least_long); };
  const std::int64_t chunks = std::min_element(cuts.begin(), cuts.end(), [&](const Cut& a, const Cut& b) {
                                return regret(a) < regret(b);
                              })->chunks;
  if (chunks == 0) return {};
  return {static_cast<int>(in_parts(p.sequences.chunks_each(), chunks)), static_cast<int>(chunks)};
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
  return two_passes_microseconds(p, cut_time(p, Direction::forward, multiprocessors).chunks, multiprocessors);
}

double one_kernel_backward_microseconds(const Params& p, int multiprocessors) {
  const std::int64_t blocks = p.sequences.count * p.heads;
  const bool by_key = p.gate == GateKind::key;
  constexpr ByGate kBegin{.none = 5.0, .constant = 8.0, .scalar = 5.5, .key = 4.0};
  constexpr ByGate kStep{.none = 1.31, .constant = 1.95, .scalar = 2.02, .key = 4.1};
  // A block of key gates shares a multiprocessor with a second one, and is slower for it.
  const double step = by_key && blocks > multiprocessors ? 3.55 : kStep.of(p.gate);
  const double bytes = times(p.sequences.most_chunks * p.heads,
                             chunk_bytes((4 + 2 * gate_tensors(p)) * p.key_dim + 3 * p.value_dim) + kImageBytes);
  return kBegin.of(p.gate) + beside(chunks_in_turn(p.sequences, blocks, multiprocessors) * step, bytes / kRate);
}

double backward_by_chunks_microseconds(const Params& p, int multiprocessors) {
  return backward_by_chunks_microseconds(p, cut_time(p, Direction::backward, multiprocessors).chunks, multiprocessors);
}

ForwardForm fastest_form(const Params& p, bool one_pass_fits, bool wide_pass_fits, int multiprocessors) {
  std::pair fastest{two_passes_microseconds(p, multiprocessors), ForwardForm::two_passes};
  if (one_pass_fits) {
    fastest = std::min(fastest, {one_pass_microseconds(p, multiprocessors), ForwardForm::one_pass});
  }
  if (wide_pass_fits) {
    fastest = std::min(fastest, {wide_pass_microseconds(p, multiprocessors), ForwardForm::one_wide_pass});
  }
  return fastest.second;
}

bool one_kernel_is_faster(const Params& p, int multiprocessors) {
  return one_kernel_backward_microseconds(p, multiprocessors) < backward_by_chunks_microseconds(p, multiprocessors);
}

// The most chunks of the longest sequence with which `form`, faster where all are alike, takes no longer than `other`,
// whose time grows less with them. All, where it is never slower by half, nor by more than the launches that find no
// tokens make the short call slower.
template <class Form, class Other>
static std::int64_t most_chunks_of(const Params& p, const Form& form, const Other& other) {
  const std::int64_t all = p.sequences.chunks_each();
  const auto is_faster = [&](std::int64_t chunks) {
    const Params q = with_longest(p, std::min(chunks * kChunk, p.sequences.length));
    return form(q) <= other(q);
  };
  const Params one_long = with_one_long(p);
  if (form(one_long) <= std::max(1.5, 1.0 + kIdleLaunches / form(with_all_alike(p))) * other(one_long)) return all;
  std::int64_t low = in_parts(all, p.sequences.count), high = all;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (is_faster(middle) ? low : high) = middle;
  }
  return low;
}

std::int64_t most_chunks_of_form(const Params& p, ForwardForm form, const TimeCut& cut, int multiprocessors) {
  const auto in_form = [&](const Params& q) {
    return form == ForwardForm::one_pass ? one_pass_microseconds(q, multiprocessors)
                                         : wide_pass_microseconds(q, multiprocessors);
  };
  return most_chunks_of(p, in_form,
                        [&](const Params& q) { return two_passes_microseconds(q, cut.chunks, multiprocessors); });
}
std::int64_t most_chunks_of_one_kernel(const Params& p, const TimeCut& cut, int multiprocessors) {
  const auto in_one = [&](const Params& q) { return one_kernel_backward_microseconds(q, multiprocessors); };
  return most_chunks_of(
      p, in_one, [&](const Params& q) { return backward_by_chunks_microseconds(q, cut.chunks, multiprocessors); });
}

std::int64_t most_chunks_uncut(const Params& p, Direction direction, const TimeCut& cut, int multiprocessors) {
  const auto in_time = [&](const Params& q, std::int64_t chunks) {
    return RecurrenceTime(q, direction, multiprocessors).microseconds(chunks) * (chunks == 0 ? kUncut : 1.0);
  };
  const Params alike = with_all_alike(p);
  const TimeCut for_both = cut_time(p, direction, multiprocessors);
  if (cut_time(alike, direction, multiprocessors).segments > 1 || for_both.segments == 1 ||
      in_time(alike, for_both.chunks) < in_time(alike, 0) + kIdleLaunches) {
    return p.sequences.chunks_each();
  }
  return most_chunks_of(
      p, [&](const Params& q) { return in_time(q, 0); }, [&](const Params& q) { return in_time(q, cut.chunks); });
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
