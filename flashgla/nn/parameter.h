// Parameters and the one visitor from which initialisation, optimizer, checkpoint, gradient reduction and printing are
// derived.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"
#include "flashgla/ops/quantised_linear/quantised_linear.h"

namespace flashgla::nn {

enum class Initialization : std::uint8_t { zeros, ones, normal, transformed, by_column };

// What few bits cost a parameter's model: a preset of 8 or 4 bits (model/quantise.h) says a format for each class.
enum class Quantisation : std::uint8_t {
  none,       // stays in floats: vectors, gates, convolutions, tables that are looked up
  mlp,        // the most of the weights and the least sensitive
  mixer,      // what a mixer makes of its input
  sensitive,  // what writes to the residual stream behind a norm, and the head
};

// How a decoding step reads a matrix's rows (base/cut.h).
enum class Streamed : std::uint8_t {
  alone,   // in a region of its own, or of no other's kind
  behind,  // going on from the rows of the parameter before it, where these end at its own in memory: one matrix
  beside,  // in the same region as the parameter before it
};

struct Parameter {
  std::string name;  // as in the checkpoint: "model.layers.0.attn.q_proj.weight"
  Shape shape;
  Initialization initialization = Initialization::normal;
  double deviation = 0.02;                              // of a normal initialisation
  double (*transform)(double uniform) = nullptr;        // of a transformed one: an element from one of (0, 1)
  std::function<double(std::int64_t column)> column{};  // by_column: an element from its last index
  bool decay = true;                                    // weight decay applies: matrices only
  // A matrix whose every element each token is multiplied with once: what FLOPs are counted by. Not: tables that are
  // looked up, matrices of element-wise factors, those shared by heads.
  bool multiplied = true;
  Quantisation quantisation = Quantisation::none;
  Streamed streamed = Streamed::alone;
  // Hears the inputs of each forward of the linear layer whose first weight this is (model/calibration.h).
  std::function<void(Context&, const TensorView& x)> observe{};
  TensorView value;     // bound by ParameterStore
  TensorView gradient;  // f32 (f64 with f64); absent without training

  // Whether its module writes the first gradient of a step over what was there, which spares the zeroing: it asks
  // holds_gradient for each.
  bool first_written_over = false;
  // Whether to add to the gradient, or write over it; from then on it is to be added to.
  bool holds_gradient() const { return !std::exchange(renewed, false); }
  mutable bool renewed = false;  // by ParameterStore::renew_gradients
};

// The filter of a short convolution [channels,1,width], with the deviation of PyTorch's Conv1d: with a language model's
// own, queries, keys and values are so small that their product drowns in the epsilon of the norm behind the operator.
Parameter convolution_filter(const std::string& name, std::int64_t channels, std::int64_t width);

using ParameterVisitor = std::function<void(Parameter&)>;

// How a parameter lies in memory where that is not in the store's dtype, or not the store's memory.
struct Placement {
  std::optional<ops::quantised_linear::Format> format;  // packed
  void* memory = nullptr;                               // somebody else's, who keeps it; null: the store's
};
using Placements = std::function<Placement(const Parameter&)>;

// Owns the memory of a set of parameters: one block for the values, one for those that are packed, one for the
// gradients, without gaps in the order of the visit, so that weights visited one after the other and of equal row
// length are one matrix (adjacent_rows).
class ParameterStore {
 public:
  // visit_all calls its argument once for every parameter, always in the same order. Binds value (and, with
  // `gradients`, gradient) of each. Values are not initialised; on the CPU their pages are placed (nn/pages.h) for
  // steps on so many threads, 0: as many as a Context has.
  ParameterStore(const std::function<void(const ParameterVisitor&)>& visit_all, DType dtype, Device device,
                 bool gradients, const Placements& placements = {}, int threads = 0);

  const std::vector<Parameter*>& parameters() const { return parameters_; }
  std::int64_t count() const { return count_; }  // elements
  std::size_t value_bytes() const;               // the packed ones' and other people's too
  bool packed() const { return static_cast<bool>(packed_) || mapped_packed_; }  // some are
  std::size_t gradient_bytes() const;
  const TensorView& all_values() const { return values_.view(); }        // flat; those that lie in the store's dtype
  const TensorView& all_gradients() const { return gradients_.view(); }  // flat; absent without gradients
  void zero_gradients();
  // Queues what makes the next backward's gradients the first ones: zeros, or nothing where that backward writes over
  // what is there.
  void renew_gradients(Context& context);
  // The parameter that an element of all_gradients() belongs to; "" for -1.
  std::string name_at(std::int64_t element) const;
  // Seeded; a parameter's values depend on the seed, its name and shape alone. Not for packed ones.
  void initialize(std::uint64_t seed);

 private:
  std::vector<Parameter*> parameters_;
  std::int64_t count_ = 0;
  Tensor values_;
  Tensor packed_;
  bool mapped_packed_ = false;
  Tensor gradients_;
};

// The rows of several matrices [n_i, K] that follow each other in memory, as one matrix [sum of n_i, K]; panels of
// packed ones likewise.
bool are_adjacent(const TensorView& matrix, const TensorView& next);
TensorView adjacent_rows(const std::vector<TensorView>& matrices);

}  // namespace flashgla::nn
