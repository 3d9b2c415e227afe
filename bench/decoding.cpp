// The bench of decoding: a draw and a step a token, as generation makes them, the host's part included.
#include "flashgla/generate/decoding.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bench/benches.h"
#include "bench/kernel_times.h"
#include "bench/noise_model.h"
#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"
#include "flashgla/model/cost.h"
#include "flashgla/model/quantise.h"
#include "flashgla/ops/gated_linear_attention/ring.h"
#include "testing/compare.h"

namespace flashgla::bench {

namespace {

using model::LanguageModel;

// Largest relative difference of a small model's logits from the reference implementations' on the CPU, in f32. Each
// operator is held to 1e-5 on its own; behind one another they are not, because a first token's output is (q . k) v and
// the norm behind it magnifies the rounding of a small q . k. Where activations are bf16: as often what the reference
// implementations differ by when they round in the same places.
constexpr double kDecodingTolerance = 5e-3, kOfRounded = 1.5;

struct Case {
  const char* preset;
  std::int64_t sequences;
  DType dtype;
  std::int64_t before = 0;     // tokens that each sequence has had, which only states that grow look at
  const char* quantised = "";  // a preset of 8 or 4 bits
};

std::vector<Case> cases(Device device) {
  std::vector<Case> all = {{"gla-340m", 1, DType::bf16}, {"gla-340m", 1, DType::f32}};
  if (device == Device::cpu()) {
    for (const char* preset : {"q8", "q4"}) {
      for (const std::int64_t sequences : {1, 16}) all.push_back({"gla-340m", sequences, DType::bf16, 0, preset});
    }
  } else {
    for (const std::int64_t sequences : {1, 8, 16, 64, 256}) all.push_back({"gla-1.3b", sequences, DType::bf16});
    for (const char* preset : {"q8", "q4"}) {
      for (const std::int64_t sequences : {1, 8, 16, 64})
        all.push_back({"gla-1.3b", sequences, DType::bf16, 0, preset});
    }
    for (const std::int64_t sequences : {1, 8}) all.push_back({"transformer-1.3b", sequences, DType::bf16, 2047});
    all.push_back({"mamba-1.3b", 1, DType::bf16});
    all.push_back({"retnet-1.3b", 1, DType::bf16});
    all.push_back({"rwkv-1b5", 1, DType::bf16});
    all.push_back({"hyena-340m", 1, DType::bf16, 1023});
  }
  return all;
}

// Activations as generation has them.
DType activations_of(const Context& context, DType parameters) {
  return context.architecture().matrix_units && parameters == DType::bf16 ? DType::bf16 : DType::f32;
}

// Of the same kind as a preset, byte level.
model::ModelConfig small_model_like(std::string_view preset) {
  if (preset.starts_with("gla")) return model::preset("gla-tiny");
  if (preset.starts_with("transformer")) return model::preset("transformer-tiny");
  if (preset.starts_with("retnet")) {
    return model::parse_config(
        R"({"model_type": "retnet", "hidden_size": 128, "num_hidden_layers": 4, "num_heads": 2, "vocab_size": 256})",
        "bench: small model");
  }
  if (preset.starts_with("rwkv")) {
    return model::parse_config(
        R"({"model_type": "rwkv", "hidden_size": 128, "num_hidden_layers": 4, "zero_init": false, "vocab_size": 256})",
        "bench: small model");
  }
  if (preset.starts_with("hyena")) {
    return model::parse_config(
        R"({"model_type": "hyena", "hidden_size": 128, "num_hidden_layers": 4, "l_max": 64, "vocab_size": 256})",
        "bench: small model");
  }
  return model::parse_config(
      R"({"model_type": "mamba", "hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 256})",
      "bench: small model");
}

// Logits of a few tokens of a small model of the same kind.
Tensor logits_of_small_model(const Case& of, Device device, DType activations, const char* implementation) {
  const std::int64_t sequences = of.sequences;
  const bool quantised = *of.quantised != '\0';
  auto made =
      std::make_unique<LanguageModel>(small_model_like(of.preset), of.dtype, quantised ? Device::cpu() : device, false);
  made->parameters().initialize(1);
  if (quantised) {
    made = model::quantise(*made, {model::find_quantisation_preset(of.quantised)});
    // On the CPU packed weights meet f32 alone; what bf16 activations cost, the same weights in floats say.
    if (device != Device::cpu()) {
      made = model::copied_to(*made, device);
    } else if (activations == DType::bf16) {
      made = model::dequantise(*made, of.dtype, device);
    }
  }
  LanguageModel& model = *made;
  model.set_inference_dtype(activations);
  Context context(device);
  context.force_implementation(implementation);
  model::DecodeState state = model.make_state(sequences, 4);
  const Tensor logits = Tensor::empty({sequences, model.config().vocab_size}, DType::f32, device);
  const Tensor tokens = Tensor::empty({sequences}, DType::i32);
  for (std::int32_t t = 0; t < 4; ++t) {
    for (std::int64_t n = 0; n < sequences; ++n) {
      tokens.as<std::int32_t>()[n] = static_cast<std::int32_t>((n * 7 + t * 31) % 256);
    }
    const ArenaScope scope(context.scratch());
    model.step(context, on_device(context, tokens, "tokens"), state, logits);
    context.queue().synchronize();
  }
  const Tensor host = Tensor::empty(logits->shape, DType::f32);
  copy_memory(host->data, Device::cpu(), logits->data, device, logits->bytes());
  return host;
}

// Bytes of weights that a token needs: a table that is only looked up gives a row.
double bytes_read(const LanguageModel& model) {
  std::size_t bytes = 0;
  for (const nn::Parameter* parameter : model.parameters().parameters()) {
    if (parameter->multiplied) bytes += parameter->value.bytes();
  }
  return static_cast<double>(bytes);
}

// Median milliseconds from one token of all sequences to the next, after so many that were all zeros; with a ring,
// where one token of kRing writes the state, of such runs' means. operators: where a token's time goes; null: not
// asked.
double milliseconds_a_token(Context& context, LanguageModel& model, std::int64_t sequences, std::int64_t before,
                            double seconds, std::vector<testing::OperatorTime>* operators) {
  using Clock = std::chrono::steady_clock;
  constexpr int kCounted = 2 * ops::gated_linear_attention::kRing;  // tokens whose kernels are counted
  const std::int64_t most = std::min<std::int64_t>(4096, model.config().most_tokens().count - before);
  generate::Session session(model, sequences);
  session.state.reserve(before + most);
  for (model::DecodeState::History& history : session.state.history) history.tokens = before;
  const std::vector<std::int32_t> positions(static_cast<std::size_t>(sequences), static_cast<std::int32_t>(before));
  copy_memory(session.state.positions().data, model.device(), positions.data(), Device::cpu(),
              session.state.positions().bytes());
  generate::Decoding decoding(context, model, session, {.temperature = 0.0});
  const std::int64_t together = session.state.has_ring() ? ops::gated_linear_attention::kRing : 1;
  std::vector<double> times;
  const auto begin = Clock::now();
  auto last = begin;
  decoding.draw();
  for (std::int64_t t = 1; t < most - kCounted; ++t) {  // the device a token ahead, as Generator has it
    decoding.step();
    decoding.draw();
    decoding.tokens();
    if (t % together != 0) continue;
    const auto now = Clock::now();
    if (t > together) {
      times.push_back(std::chrono::duration<double, std::milli>(now - last).count() / static_cast<double>(together));
    }
    last = now;
    if (times.size() >= 5 && std::chrono::duration<double>(now - begin).count() > seconds) break;
  }
  context.queue().synchronize();
  if (operators != nullptr) {
    *operators = operator_times(
        context,
        [&] {
          for (int t = 0; t < kCounted; ++t) {
            decoding.tokens();
            decoding.step();
            decoding.draw();
          }
        },
        kCounted);
  }
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

}  // namespace

void bench_decoding(const testing::BenchOptions& options) {
  for (const Case& each : cases(options.device)) {
    testing::BenchRow row;
    row.operation = "model_decoding";
    row.implementation = "all";
    row.problem = std::string(each.preset) + " batch " + std::to_string(each.sequences) + " " + name_of(each.dtype) +
                  (*each.quantised == '\0' ? "" : std::string(" ") + each.quantised);
    if (!options.wants(row.problem) || !options.wants_implementation(row.implementation)) continue;
    Context context(options.device, options.threads);
    const DType activations = activations_of(context, each.dtype);
    const Tensor expected = logits_of_small_model(each, Device::cpu(), DType::f32, "reference");
    const Tensor rounded = logits_of_small_model(each, Device::cpu(), activations, "reference");
    row.error = testing::difference(logits_of_small_model(each, options.device, activations, ""), expected).relative;
    const double of_rounding = testing::difference(rounded, expected).relative;
    if (!(row.error <= std::max(kDecodingTolerance, kOfRounded * of_rounding))) {
      row.refused = "logits of a small model differ from the reference's by " + std::to_string(row.error);
      options.report(row);
      continue;
    }
    const auto made = noise_model(each.preset, each.dtype, options.device, each.quantised, options.threads);
    LanguageModel& model = *made;
    model.set_inference_dtype(activations);
    row.milliseconds = milliseconds_a_token(context, model, each.sequences, each.before, options.seconds,
                                            options.kernels ? &row.operators : nullptr);
    const mixers::Cost cost = model::cost(model.config(), each.before + 1);
    // What is read and written of the states, or with a ring written every kRing tokens alone.
    const bool ring = model.make_state(each.sequences, 0, model.ring_pays(each.sequences)).has_ring();
    const double of_states = ring ? 0.5 + 0.5 / static_cast<double>(ops::gated_linear_attention::kRing) : 1.0;
    const double state_bytes = static_cast<double>(each.sequences) * cost.decode_bytes * of_states;
    add_floors(row.operators, model.config(), Step::token, each.sequences, state_bytes);
    row.bytes = bytes_read(model) + state_bytes;
    row.flops = static_cast<double>(each.sequences) * cost.forward_flops;
    options.report(row);
  }
}

}  // namespace flashgla::bench
