// Session: sequences in progress.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashgla/model/checkpoint.h"
#include "flashgla/model/language_model.h"

namespace flashgla::generate {

// What sequences have seen, as the layers' states and the logits of the next token, on the model's device. Unless a
// state grows (softmax attention), its size does not depend on how much that was.
class Session {
 public:
  Session(const model::LanguageModel& model, std::int64_t sequences);

  std::int64_t sequences() const { return state.sequences(); }
  bool fresh() const;            // nothing seen yet
  std::int64_t longest() const;  // tokens of the sequence that has had most
  void reset();

  // To and from a file, which any device may read. load throws Error when the file is of another model or number of
  // sequences.
  void save(const model::LanguageModel& model, const std::string& path) const;
  void load(const model::LanguageModel& model, const std::string& path);

  model::DecodeState state;
  Tensor logits;  // of the next token: f32 [N,V]
  Tensor seen;    // u8 [N,V]: 1 for tokens of this sequence, for the repetition penalty

 private:
  std::vector<model::NamedTensor> beside_state() const;
};

}  // namespace flashgla::generate
