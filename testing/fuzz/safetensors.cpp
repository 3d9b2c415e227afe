// A safetensors file: the header, and every tensor as f32.
#include "flashgla/model/safetensors.h"

#include <vector>

#include "testing/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashgla;
  const std::string path = fuzz::file_of("model.safetensors", {data, size});
  return fuzz::attempt(size, [&] {
    const model::SafetensorsReader reader(path);
    std::vector<float> values;
    reader.read([&](const model::StoredTensor& tensor) {
      fuzz::require(reader.find(tensor.name) != nullptr, "a tensor is not found");
      fuzz::require(tensor.end <= size, "a tensor ends beyond the file");
      if (tensor.dtype == "I64" || tensor.dtype == "I32") return TensorView();  // not converted
      values.resize(static_cast<std::size_t>(tensor.numel()) + 1);
      return TensorView(values.data(), Shape({tensor.numel()}));
    });
  });
}
