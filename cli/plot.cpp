// flashgla plot: curves of one or more runs, drawn by gnuplot.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cli/checks.h"
#include "cli/gnuplot.h"
#include "cli/say.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "flashgla/base/error.h"
#include "flashgla/train/metrics.h"

namespace flashgla::cli {

namespace {

struct PlotArguments {
  std::vector<std::string> runs;
  std::string out = "loss.png";
  std::string metric = "loss";
  std::string x = "step";
  std::string title;
  std::vector<std::string> log;
  int smooth = 0;
  bool terminal = false;
};

struct Metric {
  const char* name;
  const char* label;
  double train::MetricsRow::*value;
};
constexpr Metric kMetrics[] = {
    {"loss", "loss (nats per token)", &train::MetricsRow::loss},
    {"bpb", "bits per byte", &train::MetricsRow::bits_per_byte},
    {"ppl", "perplexity", &train::MetricsRow::perplexity},
    {"accuracy", "share of right answers", &train::MetricsRow::accuracy},
    {"lr", "learning rate", &train::MetricsRow::learning_rate},
    {"grad_norm", "gradient norm", &train::MetricsRow::gradient_norm},
    {"tok/s", "tokens per second", &train::MetricsRow::tokens_per_second},
    {"flop/s", "model FLOP/s", &train::MetricsRow::flops_per_second},
};

struct Curve {
  std::string label;
  bool evaluation;
  std::vector<std::pair<double, double>> points;
};

double x_of(const train::MetricsRow& row, const std::string& x) {
  if (x == "tokens") return static_cast<double>(row.tokens);
  if (x == "time") return row.seconds;
  return static_cast<double>(row.step);
}

// Mean over `window` neighbouring points.
std::vector<std::pair<double, double>> smoothed(const std::vector<std::pair<double, double>>& points,
                                                std::size_t window) {
  if (window <= 1) return points;
  std::vector<std::pair<double, double>> result;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const std::size_t half = std::min({window / 2, i, points.size() - 1 - i});
    double sum = 0.0;
    for (std::size_t j = i - half; j <= i + half; ++j) sum += points[j].second;
    result.emplace_back(points[i].first, sum / static_cast<double>(2 * half + 1));
  }
  return result;
}

std::vector<Curve> read_curves(const PlotArguments& arguments, const Metric& metric) {
  std::vector<Curve> curves;
  for (const std::string& run : arguments.runs) {
    const std::filesystem::path given(run);
    const bool folder = std::filesystem::is_directory(given);
    const std::filesystem::path file = folder ? given / "metrics.jsonl" : given;
    if (!std::filesystem::exists(file)) {
      throw Error(run + ": no metrics.jsonl there; expected the run folder of `flashgla train`");
    }
    std::string name = (folder ? given.lexically_normal() : given.parent_path().lexically_normal()).filename().string();
    if (name.empty() || name == ".") name = run;
    Curve training{name, false, {}};
    Curve evaluation{name + " (validation)", true, {}};
    for (const train::MetricsRow& row : train::read_metrics(file.string())) {
      const double x = x_of(row, arguments.x);
      const double y = row.*metric.value;
      if (!std::isfinite(x) || !std::isfinite(y) || row.kind == "skipped") continue;
      (row.kind == "eval" ? evaluation : training).points.emplace_back(x, y);
    }
    if (training.points.empty() && evaluation.points.empty()) {
      throw Error(file.string() + ": holds no values of '" + metric.name + "'");
    }
    const auto window =
        arguments.smooth > 0 ? static_cast<std::size_t>(arguments.smooth) : training.points.size() / 100;
    training.points = smoothed(training.points, window);
    if (!training.points.empty()) curves.push_back(std::move(training));
    if (!evaluation.points.empty()) curves.push_back(std::move(evaluation));
  }
  return curves;
}

std::string gnuplot_script(const PlotArguments& arguments, const Metric& metric, const std::vector<Curve>& curves,
                           const std::string& out) {
  std::string script;
  if (arguments.terminal) {
    const char* columns = std::getenv("COLUMNS");
    const int width = columns != nullptr ? std::atoi(columns) : terminal_columns(STDOUT_FILENO, 100);
    script += fmt::format("set terminal dumb noenhanced size {},30\nset output {}\n", std::clamp(width, 40, 300),
                          gnuplot_string(out));
  } else {
    script += gnuplot_png(out);
  }
  script += fmt::format("set xlabel '{}'\n", arguments.x == "time"     ? "seconds"
                                             : arguments.x == "tokens" ? "tokens"
                                                                       : "step");
  script += arguments.terminal ? fmt::format("set title {}\n",
                                             gnuplot_string(arguments.title.empty() ? metric.label : arguments.title))
                               : fmt::format("set ylabel {}\n", gnuplot_string(metric.label));
  if (!arguments.terminal && !arguments.title.empty()) script += "set title " + gnuplot_string(arguments.title) + "\n";
  if (arguments.x == "tokens") script += "set format x '%.1s%c'\n";
  for (const std::string& axis : arguments.log) script += "set logscale " + axis + "\n";
  script += "set key top right\n";
  for (std::size_t i = 0; i < curves.size(); ++i) {
    script += fmt::format("$curve{} << EOD\n", i);
    for (const auto& [x, y] : curves[i].points) script += fmt::format("{:.10g} {:.10g}\n", x, y);
    script += "EOD\n";
  }
  script += "plot ";
  for (std::size_t i = 0; i < curves.size(); ++i) {
    const bool dots = curves[i].evaluation || curves[i].points.size() == 1;
    const char* style =
        arguments.terminal ? (dots ? "points" : "lines") : (dots ? "linespoints pt 7 ps 0.8 lw 2" : "lines lw 2");
    script += fmt::format("{}$curve{} with {} title {}", i == 0 ? "" : ", ", i, style, gnuplot_string(curves[i].label));
  }
  return script + "\n";
}

void run_plot(const PlotArguments& arguments) {
  const Metric* metric = nullptr;
  for (const Metric& candidate : kMetrics) {
    if (arguments.metric == candidate.name) metric = &candidate;
  }
  const std::vector<Curve> curves = read_curves(arguments, *metric);
  const auto script = [&](const std::string& file) { return gnuplot_script(arguments, *metric, curves, file); };
  if (arguments.terminal) {
    print("{}", drawn(script));
    return;
  }
  draw_picture(arguments.out, script);
  print("{}\n", arguments.out);
}

}  // namespace

void add_plot(CLI::App& app) {
  auto arguments = std::make_shared<PlotArguments>();
  std::vector<std::string> names;
  for (const Metric& metric : kMetrics) names.emplace_back(metric.name);
  CLI::App* verb = app.add_subcommand("plot",
                                      "Draws a metric of one or more runs: a PNG, or text with --terminal.\n"
                                      "Example: flashgla plot runs/a runs/b --metric bpb --x tokens --out compare.png");
  verb->add_option("runs", arguments->runs, "Run folders (or metrics.jsonl files)")->required();
  verb->add_option("--out", arguments->out, "The picture")->capture_default_str();
  verb->add_option("--metric", arguments->metric, "What is drawn")->capture_default_str()->check(CLI::IsMember(names));
  verb->add_option("--x", arguments->x, "Horizontal axis")
      ->capture_default_str()
      ->check(CLI::IsMember(std::vector<std::string>{"step", "tokens", "time"}));
  verb->add_option("--title", arguments->title, "Text above the picture");
  verb->add_option("--log", arguments->log, "Axes with a logarithmic scale")
      ->delimiter(',')
      ->check(CLI::IsMember(std::vector<std::string>{"x", "y"}));
  verb->add_option("--smooth", arguments->smooth, "Mean over this many rows of training; 0: a hundredth of them")
      ->capture_default_str()
      ->transform(count_between(0, 1000000000, "a whole number from 0 to 1e9"));
  verb->add_flag("--terminal", arguments->terminal, "Draw with characters on standard output");
  verb->callback([arguments] { run_plot(*arguments); });
}

}  // namespace flashgla::cli
