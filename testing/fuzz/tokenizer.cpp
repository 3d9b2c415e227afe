// A tokenizer's file: FlashGLA's own (JSON) when it begins with '{', else a SentencePiece model. One that is taken
// encodes texts within its vocabulary, and gives them back when it says so.
#include "flashgla/text/tokenizer.h"

#include <string_view>

#include "testing/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashgla;
  const bool json = size > 0 && data[0] == '{';
  const std::string path = fuzz::file_of(json ? "tokenizer.flashgla.json" : "tokenizer.model", {data, size});
  return fuzz::attempt(size, [&] {
    const auto tokenizer = text::load_tokenizer(path);
    for (const std::string_view text : {"", "It was a  day.\n\nThen 12", "\xE2\x96\x81\xF0\x9F\x98\x80\xFF\0a"}) {
      const text::TokenIds ids = tokenizer->encode(text);
      for (const std::int32_t id : ids) {
        fuzz::require(id >= 0 && id < tokenizer->vocab_size(), "a token is outside the vocabulary");
      }
      const std::string decoded = tokenizer->decode(ids);
      fuzz::require(!tokenizer->lossless() || decoded == text, "a lossless tokenizer changes a text");
      text::StreamDecoder stream(*tokenizer);
      for (const std::int32_t id : ids) stream.push(id);
      stream.finish();
    }
  });
}
