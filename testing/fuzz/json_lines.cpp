// Documents of JSON lines, and the same bytes as plain text: cut into parts of any size it is the same text.
#include <string>
#include <string_view>

#include "flashgla/data/documents.h"
#include "testing/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashgla;
  data::DocumentOptions options;
  options.inputs = {fuzz::file_of("documents.jsonl", {data, size})};
  data::DocumentPart part;
  std::int64_t documents = 0;
  bool whole = false;
  fuzz::attempt(size, [&] {
    data::DocumentReader reader(options);
    while (reader.next(part)) ++documents;
    whole = true;
  });
  if (whole) {
    fuzz::require(data::DocumentReader(options).count_documents(1 << 20) == documents,
                  "documents are counted otherwise");
  }
  options.inputs = {fuzz::file_of("documents.txt", {data, size})};
  options.part_bytes = size > 0 ? data[0] % 16 + 1 : 1;
  return fuzz::attempt(size, [&] {
    data::DocumentReader reader(options);
    std::string text;
    while (reader.next(part)) text += part.text;
    fuzz::require(text == std::string_view(reinterpret_cast<const char*>(data), size), "the parts are not the text");
  });
}
