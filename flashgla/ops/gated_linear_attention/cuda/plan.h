// Which kernels a call runs on CUDA, as one printable value: made by a pure function of the problem, of how its tensors
// lie and of the device, in plain C++ that is tested without a GPU. Forward and backward of a call make it each for
// themselves and agree on how states lie. What decides what: PLAN.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "flashgla/base/context.h"
#include "flashgla/ops/gated_linear_attention/cuda/estimates.h"
#include "flashgla/ops/gated_linear_attention/cuda/params.h"
#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// How the rows of a tensor [B,T,heads,channels] lie: strides in elements. A constant gate is the same for all tokens.
struct RowStrides {
  bool given = false;
  bool on_piece = true;  // the address is a multiple of 16 bytes
  std::int64_t batch = 0, token = 0, head = 0;
  bool operator==(const RowStrides&) const = default;
};
RowStrides strides_of(const TensorView& view);
// Whether kernels that move pieces can move it as it lies: the width, strides and the address are multiples of 16
// bytes, tokens apart from each other, and 64 of them less than 2^31 bytes.
bool is_aligned(const RowStrides& rows, std::int64_t tokens, std::int64_t channels, DType dtype);
bool is_aligned(const TensorView& view);

// What of a call's memory tells kernels apart. What the forward alone knows, o, tells forward forms apart and nothing
// else.
struct Layout {
  RowStrides q, k, v, g, gv, o;
  bool states = true;  // Outputs.states is given
  bool operator==(const Layout&) const = default;
};
Layout layout_of(const Problem& problem, const Inputs& inputs, const Outputs& outputs);
// Every tensor's elements side by side.
Layout contiguous_layout(const Problem& problem);

enum class ForwardForm : std::uint8_t {
  tokens,         // recurrent/
  parallel,       // parallel/
  one_pass,       // forward/fused.cuh
  one_wide_pass,  // forward/wide.cuh
  two_passes,     // forward/prepare.cuh, recurrence.cuh
  f32_tiles,      // f32_tiles/
  value_gates,    // value_gates/
  shared_keys,    // shared_keys/
};
enum class BackwardForm : std::uint8_t {
  tokens,
  token_gates,  // one kernel without gates or with one a token: backward/by_role.cuh, on mma.sync rows.cuh
  key_gates,    // one walk: backward/channels.cuh
  chunks,       // the recurrence backwards, backward/keys.cuh
  f32_tiles,
  value_gates,
  shared_keys,
};
const char* name_of(ForwardForm form);
const char* name_of(BackwardForm form);

// How Outputs.states lies.
enum class StatesKind : std::uint8_t {
  none,
  images,    // of bf16 states, Params::states
  prepared,  // behind them what preparation leaves (forward/two_pass.h)
  scores,    // behind them transposed scores alone: plain
  split,     // images of states as sums of bf16 numbers
  gated,     // images of states beside gates over values
};
const char* name_of(StatesKind kind);

struct States {
  StatesKind kind = StatesKind::none;
  int every_log2 = 0;  // of images: chunks from one to the next
  std::size_t bytes = 0;

  // Whether what preparation leaves lies behind them.
  bool has_prepared() const { return kind == StatesKind::prepared || kind == StatesKind::scores; }
  // Equal for calls whose states lie alike: a debug build writes it behind them, and the backward looks for it.
  std::uint64_t tag() const;
};

struct Plan {
  bool hopper = false;  // wgmma and TMA; else mma.sync

  // Before and after the kernels, outermost first (PLAN.md); `problem` is what they leave.
  bool gates = false;     // log gates of logits are made in workspace
  bool in_f32 = false;    // f16 becomes f32
  bool features = false;  // feature maps, the normaliser
  bool pieces = false;    // kernels move rows in pieces of 16 bytes: tensors that lie otherwise are copied
  bool rows = false;      // such are among the inputs
  Problem problem;

  ForwardForm forward = ForwardForm::tokens;
  BackwardForm backward = BackwardForm::tokens;
  States states;
  bool finds_states = false;          // the backward finds states again: none are kept, or not those that it reads
  bool plain = false;                 // two passes and chunks: q and k need no preparation
  int backward_every_log2 = 0;        // of states that the backward reads, kept or found
  TimeCut forward_cut, backward_cut;  // segments of time; one: uncut
  // Packed sequences whose longest the host does not know: the most chunks that it may have for `forward` and
  // `backward`, uncut; where it has more, the device takes two passes and chunks, cut (of_long_sequences). 0: as they
  // are.
  std::int64_t forward_up_to = 0, backward_up_to = 0;
  int groups = 1;      // one pass: warpgroups of a block
  bool pairs = false;  // one pass: they have neighbouring heads, moved together
};

// `hopper`: of the row cuda_sm90; else cuda_portable's, which runs there too.
Plan make_plan(const Problem& problem, const Layout& layout, const Architecture& architecture, bool hopper);

// The same, as this thread has made it before where it has: models make calls alike, layer after layer, and each is
// planned twice, for its workspace and to run.
Plan plan_of_call(const Problem& problem, const Layout& layout, const Architecture& architecture, bool hopper);

// What a call goes by if its longest sequence has no more chunks than forward_up_to, backward_up_to, whose time is not
// cut; and if it has more.
Plan of_short_sequences(const Plan& plan);
Plan of_long_sequences(const Plan& plan);

// Bytes of Outputs.states, whatever the device and the longest sequence are: no less than plan.states.bytes.
std::size_t states_bytes(const Problem& problem, bool hopper);

// Of these, between states and their tag, what the normaliser of a call without gates leaves for its backward, in this
// order: z before each chunk, 1 / d of every token and query head, phi(k).
struct KeptFeatures {
  std::size_t z = 0, inverses = 0, features = 0;  // bytes
  std::size_t bytes() const { return z + inverses + features; }
};
KeptFeatures kept_features(const Problem& problem);

// "features, rows: two_passes in 8", "chunks in 4, states found".
std::string forward_name(const Plan& plan);
std::string backward_name(const Plan& plan);
// Both, and how states lie: "two_passes in 8; chunks in 4; prepared every 2".
std::string to_string(const Plan& plan);

// Behind states: in a debug build a tag, else nothing.
std::size_t states_tag_bytes();

// The problem that a wrapper leaves: with log gates; identity features without a normaliser; widths of whole pieces.
Problem without_logits(const Problem& problem);
Problem without_features(const Problem& problem);
Problem with_aligned_rows(const Problem& problem);
// Gates that lie in rows; others are read one a token.
bool has_gate_rows(const Problem& problem);
// Whether f16 becomes f32 on the way through features.
bool goes_through_f32(const Problem& problem);

// Whether kernels take a problem that sums over heads.
bool takes_shared_keys(const Problem& problem);

// How many bf16 numbers a number of f32 tiles is: f32's own precision, unless the caller allows tf32's.
int parts_of(const Problem& problem);

// Sizes of a problem without its tensors; chunks from one kept state to the next.
Params sizes_of(const Problem& problem);
void set_spacing(Params& params, int every_log2);

}  // namespace flashgla::ops::gated_linear_attention::cuda
