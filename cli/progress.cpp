#include "cli/progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cli/say.h"
#include "cli/terminal.h"

namespace flashgla::cli {

namespace {

constexpr double kTerminalInterval = 0.1;  // seconds between redraws
constexpr double kLogInterval = 10.0;      // seconds between lines where no terminal listens

// Divides value by 1000 until it is below 1000 or has reached 10^12; returns how often.
std::size_t reduce_by_thousands(double& value) {
  std::size_t unit = 0;
  while (std::abs(value) >= 1000.0 && unit < 4) {
    value /= 1000.0;
    ++unit;
  }
  return unit;
}

int digits_for(double value, std::size_t unit) { return unit == 0 ? 0 : std::abs(value) < 10.0 ? 2 : 1; }

// A bar for what is done, where there is room for one: figures come first.
std::string bar(double share, int room) {
  constexpr int kLeast = 4, kMost = 24;
  const int width = std::min(kMost, room - 3);
  if (width < kLeast) return "";
  const int filled = static_cast<int>(share * width);
  return " [" + std::string(static_cast<std::size_t>(filled), '=') + (filled < width ? ">" : "") +
         std::string(static_cast<std::size_t>(std::max(0, width - filled - 1)), ' ') + "]";
}

}  // namespace

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string format_duration(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::llround(std::max(0.0, seconds)));
  if (whole < 60) return fmt::format("{}s", whole);
  if (whole < 3600) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  if (whole < 48 * 3600) return fmt::format("{}h{:02}m", whole / 3600, whole % 3600 / 60);
  return fmt::format("{}d{:02}h", whole / 86400, whole % 86400 / 3600);
}

std::string format_bytes(double bytes) {
  const char* units[] = {"B", "KB", "MB", "GB", "TB"};
  const std::size_t unit = reduce_by_thousands(bytes);
  return fmt::format("{:.{}f} {}", bytes, digits_for(bytes, unit), units[unit]);
}

std::string format_count(double count) {
  const char* units[] = {"", "k", "M", "B", "T"};
  const std::size_t unit = reduce_by_thousands(count);
  return fmt::format("{:.{}f}{}", count, digits_for(count, unit), units[unit]);
}

Progress::Progress(std::string label, std::int64_t total, bool quiet)
    : label_(std::move(label)),
      total_(total),
      quiet_(quiet),
      terminal_(isatty(STDERR_FILENO) != 0),
      start_(std::chrono::steady_clock::now()),
      last_draw_(start_) {}

Progress::~Progress() {
  if (quiet_ || first_ < 0) return;
  if (terminal_ || logged_ != done_) draw();
  if (terminal_) say("\n");
}

void Progress::update(std::int64_t done, const std::string& figures) {
  const bool first = first_ < 0;
  if (first) first_ = done;
  done_ = done;
  figures_ = figures;
  if (quiet_) return;
  if (first || seconds_since(last_draw_) >= (terminal_ ? kTerminalInterval : kLogInterval)) {
    last_draw_ = std::chrono::steady_clock::now();
    draw();
  }
}

void Progress::message(const std::string& line) {
  if (quiet_) return;
  if (terminal_) say("\r\033[K");
  say("{}\n", line);
  if (terminal_ && first_ >= 0) draw();
}

void Progress::draw() {
  const double elapsed = seconds_since(start_);
  const double share =
      total_ > 0 ? std::clamp(static_cast<double>(done_) / static_cast<double>(total_), 0.0, 1.0) : 0.0;
  std::string figures = total_ > 0 ? fmt::format(" {:3.0f}%", 100.0 * share) : "";
  if (!figures_.empty()) figures += "  " + figures_;
  if (total_ > 0 && done_ > first_ && done_ < total_) {
    const double rate = static_cast<double>(done_ - first_) / elapsed;
    figures += "  ETA " + format_duration(static_cast<double>(total_ - done_) / rate);
  } else {
    figures += "  " + format_duration(elapsed);
  }
  if (terminal_) {
    const int columns = terminal_columns(STDERR_FILENO, 80) - 1;
    std::string line = label_;
    if (total_ > 0) line += bar(share, columns - static_cast<int>(label_.size() + figures.size()));
    line += figures;
    if (line.size() > static_cast<std::size_t>(columns)) line.resize(static_cast<std::size_t>(columns));
    say("\r\033[K{}", line);
    std::fflush(stderr);
  } else {
    logged_ = done_;
    say("{}{}\n", label_, figures);
  }
}

}  // namespace flashgla::cli
