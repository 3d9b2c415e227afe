#include "flashgla/eval/recall.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "flashgla/base/error.h"
#include "flashgla/base/memory.h"
#include "flashgla/data/loader.h"
#include "flashgla/eval/jobs.h"
#include "flashgla/ops/arguments.h"

namespace flashgla::eval {
namespace {

using nlohmann::json;

Tensor on_device(const TensorView& host, Device device) {
  Tensor copy = Tensor::empty(host.shape, host.dtype, device);
  copy_memory(copy->data, device, host.data, Device::cpu(), host.bytes());
  return copy;
}

double sum_of(const TensorView& values) {
  const Tensor host = Tensor::empty(values.shape, values.dtype);
  copy_memory(host->data, Device::cpu(), values.data, values.device, values.bytes());
  double sum = 0.0;
  for (std::int64_t i = 0; i < host->numel(); ++i) {
    sum += host->dtype == DType::f64 ? host.as<double>()[i] : static_cast<double>(host.as<float>()[i]);
  }
  return sum;
}

json answers_of(const Work& work, const data::Batch& batch, std::int64_t answers) {
  const Device device = work.context.device();
  const Tensor tokens = on_device(batch.tokens, device), targets = on_device(batch.targets, device);
  const Tensor places = on_device(batch.places, device);
  const DType wide = ops::accumulator_of(work.model.dtype());
  const Tensor losses = Tensor::empty(targets->shape, wide, device), hits = Tensor::empty(targets->shape, wide, device);
  nn::Pass pass{work.context};
  work.model.evaluate(pass, tokens, targets, losses, nullptr, {places, hits});
  work.context.queue().synchronize();
  const double loss = sum_of(losses);
  if (std::isnan(loss)) throw Error("evaluate: the loss of an answer is NaN; the model's weights may be damaged");
  return {{"loss", loss}, {"right", sum_of(hits)}, {"answers", answers}};
}

}  // namespace

RecallResult evaluate_recall(const Work& work, const data::TokenSpan& task, const RecallOptions& options) {
  const std::int64_t length = task.file->document_begins()[1];
  data::LoaderConfig settings;
  settings.mode = data::LoaderMode::labelled;
  settings.batch = std::max<std::int64_t>(options.batch_tokens / length, 1);
  settings.length = length;
  settings.shuffle = false;
  settings.single_pass = true;
  data::Loader loader(task, settings);
  const std::int64_t all = task.file->documents();
  const std::int64_t total = options.limit > 0 ? std::min(options.limit, all) : all;
  RecallResult result;
  data::Batch batch;
  while (result.complete && result.sequences < total && loader.next(batch)) {
    const std::int64_t count = std::min(settings.batch, total - result.sequences);
    // Behind the limit nothing is asked for.
    std::fill(batch.targets.as<std::int32_t>() + count * loader.labels(),
              batch.targets.as<std::int32_t>() + batch.targets.numel(), -1);
    const json job = result_of(work, result.jobs, [&] { return answers_of(work, batch, count * loader.labels()); });
    result.loss += job.at("loss").get<double>();
    result.right += static_cast<std::int64_t>(job.at("right").get<double>());
    result.answers += job.at("answers").get<std::int64_t>();
    result.sequences += count;
    ++result.jobs;
    const double accuracy = static_cast<double>(result.right) / static_cast<double>(result.answers);
    result.complete = goes_on(work, result.sequences, total, accuracy) || result.sequences == total;
  }
  return result;
}

}  // namespace flashgla::eval
