#include "bench/noise_model.h"

#include "flashgla/base/memory.h"
#include "flashgla/model/quantise.h"

namespace flashgla::bench {

std::unique_ptr<model::LanguageModel> noise_model(const std::string& preset, DType dtype, Device device,
                                                  const std::string& quantised, int threads) {
  nn::Placements placements;
  if (!quantised.empty()) {
    const model::QuantisationPreset formats = model::find_quantisation_preset(quantised);
    placements = [formats](const nn::Parameter& parameter) {
      return nn::Placement{formats.of(parameter.quantisation), nullptr};
    };
  }
  auto model =
      std::make_unique<model::LanguageModel>(model::preset(preset), dtype, device, false, placements, nullptr, threads);
  const Context context(Device::cpu(), threads);
  for (const nn::Parameter* parameter : model->parameters().parameters()) {
    if (!ops::quantised_linear::is_packed(parameter->value)) continue;
    const std::int64_t block = parameter->value.size(2);
    const Tensor host = Tensor::empty(parameter->value.shape, DType::u8);
    auto* bytes = host.as<std::uint8_t>();
    const auto fill = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const auto noise = static_cast<std::uint32_t>(i) * 2654435761u;
        const bool scale = i % block < ops::quantised_linear::kScaleBytes;  // f16: 2^-10 and a little
        bytes[i] = static_cast<std::uint8_t>(scale ? (i % 2 ? 0x14u : noise >> 25) : noise >> 24);
      }
    };
    parallel_for_blocks(context, parameter->value.numel(), std::int64_t{1} << 20, fill);
    copy_memory(parameter->value.data, device, host->data, Device::cpu(), host->bytes());
  }
  model->parameters().initialize(1);
  return model;
}

}  // namespace flashgla::bench
