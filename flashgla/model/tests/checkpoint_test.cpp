#include "flashgla/model/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <set>

#include "flashgla/model/tests/cases.h"
#include "testing/compare.h"
#include "testing/temporary_folder.h"

namespace flashgla::model {
namespace {

using ::testing::HasSubstr;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void expect_same_parameters(const LanguageModel& a, const LanguageModel& b) {
  ASSERT_EQ(a.parameters().parameters().size(), b.parameters().parameters().size());
  for (std::size_t i = 0; i < a.parameters().parameters().size(); ++i) {
    EXPECT_TRUE(testing::same_bits(a.parameters().parameters()[i]->value, b.parameters().parameters()[i]->value))
        << a.parameters().parameters()[i]->name;
  }
}

std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

class Checkpoint : public ::testing::Test {
 protected:
  testing::TemporaryFolder folder_;
};

TEST_F(Checkpoint, EveryModelComesBackInEveryLayout) {
  for (const SmallModel& row : small_models()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const auto model = make_small(row.config, dtype, true);
      for (const MlpLayout layout : {MlpLayout::current, MlpLayout::fused}) {
        for (const std::size_t shard_bytes : {std::size_t{0}, std::size_t{1000}}) {
          save_model(*model, folder_.path(), {shard_bytes, layout});
          const auto loaded = load_model(folder_.path());
          EXPECT_EQ(loaded->dtype(), dtype);
          EXPECT_EQ(to_json(loaded->config()), to_json(row.config));
          expect_same_parameters(*model, *loaded);
          EXPECT_EQ(fingerprint(*model), fingerprint(*loaded));
        }
      }
    }
  }
}

TEST_F(Checkpoint, ShardsAndIndexReplaceOneFileAndBack) {
  const auto model = make_small(small_models().front().config, DType::f32, false);
  save_model(*model, folder_.path());
  EXPECT_EQ(names_in(folder_.path()), (std::set<std::string>{"config.json", "model.safetensors"}));
  save_model(*model, folder_.path(), {4000});
  const auto sharded = names_in(folder_.path());
  EXPECT_TRUE(sharded.contains("model.safetensors.index.json"));
  EXPECT_FALSE(sharded.contains("model.safetensors"));
  EXPECT_GT(sharded.size(), 3u);
  EXPECT_EQ(open_weights(folder_.path()).files.size(), sharded.size() - 2);
  save_model(*model, folder_.path());
  EXPECT_EQ(names_in(folder_.path()), (std::set<std::string>{"config.json", "model.safetensors"}));
}

TEST_F(Checkpoint, TiedHeadIsOmittedAndAcceptedWhenPresent) {
  ModelConfig config = small_models().front().config;
  const auto untied = make_small(config, DType::f32, false);
  save_model(*untied, folder_.path());
  EXPECT_NE(open_weights(folder_.path()).find("lm_head.weight"), nullptr);
  config.tie_word_embeddings = true;
  testing::write_bytes(folder_ / "config.json", to_json(config));
  EXPECT_EQ(load_model(folder_.path())->parameters().count(),
            untied->parameters().count() - config.vocab_size * config.hidden_size);
  save_model(*load_model(folder_.path()), folder_.path());
  EXPECT_EQ(open_weights(folder_.path()).find("lm_head.weight"), nullptr);
}

TEST_F(Checkpoint, UnfusedNameOfTheGatedNormIsAccepted) {
  const auto model = make_small(small_models().front().config, DType::f32, false);
  save_model(*model, folder_.path());
  std::vector<NamedTensor> renamed;
  for (const nn::Parameter* parameter : model->parameters().parameters()) {
    std::string name = parameter->name;
    const auto at = name.find("g_norm_swish_gate");
    if (at != std::string::npos) name.replace(at, 17, "g_norm");
    renamed.push_back({name, parameter->value});
  }
  write_safetensors(folder_ / "model.safetensors", renamed);
  expect_same_parameters(*model, *load_model(folder_.path()));
}

TEST_F(Checkpoint, LoadsInAnotherDtypeAndForTraining) {
  const auto model = make_small(small_models().front().config, DType::f32, false);
  save_model(*model, folder_.path());
  const auto loaded = load_model(folder_.path(), {DType::bf16, Device::cpu(), true});
  EXPECT_EQ(loaded->dtype(), DType::bf16);
  EXPECT_TRUE(loaded->training());
  const auto& parameters = model->parameters().parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(testing::same_bits(testing::converted(parameters[i]->value, DType::bf16),
                                   loaded->parameters().parameters()[i]->value));
  }
  std::vector<Tensor> halves;
  std::vector<NamedTensor> named;
  halves.reserve(parameters.size());
  for (const nn::Parameter* parameter : parameters) halves.push_back(testing::converted(parameter->value, DType::f16));
  for (std::size_t i = 0; i < parameters.size(); ++i) named.push_back({parameters[i]->name, halves[i]});
  write_safetensors(folder_ / "model.safetensors", named);
  EXPECT_EQ(load_model(folder_.path())->dtype(), DType::f32) << "half precision is loaded as f32";
}

TEST_F(Checkpoint, ConfigThatDisagreesWithTheWeightsIsNamed) {
  const ModelConfig config = small_models().front().config;
  save_model(*make_small(config, DType::f32, false), folder_.path());
  const auto with = [&](const std::function<void(ModelConfig&)>& change) {
    ModelConfig changed = config;
    change(changed);
    testing::write_bytes(folder_ / "config.json", to_json(changed));
    return error_of([&] { load_model(folder_.path()); });
  };
  EXPECT_EQ(with([](ModelConfig& c) { c.vocab_size = 18; }),
            folder_.path() +
                ": tensor 'model.embeddings.weight' has shape [17,12], but by the config it is [18,12]; "
                "correct " +
                (folder_ / "config.json") + " or use the weights that belong to it");
  EXPECT_THAT(with([](ModelConfig& c) { c.num_hidden_layers = 3; }),
              HasSubstr("have no tensor 'model.layers.2.attn_norm.weight' [12]"));
  EXPECT_THAT(with([](ModelConfig& c) { c.num_hidden_layers = 1; }), HasSubstr("'model.layers.1."));
  EXPECT_THAT(with([](ModelConfig& c) { c.set("use_short_conv", "true"); }), HasSubstr("q_conv1d"));
  EXPECT_THAT(with([](ModelConfig& c) { c.set("use_output_gate", "false"); }), HasSubstr("g_norm"));
  EXPECT_THAT(with([](ModelConfig& c) { c.intermediate_size = 1 << 26; }), HasSubstr("[67108864,12]"))
      << "refused before memory is taken";
  EXPECT_THAT(with([](ModelConfig& c) { c.intermediate_size = 10; }), HasSubstr("mlp.up_proj"));
}

TEST_F(Checkpoint, MissingAndDamagedFilesAreNamed) {
  EXPECT_THAT(error_of([&] { load_model(folder_ / "nowhere"); }), HasSubstr("nowhere/config.json"));
  const auto model = make_small(small_models().front().config, DType::f32, false);
  testing::write_bytes(folder_ / "config.json", to_json(model->config()));
  EXPECT_THAT(error_of([&] { load_model(folder_.path()); }), HasSubstr("neither model.safetensors nor"));
  save_model(*model, folder_.path());
  std::string bytes = testing::read_bytes(folder_ / "model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  testing::write_bytes(folder_ / "model.safetensors", bytes);
  EXPECT_THAT(error_of([&] { load_model(folder_.path()); }), HasSubstr("model.safetensors: corrupt"));
  bytes.pop_back();
  testing::write_bytes(folder_ / "model.safetensors", bytes);
  EXPECT_THAT(error_of([&] { load_model(folder_.path()); }), HasSubstr("model.safetensors: truncated"));
}

TEST_F(Checkpoint, IndexThatDisagreesWithItsShardsIsNamed) {
  const auto model = make_small(small_models().front().config, DType::f32, false);
  save_model(*model, folder_.path(), {4000});
  const std::string index = testing::read_bytes(folder_ / "model.safetensors.index.json");
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = index;
    const auto at = changed.find(from);
    EXPECT_NE(at, std::string::npos);
    changed.replace(at, from.size(), to);
    testing::write_bytes(folder_ / "model.safetensors.index.json", changed);
    return error_of([&] { load_model(folder_.path()); });
  };
  EXPECT_THAT(with("model-00001-of", "../model-00001-of"), HasSubstr("expected the name of a file"));
  EXPECT_THAT(with("model-00001-of", "model-00009-of"), HasSubstr("model-00009-of"));
  EXPECT_THAT(with("model-00001-of", "model-00002-of"), HasSubstr("model.embeddings.weight"));
  EXPECT_THAT(with("model.embeddings.weight", "model.embedding"), HasSubstr("model.embedding"));
  EXPECT_THAT(with("\"weight_map\"", "\"weights\""), HasSubstr("not an index of shards"));
  EXPECT_THAT(with("{", "["), HasSubstr("not JSON"));
}

// A full disk, by the limit on the size of a file.
TEST_F(Checkpoint, FailedWriteLeavesWhatWasThere) {
  const ModelConfig config = small_models().front().config;
  const auto model = make_small(config, DType::f32, false);
  LanguageModel other(config, DType::f32, Device::cpu(), false);
  other.parameters().initialize(1);
  save_model(*model, folder_.path());
  const auto before = names_in(folder_.path());
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{5000, old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string whole = error_of([&] { save_model(other, folder_.path()); });
  const std::string sharded = error_of([&] { save_model(other, folder_.path(), {4500}); });
  const std::string state = error_of([&] { save_state(other, other.make_state(100), folder_ / "state"); });
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_THAT(whole, HasSubstr("cannot write " + (folder_ / "model.safetensors")));
  EXPECT_THAT(sharded, HasSubstr("cannot write " + folder_.path()));
  EXPECT_THAT(state, HasSubstr("cannot write " + (folder_ / "state")));
  EXPECT_EQ(names_in(folder_.path()), before);
  expect_same_parameters(*model, *load_model(folder_.path()));
}

TEST_F(Checkpoint, StateFileContinuesAGeneration) {
  for (const SmallModel& row : small_models()) {
    const auto model = make_small(row.config, DType::f32, false);
    Context context(Device::cpu(), 1);
    DecodeState state = model->make_state(2, kCapacity);
    const Tensor logits = Tensor::empty(Shape({2, row.config.vocab_size}), DType::f32);
    const Tensor tokens = int_tensor({3, 1, 4, 1, 5}), bounds = int_tensor({0, 2, 5});
    model->prefill(context, tokens, {bounds, bounds}, state, logits);
    state.history[0].add(std::span(tokens.as<std::int32_t>(), 2));
    state.history[1].add(std::span(tokens.as<std::int32_t>() + 2, 3));
    const std::string path = folder_ / "state";
    save_state(*model, state, path);
    DecodeState loaded = load_state(*model, path);
    loaded.reserve(kCapacity);
    EXPECT_EQ(compare_states(loaded, state, 0.0), "");
    EXPECT_EQ(loaded.history, state.history);
    EXPECT_EQ(loaded.history[1].tokens, 3);
    const Tensor again = Tensor::empty(logits->shape, DType::f32);
    model->step(context, int_tensor({7, 8}), state, logits);
    model->step(context, int_tensor({7, 8}), loaded, again);
    EXPECT_TRUE(testing::same_bits(logits, again));
  }
}

TEST_F(Checkpoint, StateOfAnotherModelIsRefused) {
  const ModelConfig config = small_models().front().config;
  const auto model = make_small(config, DType::f32, false);
  const std::string path = folder_ / "state";
  save_state(*model, model->make_state(1), path);
  EXPECT_NO_THROW(load_state(*model, path));
  LanguageModel other(config, DType::f32, Device::cpu(), false);
  other.parameters().initialize(1);
  EXPECT_THAT(error_of([&] { load_state(other, path); }), HasSubstr("belongs to another model"));
  EXPECT_THAT(error_of([&] { load_state(*make_small(config, DType::bf16, false), path); }),
              HasSubstr("load the model with --dtype f32"));
  save_model(*model, folder_.path());
  EXPECT_THAT(error_of([&] { load_state(*model, folder_ / "model.safetensors"); }), HasSubstr("not a state file"));
  write_safetensors(folder_ / "older", {{"x", model->make_state(1).constant()}}, {{"kind", "flashgla decode state"}});
  EXPECT_THAT(error_of([&] { load_state(*model, folder_ / "older"); }), HasSubstr("a state of version 1"));
  EXPECT_THROW(load_state(*model, folder_ / "missing"), Error);
  std::string bytes = testing::read_bytes(path);
  bytes.pop_back();
  testing::write_bytes(path, bytes);
  EXPECT_THAT(error_of([&] { load_state(*model, path); }), HasSubstr("truncated"));
}

}  // namespace
}  // namespace flashgla::model
