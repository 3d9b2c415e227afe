// A tokenizer's file: JSON when it begins with '{', FlashGLA's own when it says its "kind", else one of Hugging Face;
// what begins otherwise is a SentencePiece model. One that is taken encodes texts within its vocabulary, and gives them
// back when it says so.
#include "flashgla/text/tokenizer.h"

#include <string_view>

#include "testing/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashgla;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const char* name = !bytes.starts_with('{')                            ? "tokenizer.model"
                     : bytes.find("\"kind\"") != std::string_view::npos ? "tokenizer.flashgla.json"
                                                                        : "tokenizer.json";
  const std::string path = fuzz::file_of(name, {data, size});
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
