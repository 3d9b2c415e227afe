// The problems that test and bench share, their data, and the float64 reference's answer to them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"
#include "testing/devices.h"

namespace flashgla::ops::gated_linear_attention {

enum class GateValues : std::uint8_t {
  trained,  // logsigmoid(normal) / 16: what the GLA layer feeds
  extreme,  // 0, -1e-4, -1, -50 and -inf, mixed over channels, time and heads
  times_1,  // logsigmoid(normal), and so many times that
  times_2,
  times_4,
  times_16,
  times_64,
  fast_channels,  // trained, but one channel in 16 at -3
  resets,         // trained, but one token in a thousand of a head at -inf
  mixed,          // logsigmoid(normal) times 1/16 to 64, by channel
  steps,          // -6.7, but one token in eight of a head at 0: anchors 16 tokens apart are 150 bits apart
};
const char* name_of(GateValues values);
// All of them.
std::vector<GateValues> gate_values();

struct Case {
  std::string name;
  std::int64_t batch = 2;
  std::int64_t length = 65;
  std::int64_t query_heads = 2;
  std::int64_t heads = 2;
  std::int64_t key_dim = 32;
  std::int64_t value_dim = 48;
  GateKind gate = GateKind::key;
  bool gates_over_keys = true;  // false: a key_value gate's g is left out
  GateValues gate_values = GateValues::trained;
  DType dtype = DType::f32;
  DType gate_dtype = DType::f32;      // f64 is forced with f64
  bool logits = false;                // gates of tokens are logits of normal draws, over 16; clamped beside wide values
  std::vector<std::int64_t> lengths;  // packed sequences; batch and length then follow from them
  bool tells_longest = false;         // Options::max_seqlen
  FeatureMap feature_map = FeatureMap::identity;
  bool normalize = false;
  Algorithm algorithm = Algorithm::automatic;
  bool strided = false;  // q | k | v as slices of one tensor, the others with gaps between tokens
  bool states = true;    // initial and final state given and wanted, gradients too
};

// "B2 T65 H2 K32 V48 f32 key gate": what a bench prints.
std::string describe_case(const Case& c);

// Correctness: every gate kind, odd lengths and dimensions, every dtype, packing, strides, groups, feature maps.
const std::vector<Case>& conformance_cases();
// Timing: the headline shapes of the device, or with `sweep` a grid of lengths, widths, gates and dtypes.
std::vector<Case> bench_cases(Device device, bool sweep);
// Timing of one decoding step; the length is 1.
std::vector<Case> step_cases(Device device, bool sweep);

// Inputs and output gradients of a case, seeded; the storage behind the views.
struct CaseData {
  Inputs in;
  OutputGradients d_out;
  Options options;
  std::vector<Tensor> storage;
};
CaseData make_data(const Case& c, std::uint64_t seed = 1);

// All views in one list, so that each is walked in one place.
std::vector<TensorView*> views_of(CaseData& data);
// The same values on another device, strides kept.
CaseData on_device(const CaseData& data, Device device);
// The same values in float64, contiguous, on the CPU: what the reference is asked.
CaseData as_float64(const CaseData& data);

// Where the tokens of sequence n of a case on the CPU lie.
struct TokenRange {
  std::int64_t batch, begin, end;
};
TokenRange tokens_of(const CaseData& data, std::int64_t n);

// Sequence n alone and one of its key-value heads, same memory: where the whole is too much for the reference. A
// constant gate's gradient sums over sequences and is left out of the results.
CaseData one_head(const CaseData& data, std::int64_t n, std::int64_t head);

// Everything the operator can be asked for, filled with NaN. Laid out like the inputs.
struct Results {
  Outputs out;
  InputGradients d_in;
  std::vector<Tensor> storage;
};
std::vector<TensorView*> views_of(Results& results);
Results make_results(const CaseData& data, bool final_state, std::size_t states_bytes);
Results on_cpu(const Results& results);
Results one_head(const Results& results, const TokenRange& tokens, std::int64_t n, std::int64_t head,
                 std::int64_t group);

// Tokens [begin, end) of every sequence of an unpacked case or of its results; same memory, states as they are.
CaseData slice_tokens(const CaseData& data, std::int64_t begin, std::int64_t end);
Results slice_tokens(const Results& results, std::int64_t begin, std::int64_t end);

using testing::fill_with_nan;

// Memory of the view's elements with its strides, on the device, as far from where 16 bytes begin; the same bytes.
TensorView mirrored(const TensorView& view, Device device, std::vector<Tensor>& storage);

struct NamedView {
  const char* name;
  TensorView view;
  bool gradient;
};
// o, ht, zt and the gradients, absent ones left out.
std::vector<NamedView> outputs_of(const Results& results);
std::vector<NamedView> gradients_of(const Results& results);

// The reference's answer, in float64 from exactly the case's rounded inputs.
Results reference_results(const CaseData& data, bool final_state, bool gradients);

// What the roundings of a case's terms can add to, in float64. Not with a normaliser.
struct TermSizes {
  // Of each result's elements the root sum of squares of the terms that they are sums of (scale q_ik k_jk v_jv
  // e^(gates between them) and the like), however far the terms themselves cancel. Of a constant gate's dg a term is
  // one that stands in the loss, times the gates in it.
  Results terms;
  // Of dg and dgv alone, but for a constant gate's: the same of their closed form (README.md), where there are terms
  // besides that cancel exactly. An implementation by it leaves what f32 rounds of them.
  Results closed_form;
};
TermSizes term_sizes(const CaseData& data, bool final_state);

// Bound on the relative error (2-norm), derived: the rounding of operands and result to the dtype, half a unit each at
// most, which adds to 0.64 of a unit in the norm; plus fp32 accumulation (f64: float64) over the channels and the
// sequence, 84 units observed as a random walk over the largest cases. Gradients go through two products instead of
// one: twice that. f64 5e-12, f32 1e-5, bf16 5e-3, fp16 6.4e-4. Relative to the result or, where its terms cancel,
// to their root sum of squares (term_sizes); and to what of a closed form cancels the bound of f32 is allowed besides.
double tolerance(DType dtype, bool gradient);

}  // namespace flashgla::ops::gated_linear_attention
