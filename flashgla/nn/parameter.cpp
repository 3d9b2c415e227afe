#include "flashgla/nn/parameter.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "flashgla/base/context.h"
#include "flashgla/base/memory.h"
#include "flashgla/base/random.h"
#include "flashgla/base/transfer.h"
#include "flashgla/nn/pages.h"
#include "flashgla/ops/arguments.h"

#ifdef FLASHGLA_CUDA
#include "flashgla/nn/cuda/normals.h"
#endif

namespace flashgla::nn {

namespace {

std::uint64_t hash_name(const std::string& name) {  // FNV-1a
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

// Whether it has queued the drawing of a value's normals on its device: the bits that the CPU draws, in no time.
bool drew_on_device([[maybe_unused]] const Context& context, [[maybe_unused]] const TensorView& value,
                    [[maybe_unused]] const random::Stream& stream, [[maybe_unused]] double deviation) {
#ifdef FLASHGLA_CUDA
  if (value.device.kind == Device::Kind::cuda && (value.dtype == DType::f32 || value.dtype == DType::bf16)) {
    cuda::draw_normals(context, value, stream, deviation);
    return true;
  }
#endif
  return false;
}

}  // namespace

Parameter convolution_filter(const std::string& name, std::int64_t channels, std::int64_t width) {
  Parameter filter;
  filter.name = name;
  filter.shape = Shape({channels, 1, width});
  filter.deviation = 1.0 / std::sqrt(3.0 * static_cast<double>(width));
  filter.decay = false;
  return filter;
}

ParameterStore::ParameterStore(const std::function<void(const ParameterVisitor&)>& visit_all, DType dtype,
                               Device device, bool gradients, const Placements& placements, int threads) {
  std::set<std::string> names;
  std::vector<Placement> places;
  std::int64_t elements = 0, packed_bytes = 0;
  visit_all([&](Parameter& parameter) {
    if (!names.insert(parameter.name).second) throw Error("parameter '" + parameter.name + "' exists twice");
    parameters_.push_back(&parameter);
    count_ += parameter.shape.numel();
    const Placement& place = places.emplace_back(placements ? placements(parameter) : Placement{});
    const bool own = place.memory == nullptr;
    if (place.format) {
      mapped_packed_ = mapped_packed_ || !own;
      if (own) packed_bytes += packed_shape(*place.format, parameter.shape[0], parameter.shape[1]).numel();
    } else if (own) {
      elements += parameter.shape.numel();
    }
  });
  values_ = Tensor::empty(Shape({elements}), dtype, device);
  if (packed_bytes > 0) packed_ = Tensor::empty(Shape({packed_bytes}), DType::u8, device);
  if (gradients) gradients_ = Tensor::zeros(Shape({count_}), ops::accumulator_of(dtype), device);
  std::int64_t begin = 0, packed_begin = 0;
  std::vector<Parameter*> own;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = *parameters_[i];
    const Placement& place = places[i];
    const Shape shape =
        place.format ? packed_shape(*place.format, parameter.shape[0], parameter.shape[1]) : parameter.shape;
    if (place.memory != nullptr) {
      parameter.value = TensorView(place.memory, place.format ? DType::u8 : dtype, shape, device);
    } else {
      std::int64_t& from = place.format ? packed_begin : begin;
      parameter.value = (place.format ? packed_ : values_)->slice(0, from, from + shape.numel()).reshape(shape);
      if (gradients) parameter.gradient = gradients_->slice(0, from, from + shape.numel()).reshape(shape);
      from += shape.numel();
      own.push_back(&parameter);
    }
  }
  if (device == Device::cpu()) place_pages(own, Context(device, threads).threads());
}

std::size_t ParameterStore::value_bytes() const {
  std::size_t bytes = 0;
  for (const Parameter* parameter : parameters_) bytes += parameter->value.bytes();
  return bytes;
}

std::size_t ParameterStore::gradient_bytes() const { return gradients_ ? gradients_->bytes() : 0; }

void ParameterStore::zero_gradients() {
  if (gradients_) zero_memory(gradients_->data, gradients_->bytes(), gradients_->device);
  for (const Parameter* parameter : parameters_) parameter->renewed = false;
}

void ParameterStore::renew_gradients(Context& context) {
  for (const Parameter* parameter : parameters_) {
    parameter->renewed = parameter->first_written_over;
    if (parameter->renewed || context.planning()) continue;
    context.queue().zero(parameter->gradient.data, parameter->gradient.bytes());
  }
}

std::string ParameterStore::name_at(std::int64_t element) const {
  for (const Parameter* parameter : parameters_) {
    if (element < 0) break;
    if (element < parameter->shape.numel()) return parameter->name;
    element -= parameter->shape.numel();
  }
  return "";
}

void ParameterStore::initialize(std::uint64_t seed) {
  constexpr std::int64_t kBlock = 1 << 16;  // elements, a multiple of 256
  const Context context, there(values_->device);
  Transfer transfer(values_->device);
  for (const Parameter* parameter : parameters_) {
    const TensorView& value = parameter->value;
    if (value.dtype == DType::u8) continue;
    const auto size = static_cast<std::int64_t>(size_of(value.dtype));
    const random::Stream stream(seed, random::Use::parameters, hash_name(parameter->name));
    const double deviation = parameter->deviation;
    const Initialization initialization = parameter->initialization;
    if (initialization == Initialization::normal && drew_on_device(there, value, stream, deviation)) continue;
    transfer.to_device(value.data, value.bytes(), [&](void* piece, std::size_t begin_byte, std::size_t bytes) {
      const std::int64_t first = static_cast<std::int64_t>(begin_byte) / size;  // a multiple of 256: pieces are large
      const TensorView part(piece, value.dtype, Shape({static_cast<std::int64_t>(bytes) / size}));
      if (initialization == Initialization::zeros || initialization == Initialization::ones) {
        return fill(part, initialization == Initialization::ones ? 1.0 : 0.0);
      }
      dispatch_floating(value.dtype, [&](auto zero) {
        using T = decltype(zero);
        T* values = part.as<T>();
        parallel_for_blocks(context, part.numel(), kBlock, [&](std::int64_t begin, std::int64_t end) {
          std::array<double, 256> normals;
          for (std::int64_t i = begin; i < end; i += 256) {
            const std::int64_t count = std::min<std::int64_t>(end - i, 256);
            if (initialization == Initialization::transformed) {
              for (std::int64_t j = 0; j < count; ++j) {
                values[i + j] =
                    static_cast<T>(parameter->transform(stream.uniform(static_cast<std::uint64_t>(first + i + j))));
              }
              continue;
            }
            if (initialization == Initialization::by_column) {
              for (std::int64_t j = 0; j < count; ++j) {
                values[i + j] = static_cast<T>(parameter->column((first + i + j) % parameter->shape[-1]));
              }
              continue;
            }
            random::fill_normals(stream, static_cast<std::uint64_t>(first + i), count, normals.data());
            for (std::int64_t j = 0; j < count; ++j) values[i + j] = static_cast<T>(deviation * normals[j]);
          }
        });
      });
    });
  }
  transfer.finish();
  there.queue().synchronize();
}

bool are_adjacent(const TensorView& matrix, const TensorView& next) {
  const std::byte* end = static_cast<const std::byte*>(matrix.data) + matrix.bytes();
  Shape as_first = next.shape;
  as_first[0] = matrix.size(0);
  return next.data == end && as_first == matrix.shape && next.dtype == matrix.dtype;
}

TensorView adjacent_rows(const std::vector<TensorView>& matrices) {
  if (matrices.empty() || !matrices.front()) return {};
  TensorView all = matrices.front();
  for (std::size_t i = 1; i < matrices.size(); ++i) {
    const TensorView& next = matrices[i];
    if (!are_adjacent(all, next)) {
      throw Error("adjacent_rows: matrix " + std::to_string(i) + " of shape " + to_string(next.shape) +
                  " does not follow the one before it");
    }
    all.shape[0] += next.size(0);
  }
  return all;
}

}  // namespace flashgla::nn
