// A progress line on standard error: a bar with share, figures and ETA on a terminal; one plain line every few seconds
// elsewhere (logs, CI). Draws nothing when quiet.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace flashgla::cli {

class Progress {
 public:
  // total 0: unknown. `label` precedes the bar.
  Progress(std::string label, std::int64_t total, bool quiet = false);
  ~Progress();  // ends the line

  // `figures` follow the bar: "loss 2.13  1.54 bits/byte  51k tok/s".
  void update(std::int64_t done, const std::string& figures = "");
  // Prints a line above the bar.
  void message(const std::string& line);

 private:
  void draw();

  std::string label_;
  std::int64_t total_;
  bool quiet_;
  bool terminal_;
  std::int64_t first_ = -1;  // done at the first update: a resumed run's ETA counts from there
  std::int64_t done_ = 0;
  std::int64_t logged_ = -1;  // done at the last line of a log
  std::string figures_;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_draw_;
};

double seconds_since(std::chrono::steady_clock::time_point start);
// "3m12s", "2h05m"
std::string format_duration(double seconds);
// "1.34 GB", "12.0 MB"
std::string format_bytes(double bytes);
// "51.2k", "1.37B"
std::string format_count(double count);

}  // namespace flashgla::cli
