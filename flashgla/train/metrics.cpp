#include "flashgla/train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "flashgla/base/error.h"
#include "flashgla/base/json.h"

namespace flashgla::train {

namespace {

using Json = nlohmann::ordered_json;
constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();

struct Figure {
  const char* key;
  double MetricsRow::*value;
};
constexpr Figure kFigures[] = {
    {"loss", &MetricsRow::loss},
    {"bpb", &MetricsRow::bits_per_byte},
    {"ppl", &MetricsRow::perplexity},
    {"accuracy", &MetricsRow::accuracy},
    {"lr", &MetricsRow::learning_rate},
    {"grad_norm", &MetricsRow::gradient_norm},
    {"tok/s", &MetricsRow::tokens_per_second},
    {"flop/s", &MetricsRow::flops_per_second},
    {"time", &MetricsRow::seconds},
};

void write_all(int file, const std::string& text, const std::string& path) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = ::write(file, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw Error(path + ": cannot be written: " + std::strerror(errno));
    done += static_cast<std::size_t>(count);
  }
}

}  // namespace

MetricsRow::MetricsRow() {
  for (const Figure& figure : kFigures) this->*figure.value = kAbsent;
}

std::string to_json_line(const MetricsRow& row) {
  Json json = Json::object();
  json["kind"] = row.kind;
  json["step"] = row.step;
  json["tokens"] = row.tokens;
  for (const Figure& figure : kFigures) {
    const double value = row.*figure.value;
    if (std::isfinite(value)) json[figure.key] = value;
  }
  if (!row.message.empty()) json["message"] = row.message;
  return json.dump();
}

std::vector<MetricsRow> read_metrics(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(path + ": cannot be read");
  std::vector<MetricsRow> rows;
  std::string line;
  for (std::int64_t number = 1; std::getline(file, line); ++number) {
    if (file.eof()) break;  // no newline: cut off while it was written
    if (line.empty()) continue;
    MetricsRow row;
    try {
      const Json json = Json::parse(line);
      row.kind = json.at("kind").get<std::string>();
      row.step = json.at("step").get<std::int64_t>();
      row.tokens = json.at("tokens").get<std::int64_t>();
      for (const Figure& figure : kFigures) {
        if (json.contains(figure.key)) row.*figure.value = json.at(figure.key).get<double>();
      }
      if (json.contains("message")) row.message = json.at("message").get<std::string>();
    } catch (const Json::exception& error) {
      throw Error(path + ": line " + std::to_string(number) + " is not a row of metrics: " + json_reason(error));
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

MetricsWriter::MetricsWriter(const std::string& path, std::int64_t resume_step, bool without_evaluation) : path_(path) {
  if (std::filesystem::is_regular_file(path)) {
    const std::string temporary = path + ".tmp";
    std::string kept;
    for (const MetricsRow& row : read_metrics(path)) {
      if (without_evaluation && row.step == resume_step && row.kind == "eval") continue;
      if (row.step <= resume_step) kept += to_json_line(row) + "\n";
    }
    const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0) throw Error(temporary + ": cannot be written: " + std::strerror(errno));
    try {
      write_all(file, kept, temporary);
    } catch (...) {
      ::close(file);
      ::unlink(temporary.c_str());
      throw;
    }
    ::close(file);
    std::filesystem::rename(temporary, path);
  }
  file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file_ < 0) throw Error(path + ": cannot be written: " + std::strerror(errno));
}

MetricsWriter::~MetricsWriter() {
  if (file_ >= 0) ::close(file_);
}

void MetricsWriter::write(const MetricsRow& row) { write_all(file_, to_json_line(row) + "\n", path_); }

}  // namespace flashgla::train
