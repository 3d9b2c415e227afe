// Batches out of a token span: seeded, shuffled, resumable to the exact sample.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flashgla/base/tensor.h"
#include "flashgla/data/token_file.h"

namespace flashgla::data {

enum class LoaderMode : std::uint8_t {
  // Documents in shuffled order, back to back in one row of B*T tokens, each its own sequence in cu_seqlens, so that no
  // state and no target crosses from one to another. A document of n tokens gives n-1 inputs. Those longer than T are
  // cut into sequences of T, and the one that does not fit goes on, as a new sequence, in the next batch.
  packed,
  // Rows of T tokens at shuffled places of the token stream, whatever documents lie there. An epoch's rows do not
  // overlap, and each epoch begins at another offset.
  windows,
  // Truncated back-propagation through time: each of B rows walks `segments` consecutive pieces of T tokens; the state
  // is carried from batch to batch inside such a stretch (Batch::continues).
  segments,
  // Tasks (TokenSpan::labels): rows are whole documents in shuffled order, all of T tokens; what is to be predicted are
  // their labels, of which each has as many.
  labelled,
};
const char* name_of(LoaderMode mode);
LoaderMode loader_mode_from_name(std::string_view name);  // throws Error that lists the names

struct LoaderConfig {
  LoaderMode mode = LoaderMode::packed;
  std::int64_t batch = 8;      // B
  std::int64_t length = 512;   // T; labelled: the documents' length
  std::int64_t segments = 12;  // segments mode: pieces in a stretch; 0: as many as B streams over the whole span allow
  bool shuffle = true;         // false: in the order of the file
  std::uint64_t seed = 0;
  // true: one pass over every target exactly once, the last batch filled up with target -1, then next() is false (for
  // evaluation). false: epochs without end, batches always full.
  bool single_pass = false;
  std::int64_t vocabulary = 0;  // what tokens must be below; 0: any
};

// Views of the loader's own memory, valid until the next call of next().
struct Batch {
  TensorView tokens;                    // i32 [B,T]; packed: [1,B*T]
  TensorView targets;                   // i32, same shape; the token that follows; -1: padding. labelled: [B*N]
  TensorView places;                    // labelled: i32 [B*N], distinct; target i is asked for at row*T + t
  TensorView cu_seqlens;                // packed: i32 [N+1]; else absent: each row is a sequence
  std::vector<std::uint8_t> continues;  // [B] 1: the row goes on from where the previous batch's row ended
  std::int64_t target_count = 0;        // targets that are not -1
};

class Loader {
 public:
  // Throws Error naming the remedy when the span is too short for one row.
  Loader(TokenSpan span, const LoaderConfig& config);

  // False only at the end of a single pass (then the batch is untouched).
  bool next(Batch& batch);

  // One line of JSON: what is needed to go on with exactly the batches that would have come. restore() throws Error
  // when the text is not such a line, or when data or config differ, naming what does.
  std::string save_state() const;
  void restore(const std::string& state);
  void rewind();  // to the state of a new loader

  const LoaderConfig& config() const { return config_; }
  std::int64_t epoch() const { return cursor_ / units_; }
  std::int64_t tokens_per_epoch() const { return tokens_per_epoch_; }  // that go through the model
  // Most sequences any batch can hold (packed), else B: for planning memory.
  std::int64_t max_sequences() const { return max_sequences_; }
  std::int64_t labels() const { return labels_; }  // N, of a document; 0 in other modes than labelled

 private:
  void plan_packed();
  void plan_rows();
  void plan_labelled();
  bool next_packed(Batch& batch);
  bool next_rows(Batch& batch);
  bool next_labelled(Batch& batch);
  // The place in the file of the counter-th unit drawn.
  std::int64_t unit_at(std::int64_t counter) const;
  std::int64_t offset_of_epoch(std::int64_t epoch) const;
  void read(std::int64_t begin, std::int64_t count, std::int64_t to);
  // Throws Error naming the file of tokens that the vocabulary does not have.
  void require_known(const std::int32_t* tokens, std::int64_t count, const TokenFile& file) const;
  std::string data_fingerprint() const;

  TokenSpan span_;
  LoaderConfig config_;
  std::vector<std::int64_t> document_begins_;  // packed
  std::string data_fingerprint_;
  std::int64_t units_ = 0;  // documents, windows or stretches in an epoch
  std::int64_t unit_ = 0;   // tokens of a window or stretch
  std::int64_t slack_ = 0;  // largest offset an epoch may begin at
  std::int64_t max_sequences_ = 0;
  std::int64_t tokens_per_epoch_ = 0;
  std::int64_t labels_ = 0;

  // The state: nothing random is kept, since the order is a function of seed and epoch.
  std::int64_t cursor_ = 0;    // units done since the start, over all epochs
  std::int64_t position_ = 0;  // packed: inputs of the current document given; segments: of the current stretches

  Tensor tokens_, targets_, cu_seqlens_, places_;
  std::vector<std::int32_t> buffer_;
};

}  // namespace flashgla::data
