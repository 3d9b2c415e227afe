// Generation whose steps append to a ring beside the state: what it writes, and what is saved of it, at every phase.
#include "flashgla/ops/gated_linear_attention/ring.h"

#include <gtest/gtest.h>

#include <vector>

#include "flashgla/base/names.h"
#include "flashgla/generate/tests/small_model.h"
#include "testing/devices.h"
#include "testing/temporary_folder.h"

namespace flashgla::generate {
namespace {

constexpr std::int64_t kSequences = ops::gated_linear_attention::kRing;
constexpr ops::sampling::Options kManner = {.temperature = 0.9, .top_k = 50, .seed = 5};

enum class Kind { without, with };

struct RingWriter : SmallModel {
  using SmallModel::SmallModel;

  // Sequences whose prompts have 1 to 16 tokens.
  Session begun(Kind kind) {
    Session session(model, kSequences);
    session.state = model.make_state(kSequences, 0, kind == Kind::with);
    EXPECT_EQ(session.state.has_ring(), kind == Kind::with);
    feed(session, "A state of");
    return session;
  }
  void feed(Session& session, const std::string& text) {
    std::vector<text::TokenIds> prompts;
    for (std::int64_t n = 0; n < kSequences; ++n) {
      prompts.emplace_back();
      for (std::int64_t t = 0; t <= n; ++t) {
        prompts.back().push_back(text[static_cast<std::size_t>(n + t) % text.size()]);
      }
    }
    generator.feed(session, prompts);
  }
  std::vector<std::string> write(Session& session, std::int64_t tokens) {
    GenerateOptions options;
    options.max_tokens = tokens;
    options.sampling = kManner;
    options.stop_at_end = false;
    std::vector<std::string> texts(kSequences);
    generator.generate(session, options, [&](std::size_t i, std::string_view piece) { texts[i] += piece; });
    return texts;
  }
};

TEST(GenerationWithARing, IsThereForManySequencesOfAGpu) {
  for (const Device device : testing::test_devices()) {
    const RingWriter writer(device);
    const bool gpu = device != Device::cpu();
    EXPECT_EQ(Session(writer.model, kSequences).state.has_ring(), gpu);
    EXPECT_FALSE(Session(writer.model, 2).state.has_ring());
  }
}

// Also where a prompt comes between: what waits in the ring is then part of the state.
TEST(GenerationWithARing, WritesTheSameText) {
  RingWriter cpu(Device::cpu());
  const auto write = [](RingWriter& writer, Kind kind) {
    Session session = writer.begun(kind);
    std::vector<std::string> texts = writer.write(session, 37);
    writer.feed(session, "and then");
    for (const std::string& text : writer.write(session, 20)) texts.push_back(text);
    return texts;
  };
  const std::vector<std::string> expected = write(cpu, Kind::without);
  for (const Device device : testing::test_devices()) {
    SCOPED_TRACE(flashgla::name_of(device));
    RingWriter writer(device);
    EXPECT_EQ(write(writer, Kind::with), expected);
  }
}

// A file has state and ring: on the device that wrote it nothing changes by saving, and any other goes on from it,
// whether the file has a ring or not.
TEST(GenerationWithARing, IsSavedAtEveryPhase) {
  const testing::TemporaryFolder folder;
  const std::string file = folder / "session";
  RingWriter cpu(Device::cpu());
  for (const Device device : testing::test_devices()) {
    SCOPED_TRACE(flashgla::name_of(device));
    RingWriter writer(device);
    for (std::int64_t tokens = 0; tokens <= kSequences; ++tokens) {
      for (const Kind kind : {Kind::with, Kind::without}) {
        SCOPED_TRACE(std::to_string(tokens) + (kind == Kind::with ? " tokens, with" : " tokens, without"));
        Session session = writer.begun(kind);
        writer.write(session, tokens);
        session.save(writer.model, file);
        Session here(writer.model, kSequences), there(cpu.model, kSequences);
        here.load(writer.model, file);
        there.load(cpu.model, file);
        EXPECT_EQ(here.state.has_ring(), device != Device::cpu());
        EXPECT_FALSE(there.state.has_ring());
        const std::vector<std::string> expected = writer.write(session, 20);
        EXPECT_EQ(writer.write(here, 20), expected);
        EXPECT_EQ(cpu.write(there, 20), expected);
        if (kind == Kind::with || device == Device::cpu()) {
          EXPECT_EQ(writer.logits(here), writer.logits(session));
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashgla::generate
