// Generation on each device that the tests are to use: what it shares with the CPU, bit for bit or token for token.
#include "testing/devices.h"

#include <gtest/gtest.h>

#include "flashgla/base/names.h"
#include "flashgla/generate/decoding.h"
#include "flashgla/generate/tests/small_model.h"
#include "testing/compare.h"
#include "testing/temporary_folder.h"

namespace flashgla::generate {
namespace {

struct Writer : SmallModel {
  using SmallModel::SmallModel;

  Session begun(const std::string& prompt) {
    Session session(model, 1);
    generator.feed(session, {generator.encode(prompt, true)});
    return session;
  }
  std::string write(Session& session, std::int64_t tokens, ops::sampling::Options sampling) {
    GenerateOptions options;
    options.max_tokens = tokens;
    options.sampling = sampling;
    options.stop_at_end = false;
    std::string text;
    generator.generate(session, options, [&](std::size_t, std::string_view piece) { text += piece; });
    return text;
  }
};

const ops::sampling::Options kManners[] = {{.temperature = 1.0, .seed = 7},
                                           {.temperature = 0.8, .top_k = 40, .top_p = 0.95, .seed = 8},
                                           {.temperature = 1.2, .min_p = 0.02, .repetition_penalty = 1.3, .seed = 9}};

TEST(GenerationDevices, EqualSeedsWriteTheCpusText) {
  for (const Device device : testing::test_devices()) {
    if (device == Device::cpu()) continue;
    for (const char* use_short_conv : {"true", "false"}) {
      Writer here(Device::cpu(), use_short_conv), there(device, use_short_conv);
      for (const ops::sampling::Options& manner : kManners) {
        Session a = here.begun("Once upon a time"), b = there.begun("Once upon a time");
        EXPECT_EQ(here.write(a, 512, manner), there.write(b, 512, manner)) << "seed " << manner.seed;
        EXPECT_EQ(a.state.history, b.state.history);
      }
    }
  }
}

TEST(GenerationDevices, StatesMoveBetweenDevices) {
  const testing::TemporaryFolder folder;
  const std::string file = folder / "session";
  for (const Device device : testing::test_devices()) {
    if (device == Device::cpu()) continue;
    Writer here(Device::cpu()), there(device);
    for (const auto& [from, to] : {std::pair{&here, &there}, {&there, &here}, {&there, &there}}) {
      for (std::int64_t tokens = 0; tokens < 18; ++tokens) {
        Session first = from->begun("A state");
        from->write(first, tokens, kManners[0]);
        first.save(from->model, file);
        Session second(to->model, 1);
        second.load(to->model, file);
        EXPECT_EQ(from->logits(first), to->logits(second));
        EXPECT_EQ(from->write(first, 30, kManners[0]), to->write(second, 30, kManners[0])) << tokens;
        if (from == to) {
          EXPECT_EQ(from->logits(first), to->logits(second)) << tokens;
        }
      }
    }
  }
}

// A device that is a token ahead of the host writes the same.
TEST(GenerationDevices, EndsWhereItWouldOneTokenAtATime) {
  for (const Device device : testing::test_devices()) {
    Writer writer(device);
    const auto write = [&](bool ends_session) {
      Session session = writer.begun("Once upon a time");
      GenerateOptions options;
      options.max_tokens = 200;
      options.sampling = kManners[0];
      options.stop = {"a", "\n"};
      options.ends_session = ends_session;
      std::string text;
      const auto results =
          writer.generator.generate(session, options, [&](std::size_t, std::string_view piece) { text += piece; });
      return std::tuple{text, results[0].tokens, results[0].finish};
    };
    EXPECT_EQ(write(true), write(false)) << flashgla::name_of(device);
    EXPECT_NE(std::get<2>(write(true)), Finish::length);
  }
}

TEST(GenerationDevices, WhatTheArenaHeldDoesNotMatter) {
  for (const Device device : testing::test_devices()) {
    Writer writer(device);
    const auto steps = [&](bool poisoned) {
      Session session = writer.begun("Once");
      session.state.reserve(session.longest() + 20);
      Decoding decoding(writer.context, writer.model, session, kManners[2]);
      std::vector<std::int32_t> tokens;
      for (int t = 0; t < 20; ++t) {
        if (poisoned) {
          writer.context.queue().synchronize();
          Arena& arena = writer.context.scratch();
          const ArenaScope scope(arena);
          testing::fill_with_nan(arena.allocate(arena.peak()), arena.peak(), device);
        }
        decoding.draw();
        tokens.push_back(decoding.tokens()[0]);
        decoding.step();
      }
      return std::pair{tokens, writer.logits(session)};
    };
    EXPECT_EQ(steps(true), steps(false));
  }
}

TEST(GenerationDevices, SequencesOfABatchAreAsAlone) {
  const std::vector<std::string> prompts = {"a", "The second prompt is longer", "three"};
  for (const Device device : testing::test_devices()) {
    Writer writer(device);
    std::vector<text::TokenIds> tokens;
    tokens.reserve(prompts.size());
    for (const std::string& prompt : prompts) tokens.push_back(writer.generator.encode(prompt, true));
    Session batch(writer.model, 3);
    writer.generator.feed(batch, tokens);
    GenerateOptions options;
    options.max_tokens = 40;
    options.sampling.temperature = 0.0;
    options.stop_at_end = false;
    std::vector<std::string> texts(3);
    writer.generator.generate(batch, options, [&](std::size_t i, std::string_view piece) { texts[i] += piece; });
    for (std::size_t i = 0; i < 3; ++i) {
      Session alone = writer.begun(prompts[i]);
      EXPECT_EQ(texts[i], writer.write(alone, 40, options.sampling)) << prompts[i];
    }
  }
}

}  // namespace
}  // namespace flashgla::generate
