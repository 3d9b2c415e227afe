#include "flashgla/generate/decoding.h"

#include <string>

#include "flashgla/base/error.h"
#include "flashgla/base/memory.h"
#include "flashgla/ops/matmul/plans.h"

namespace flashgla::generate {

Decoding::Decoding(Context& context, model::LanguageModel& model, Session& session,
                   const ops::sampling::Options& sampling)
    : context_(context),
      model_(model),
      session_(session),
      grow_again_{context.scratch()},
      sampling_(sampling),
      tokens_(Tensor::zeros({session.sequences()}, DType::i32, model.device())),
      host_(allocate_pinned_memory(kSlots * tokens_->bytes())) {
  sampling.validate();
  for (auto& event : arrived_) event = std::make_unique<Event>(context.queue());
  const bool penalize = sampling.repetition_penalty != 1.0;
  const auto draw = [this, penalize] {
    ops::sampling::run(context_, session_.logits, penalize ? session_.seen.view() : TensorView(),
                       session_.state.positions(), tokens_, sampling_);
  };
  const auto step = [this] {
    ops::sampling::mark_seen(context_, tokens_, {}, session_.seen);
    model_.step(context_, tokens_, session_.state, session_.logits);
  };
  context.scratch().plan([&] {
    draw();
    step();
  });
  const std::string cache = ops::matmul::plan_cache_folder();
  ops::matmul::load_plan_cache(context, cache);
  ops::matmul::time_plans(context, {}, session.sequences());
  ops::matmul::save_plan_cache(context, cache);
  draw_ = std::make_unique<Graph>(context.queue(), draw);
  step_ = std::make_unique<Graph>(context.queue(), step);
}

void Decoding::draw() {
  if (drawn_ - given_ == kSlots) throw Error("decoding: two draws wait already to be asked for");
  const int slot = static_cast<int>(drawn_++ % kSlots);
  draw_->launch();
  context_.queue().copy(static_cast<std::int32_t*>(host_.get()) + slot * tokens_->numel(), tokens_->data,
                        tokens_->bytes());
  arrived_[slot]->record();
  if (arrived_[slot]->passed()) checked(slot);  // before a step takes in what is no token
}

void Decoding::step() { step_->launch(); }

std::span<const std::int32_t> Decoding::tokens() {
  if (given_ == drawn_) throw Error("decoding: no draw waits to be asked for");
  const int slot = static_cast<int>(given_++ % kSlots);
  arrived_[slot]->synchronize();
  return checked(slot);
}

std::span<const std::int32_t> Decoding::checked(int slot) const {
  const std::span<const std::int32_t> tokens(static_cast<std::int32_t*>(host_.get()) + slot * tokens_->numel(),
                                             static_cast<std::size_t>(tokens_->numel()));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0) continue;
    throw Error("sampling: sequence " + std::to_string(i + 1) + ": " +
                (tokens[i] == ops::sampling::kNotANumber ? "a logit is NaN" : "no logit is finite") +
                "; the model's weights may be damaged");
  }
  return tokens;
}

}  // namespace flashgla::generate
