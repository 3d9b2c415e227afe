// A token file. The first byte says of what format; of Megatron's two files the second and third say where the index
// ends and the tokens begin.
#include "flashgla/data/token_file.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <vector>

#include "testing/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashgla;
  if (size < 3) return 0;
  std::span<const std::uint8_t> rest(data + 3, size - 3);
  std::string path;
  if (data[0] % 2 == 0) {
    const std::size_t index = std::min<std::size_t>(data[1] | data[2] << 8, rest.size());
    fuzz::file_of("pair.idx", rest.first(index));
    path = fuzz::file_of("pair.bin", rest.subspan(index));
  } else {
    path = fuzz::file_of("alone.bin", rest);
  }
  constexpr std::array kFormats = {data::TokenFormat::automatic, data::TokenFormat::megatron,
                                   data::TokenFormat::nanogpt, data::TokenFormat::llmc};
  return fuzz::attempt(size, [&] {
    const auto file = data::TokenFile::open(path, kFormats[data[0] / 2 % kFormats.size()]);
    const auto& begins = file->document_begins();
    fuzz::require(
        std::is_sorted(begins.begin(), begins.end()) && begins.front() == 0 && begins.back() == file->tokens(),
        "documents do not make up the file");
    const auto [first, second] = data::split(data::whole(file), 0.3);
    fuzz::require(first.size() + second.size() == file->tokens(), "parts do not make up the file");
    first.document_begins();
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(second.size()));
    file->read(second.begin, second.size(), tokens.data());
    file->read(0, 1, tokens.data());
  });
}
