// metrics.jsonl of a run folder: one JSON object a line, appended as the run goes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flashgla::train {

// What `kind` a row is decides which figures it has: NaN (not written) elsewhere.
struct MetricsRow {
  std::string kind = "train";  // "train", "eval", "skipped" (an update that was not made; `message` says why)
  std::int64_t step = 0;       // updates done when the row was written
  std::int64_t tokens = 0;     // trained on so far
  double loss;                 // nats per token: mean over the batch, or over the validation data
  double bits_per_byte;
  double perplexity;
  double accuracy;  // of a task's validation data: share of targets whose logit is above all others
  double learning_rate;
  double gradient_norm;  // before clipping
  double tokens_per_second;
  double flops_per_second;  // model FLOPs: 3 x (2 x matrix parameters + the mixer's) per token
  double seconds;           // since the run began, interruptions not counted
  std::string message;

  MetricsRow();
};

std::string to_json_line(const MetricsRow& row);  // without the newline

// Appends to a file, every row flushed. Rows of steps after `resume_step` are dropped first, so that a resumed run's
// file reads as if it had never stopped. Throws Error when the file cannot be written.
class MetricsWriter {
 public:
  // without_evaluation: what is said of an evaluation at that step goes, too.
  MetricsWriter(const std::string& path, std::int64_t resume_step, bool without_evaluation = false);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  void write(const MetricsRow& row);

 private:
  std::string path_;
  int file_ = -1;
};

// All rows of a file; an incomplete last line (the run was cut off) is left out. Throws Error naming file and line.
std::vector<MetricsRow> read_metrics(const std::string& path);

}  // namespace flashgla::train
