// Loads a checkpoint and lets it go on from a prompt: generate MODEL_OR_RUN_FOLDER PROMPT
#include <cstdio>
#include <exception>

#include "flashgla/generate/generator.h"
#include "flashgla/model/checkpoint.h"
#include "flashgla/text/tokenizer.h"
#include "flashgla/train/run_folder.h"

int main(int argc, char** argv) try {
  using namespace flashgla;
  if (argc != 3) return std::puts("generate MODEL_OR_RUN_FOLDER PROMPT"), 1;
  const std::string folder = train::find_model_folder(argv[1]);
  const auto model = model::load_model(folder);
  const auto tokenizer = text::load_tokenizer(folder);

  Context context;
  const generate::Generator generator(context, *model, *tokenizer);
  generate::Session session(*model, /*sequences=*/1);
  generator.feed(session, {generator.encode(argv[2], /*begins=*/true)});

  generate::GenerateOptions options;
  options.sampling.temperature = 0.8;
  options.sampling.seed = 1;
  options.max_tokens = 100;
  std::printf("%s", argv[2]);
  generator.generate(session, options,
                     [](std::size_t, std::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); });
  std::printf("\n");
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
