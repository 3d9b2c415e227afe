#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/base/names.h"
#include "flashgla/eval/evaluation.h"
#include "flashgla/model/tests/cases.h"
#include "testing/devices.h"

namespace flashgla::eval {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::int32_t kVocabulary = 17;

text::TokenIds random_ids(std::int64_t count, std::uint64_t seed) {
  const Tensor tokens = model::random_tokens(Shape({count}), kVocabulary, seed);
  return {tokens.as<std::int32_t>(), tokens.as<std::int32_t>() + count};
}

// log P of a continuation, one request at a time, by the model's own loss.
double log_likelihood(Context& context, model::LanguageModel& model, const Request& request) {
  std::vector<std::int32_t> tokens = request.context, targets(request.context.size() - 1, -1);
  tokens.insert(tokens.end(), request.continuation.begin(), request.continuation.end() - 1);
  targets.insert(targets.end(), request.continuation.begin(), request.continuation.end());
  const Shape shape({1, static_cast<std::int64_t>(tokens.size())});
  const Tensor losses = Tensor::empty(Shape({shape[1]}), DType::f32);
  nn::Pass pass{context};
  model.evaluate(pass, TensorView(tokens.data(), shape), TensorView(targets.data(), shape), losses);
  double sum = 0.0;
  for (std::int64_t i = 0; i < shape[1]; ++i) sum -= losses.as<float>()[i];
  return sum;
}

TEST(Windows, AreThoseOfTheHarness) {
  // 11 tokens, of which 10 are predicted, 4 at a time: the last window is as long as the others.
  EXPECT_THAT(windows_of(11, 4, 4), ElementsAre(Window{0, 1, 4}, Window{4, 5, 8}, Window{6, 9, 10}));
  EXPECT_THAT(windows_of(8, 4, 2), ElementsAre(Window{0, 1, 4}, Window{2, 5, 6}, Window{3, 7, 7}));
  EXPECT_THAT(windows_of(3, 4, 4), ElementsAre(Window{0, 1, 2}));
  EXPECT_TRUE(windows_of(1, 4, 4).empty());
  EXPECT_THROW(windows_of(9, 4, 5), Error);
  EXPECT_THROW(windows_of(9, 0, 0), Error);
  for (std::int64_t tokens = 2; tokens < 40; ++tokens) {
    for (std::int64_t length = 1; length < 9; ++length) {
      for (std::int64_t stride = 1; stride <= length; ++stride) {
        std::int64_t next = 1;
        for (const Window& window : windows_of(tokens, length, stride)) {
          EXPECT_EQ(window.first, next);
          EXPECT_GE(window.begin, 0);
          EXPECT_LT(window.begin, window.first);
          EXPECT_LE(window.end - window.begin, length);
          next = window.end + 1;
        }
        EXPECT_EQ(next, tokens);
      }
    }
  }
}

// The small models, and one whose state grows.
std::vector<model::SmallModel> eval_models() {
  std::vector<model::SmallModel> models = model::small_models();
  models.push_back({"softmax_attention",
                    model::parse_config(R"({"model_type": "transformer", "hidden_size": 16, "num_hidden_layers": 2,
                                            "num_heads": 2, "intermediate_size": 20, "vocab_size": 17})",
                                        "test")});
  return models;
}

class EvalModels : public ::testing::TestWithParam<model::SmallModel> {
 protected:
  Context context_{Device::cpu(), 2};
  std::unique_ptr<model::LanguageModel> model_ = model::make_small(GetParam().config, DType::f32, false);
};

TEST_P(EvalModels, ScoresAreThoseOfSingleRequests) {
  std::vector<Request> requests;
  for (std::uint64_t context = 0; context < 5; ++context) {
    const text::TokenIds shared = random_ids(static_cast<std::int64_t>(3 + 7 * context), context + 1);
    for (std::uint64_t choice = 0; choice < 1 + context; ++choice) {
      requests.push_back({shared, random_ids(static_cast<std::int64_t>(1 + choice), 100 + choice + 10 * context)});
    }
  }
  for (const std::int64_t batch : {1, 40, 10000}) {
    for (const bool reuse : {true, false}) {
      Scorer scorer(context_, *model_, {.batch_tokens = batch, .reuse_prefixes = reuse});
      std::size_t reported = 0;
      const std::vector<Score> scores = scorer.score(requests, [&](std::size_t done) { return reported = done, true; });
      EXPECT_EQ(reported, requests.size());
      ASSERT_EQ(scores.size(), requests.size());
      std::int64_t tokens = 0;
      for (std::size_t i = 0; i < requests.size(); ++i) {
        const double expected = log_likelihood(context_, *model_, requests[i]);
        EXPECT_NEAR(scores[i].log_likelihood, expected, 1e-4 * static_cast<double>(requests[i].continuation.size()));
        tokens += static_cast<std::int64_t>(requests[i].continuation.size()) - 1;
        if (!reuse || i == 0 || requests[i].context != requests[i - 1].context) {
          tokens += static_cast<std::int64_t>(requests[i].context.size());
        }
      }
      EXPECT_EQ(scorer.tokens_read(), tokens);
    }
  }
}

TEST_P(EvalModels, GreedyContinuationsAreKnown) {
  Scorer scorer(context_, *model_);
  const text::TokenIds prompt = random_ids(9, 3);
  text::TokenIds tokens = prompt;
  for (int i = 0; i < 4; ++i) {
    const Tensor logits = scorer.logits(tokens);
    const float* last = logits.as<float>() + (logits->size(0) - 1) * kVocabulary;
    tokens.push_back(static_cast<std::int32_t>(std::max_element(last, last + kVocabulary) - last));
  }
  Request greedy{prompt, {tokens.begin() + 9, tokens.end()}};
  Request other = greedy;
  other.continuation[2] = (other.continuation[2] + 1) % kVocabulary;
  const Request requests[] = {greedy, other};
  const std::vector<Score> scores = scorer.score(requests);
  EXPECT_TRUE(scores[0].greedy);
  EXPECT_FALSE(scores[1].greedy);
}

TEST_P(EvalModels, CarriedStateIsOneLongWindow) {
  LossReader reader(context_, *model_);
  const text::TokenIds tokens = random_ids(61, 5);
  const LossReader::Piece whole[] = {{tokens, {0, 1, 60}}};
  const double expected = reader.windows(whole)[0];
  for (const std::int64_t length : {1, 7, 60, 100}) {
    const std::vector<float> losses = reader.carried(tokens, length);
    ASSERT_EQ(losses.size(), 60u);
    double sum = 0.0;
    for (const float loss : losses) sum += loss;
    EXPECT_NEAR(sum, expected, 1e-3) << length;
  }
}

TEST_P(EvalModels, ACarriedDocumentGoesOnInItsMiddle) {
  const fs::path folder = fs::path(::testing::TempDir()) / ("flashgla_carry_" + GetParam().name);
  fs::remove_all(folder);
  fs::create_directories(folder);
  const Document documents[] = {{random_ids(9, 8)}, {random_ids(70, 9)}, {random_ids(30, 10)}};
  const auto run = [&](const std::string& name, bool resume, int jobs) {
    JobLog log(name.empty() ? "" : (folder / name).string(), "{}", resume);
    int asked = 0;
    const Work work{context_,
                    *model_,
                    log,
                    0,
                    [&](std::int64_t, std::int64_t, double) { return ++asked < jobs; },
                    name.empty() ? "" : (folder / name).string() + ".state"};
    return evaluate_loss(work, documents, {.window = 5, .carry = true, .batch_tokens = 13});
  };
  const LossResult whole = run("", false, 1000);
  EXPECT_EQ(whole.tokens, 8 + 69 + 29);
  const LossResult part = run("log", false, 4);
  EXPECT_FALSE(part.complete);
  EXPECT_EQ(part.tokens, 8 + 30);  // the first document, and 3 of the second one's jobs of two windows
  EXPECT_TRUE(fs::exists(folder / "log.state"));
  fs::copy(folder / "log", folder / "ended_by_force");  // which leaves no state
  for (const char* name : {"log", "ended_by_force"}) {
    const LossResult rest = run(name, true, 1000);
    EXPECT_TRUE(rest.complete) << name;
    EXPECT_EQ(rest.loss, whole.loss) << name;
    EXPECT_EQ(rest.tokens, whole.tokens) << name;
  }
  fs::remove_all(folder);
}

TEST(JobLog, LeavesFilesThatAreNoLogsAsTheyAre) {
  const std::string path = ::testing::TempDir() + "flashgla_no_log";
  for (const std::string text : {"a novel", "a novel\nof two lines\n", "[1]\n", "{}\n", ""}) {
    write_file(path, text);
    EXPECT_THROW(JobLog(path, "{}", true), Error) << text;
    EXPECT_EQ(read_file(path), text);
  }
  fs::remove(path);
}

// JSON has no infinity: the job is done anew.
TEST(JobLog, TakesNoResultThatIsInfinite) {
  const std::string path = ::testing::TempDir() + "flashgla_infinite_log";
  write_file(path,
             "{\"settings\":{}}\n{\"job\":0,\"result\":{\"scores\":[[null,false]]}}\n"
             "{\"job\":1,\"result\":{\"loss\":2.5}}\n");
  const JobLog log(path, "{}", true);
  EXPECT_EQ(log.find(0), nullptr);
  EXPECT_NE(log.find(1), nullptr);
  fs::remove(path);
}

TEST_P(EvalModels, PositionsAddUpToTheLoss) {
  JobLog log("", "{}", false);
  const Document documents[] = {{random_ids(50, 6)}, {random_ids(51, 7)}};
  const Work work{context_, *model_, log, 0, {}};
  const PositionResult result = evaluate_positions(work, documents, {.length = 25, .bucket = 10, .window = 8});
  EXPECT_EQ(result.sequences, 4);
  EXPECT_THAT(result.tokens, ElementsAre(40, 40, 20));
  EXPECT_THROW(evaluate_positions(work, documents, {.length = 101}), Error);
}

TEST_P(EvalModels, DamagedWeightsAreRefused) {
  const TensorView weights = model_->parameters().all_values();
  std::fill_n(weights.as<float>(), weights.numel(), std::nanf(""));
  LossReader reader(context_, *model_);
  const text::TokenIds tokens = random_ids(20, 5);
  const LossReader::Piece pieces[] = {{tokens, {0, 1, 19}}};
  const auto is_nan = ::testing::ThrowsMessage<Error>(HasSubstr("loss is NaN; the model's weights may be damaged"));
  EXPECT_THAT([&] { reader.windows(pieces); }, is_nan);
  EXPECT_THAT([&] { reader.carried(tokens, 7); }, is_nan);
  Scorer scorer(context_, *model_);
  const Request requests[] = {{{1, 2}, {3}, "task.jsonl, line 7"}};
  EXPECT_THAT([&] { scorer.score(requests); },
              ::testing::ThrowsMessage<Error>(HasSubstr("task.jsonl, line 7: the log-likelihood is NaN")));
  const std::string path = ::testing::TempDir() + "flashgla_nan_log_" + GetParam().name;
  {
    JobLog log(path, "{}", false);
    const Document documents[] = {{tokens}};
    EXPECT_THAT(
        [&] {
          evaluate_loss({context_, *model_, log, 0, {}, "", "damaged"}, documents, {});
        },
        ::testing::ThrowsMessage<Error>(::testing::StartsWith("damaged: ")));
  }
  EXPECT_EQ(JobLog(path, "{}", true).taken(), 0u);  // nothing that --resume would take
  fs::remove(path);
}

INSTANTIATE_TEST_SUITE_P(Models, EvalModels, ::testing::ValuesIn(eval_models()),
                         [](const auto& each) { return each.param.name; });

// On every device the numbers of the CPU, of f32 weights, within what two ways to one log-likelihood may differ by.
TEST(EvalDevices, GiveTheNumbersOfTheCpu) {
  model::ModelConfig config;
  config.hidden_size = 64;
  config.num_hidden_layers = 2;
  config.vocab_size = kVocabulary;
  config.set("num_heads", "2");
  const auto results_on = [&](Device device) {
    Context context(device, 2);
    model::LanguageModel model(config, DType::f32, device, false);
    const auto source = model::make_small(config, DType::f32, false);
    copy_memory(model.parameters().all_values().data, device, source->parameters().all_values().data, Device::cpu(),
                source->parameters().all_values().bytes());
    std::vector<double> numbers;
    LossReader reader(context, model);
    const text::TokenIds tokens = random_ids(300, 11), other = random_ids(90, 12);
    const LossReader::Piece pieces[] = {{tokens, {0, 1, 299}}, {other, {10, 20, 89}}};
    for (const double sum : reader.windows(pieces)) numbers.push_back(sum / 300.0);
    for (const float loss : reader.carried(tokens, 70)) numbers.push_back(loss);
    std::vector<Request> requests;
    for (std::uint64_t i = 0; i < 6; ++i) requests.push_back({random_ids(40, 13 + i / 3), {random_ids(1, 20 + i)[0]}});
    Scorer scorer(context, model);
    for (const Score& score : scorer.score(requests)) numbers.push_back(score.log_likelihood);
    const Tensor logits = scorer.logits(other);
    numbers.insert(numbers.end(), logits.as<float>(), logits.as<float>() + logits->numel());
    return numbers;
  };
  const std::vector<double> expected = results_on(Device::cpu());
  for (const Device device : testing::test_devices()) {
    const std::vector<double> numbers = results_on(device);
    ASSERT_EQ(numbers.size(), expected.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      EXPECT_NEAR(numbers[i], expected[i], 1e-4 * std::max(1.0, std::abs(expected[i]))) << name_of(device) << " " << i;
    }
  }
}

class EvalFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              ("flashgla_eval_" + std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    model::ModelConfig config = model::small_models().front().config;
    config.vocab_size = 258;
    model_ = model::make_small(config, DType::f32, false);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string file(const std::string& name, const std::string& content) {
    write_file(folder_ / name, content);
    return folder_ / name;
  }

  fs::path folder_;
  Context context_{Device::cpu(), 2};
  std::unique_ptr<model::LanguageModel> model_;
  std::unique_ptr<text::Tokenizer> tokenizer_ = text::make_byte_tokenizer();
};

TEST_F(EvalFiles, PairsAreCutAsInTheHarness) {
  const Request pair = encode_pair(*tokenizer_, "ab  ", "c", 0);  // the spaces go to the continuation
  EXPECT_THAT(pair.context, ElementsAre(256, 'a', 'b'));
  EXPECT_THAT(pair.continuation, ElementsAre(' ', ' ', 'c'));
  const Request alone = encode_pair(*tokenizer_, "", "xy", 0);
  EXPECT_THAT(alone.context, ElementsAre(256));
  EXPECT_THAT(alone.continuation, ElementsAre('x', 'y'));
  const Request cut = encode_pair(*tokenizer_, "abcdef", "xy", 4);  // reads 4 tokens: def x
  EXPECT_THAT(cut.context, ElementsAre('d', 'e', 'f'));
  EXPECT_THROW(encode_pair(*tokenizer_, "a", "xyz", 2), Error);
}

TEST_F(EvalFiles, KindsAreToldApart) {
  EXPECT_EQ(kind_of(file("a.txt", "text")), DataKind::text);
  EXPECT_EQ(kind_of(file("a.jsonl", "{\"text\": \"x\"}\n")), DataKind::documents);
  EXPECT_EQ(kind_of(file("b.jsonl", "\n{\"context\": \"x\"}\n")), DataKind::examples);
  EXPECT_THROW(kind_of(folder_ / "absent"), Error);
  EXPECT_THROW(kind_of(folder_), Error);
  EXPECT_THROW(kind_of(file("empty.jsonl", "")), Error);
}

TEST_F(EvalFiles, DamagedExamplesAreNamed) {
  const auto complaint = [&](const std::string& lines) -> std::string {
    try {
      read_examples(file("task.jsonl", lines));
    } catch (const Error& error) {
      return error.what();
    }
    return "none";
  };
  const std::string good = "{\"context\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 1}\n";
  EXPECT_EQ(complaint(good), "none");
  EXPECT_THAT(complaint(good + "{"), HasSubstr("task.jsonl, line 2: is not a JSON object"));
  EXPECT_THAT(complaint("{\"continuation\": \"a\"}"), HasSubstr("there is no \"context\""));
  EXPECT_THAT(complaint("{\"context\": \"a\"}"), HasSubstr("there is no \"continuation\""));
  EXPECT_THAT(complaint("{\"context\": 3, \"continuation\": \"a\"}"), HasSubstr("\"context\" is not a string"));
  EXPECT_THAT(complaint("{\"context\": \"a\", \"continuation\": \"\"}"), HasSubstr("is empty"));
  EXPECT_THAT(complaint("{\"context\": \"a\", \"choices\": [\"b\"], \"answer\": 0}"), HasSubstr("two or more"));
  EXPECT_THAT(complaint("{\"context\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 2}"), HasSubstr("from 0 to 1"));
  EXPECT_THAT(complaint(good + "{\"context\": \"a\", \"continuation\": \"b\"}"), HasSubstr("in one file"));
}

TEST_F(EvalFiles, ChoicesAreJudgedByEveryMeasure) {
  const Example example{"", {"b", "long one"}, " ", 1};
  const Score scores[] = {{-4.0, false}, {-8.0, false}};
  const Verdict verdict = judge(example, scores);
  EXPECT_FALSE(verdict.acc);
  EXPECT_TRUE(verdict.acc_norm);
  EXPECT_TRUE(verdict.acc_bytes);
}

TEST_F(EvalFiles, AnEvaluationGoesOnWhereItWasStopped) {
  std::vector<Document> documents;
  documents.reserve(12);
  for (int i = 0; i < 12; ++i) documents.push_back(document_of(*tokenizer_, "Some words, number " + std::to_string(i)));
  const auto run = [&](const std::string& path, bool resume, int jobs) {
    JobLog log(path, "{\"model\": \"m\"}", resume);
    int asked = 0;
    const Work work{context_, *model_, log, 0, [&](std::int64_t, std::int64_t, double) { return ++asked < jobs; }};
    return evaluate_loss(work, documents, {.window = 8, .stride = 8, .batch_tokens = 40});
  };
  const std::string path = folder_ / "log.jsonl";
  const LossResult whole = run("", false, 1000);
  EXPECT_TRUE(whole.complete);
  EXPECT_EQ(whole.words, 12 * 4);
  const LossResult part = run(path, false, 3);
  EXPECT_FALSE(part.complete);
  EXPECT_EQ(part.jobs, 3);
  EXPECT_THROW(run(path, false, 3), Error);
  std::ofstream(path, std::ios::app) << "{\"job\": 3, \"resu";  // ended by force
  const LossResult rest = run(path, true, 1000);
  EXPECT_TRUE(rest.complete);
  EXPECT_EQ(rest.loss, whole.loss);
  EXPECT_EQ(rest.tokens, whole.tokens);
  try {
    JobLog other(path, "{\"model\": \"n\"}", true);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("another model: \"m\", now \"n\""));
  }
}

TEST_F(EvalFiles, ExamplesAreScored) {
  const std::vector<Example> examples =
      read_examples(file("task.jsonl",
                         "{\"context\": \"The lamp\", \"choices\": [\"is lit\", \"was\"], \"answer\": 0}\n"
                         "{\"context\": \"A road\", \"choices\": [\"ends\", \"goes on\", \"x\"], \"answer\": 2}\n"));
  JobLog log("", "{}", false);
  const Work work{context_, *model_, log, 0, {}};
  const ExampleResult result = evaluate_examples(work, *tokenizer_, examples, {});
  ASSERT_EQ(result.scores.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    for (std::size_t j = 0; j < examples[i].choices.size(); ++j) {
      const Request request = encode_pair(*tokenizer_, examples[i].context, " " + examples[i].choices[j], 0);
      EXPECT_NEAR(result.scores[i][j].log_likelihood, log_likelihood(context_, *model_, request), 1e-3);
    }
  }
  try {
    evaluate_examples(work, *tokenizer_, examples, {.longest = 5});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("task.jsonl, line 1: the continuation has 7 tokens; the window is 5"));
  }
}

}  // namespace
}  // namespace flashgla::eval
