#include "operands.h"

#include <nanobind/stl/string.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "flashgla/base/current_device.h"
#include "flashgla/base/names.h"
#include "flashgla/ops/gated_linear_attention/cuda/plan.h"

namespace flashgla::python {

namespace {

// Contexts that no call uses, by where they run: a context serves one call at a time, and its memory is kept.
class ContextPool {
 public:
  struct Key {
    Device::Kind kind;
    int index;
    void* stream;
    int threads;
    bool borrows;  // its workspace comes from the caller
    auto operator<=>(const Key&) const = default;
  };

  std::unique_ptr<Context> take(const Key& key) {
    {
      const std::lock_guard lock(mutex_);
      auto& free = free_[key];
      if (!free.empty()) {
        auto context = std::move(free.back());
        free.pop_back();
        return context;
      }
    }
    auto context = std::make_unique<Context>(Device{key.kind, key.index}, key.threads);
    context->set_stream(key.stream);
    return context;
  }

  void give_back(const Key& key, std::unique_ptr<Context> context) {
    const std::lock_guard lock(mutex_);
    free_[key].push_back(std::move(context));
  }

  // Never destroyed: at exit CUDA may be gone before it.
  static ContextPool& instance() {
    static auto* pool = new ContextPool;
    return *pool;
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::vector<std::unique_ptr<Context>>> free_;
};

class Lease {
 public:
  Lease(Device device, const Place& place)
      : key_{device.kind, device.index, place.stream, place.threads, static_cast<bool>(place.allocate)},
        context_(ContextPool::instance().take(key_)) {}
  ~Lease() { ContextPool::instance().give_back(key_, std::move(context_)); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  Context& context() { return *context_; }

 private:
  ContextPool::Key key_;
  std::unique_ptr<Context> context_;
};

gla::Float32Math float32_math_from_name(const std::string& name) {
  if (name == "ieee") return gla::Float32Math::ieee;
  if (name == "tf32") return gla::Float32Math::tf32;
  throw Error("gated_linear_attention", "float32_math", "is '" + name + "'", "ieee or tf32");
}

template <class T>
T read(const char* name, nb::handle value, const char* expected) {
  if (T result; nb::try_cast(value, result)) return result;
  const std::string type = nb::cast<std::string>(value.type().attr("__name__"));
  throw nb::type_error((std::string(name) + " is of type " + type + "; expected " + expected).c_str());
}
std::string word(const char* name, nb::handle value) { return read<std::string>(name, value, "a string"); }
bool flag(const char* name, nb::handle value) { return read<bool>(name, value, "True or False"); }
// Nothing where it is None.
std::optional<double> number(const char* name, nb::handle value) {
  if (value.is_none()) return std::nullopt;
  return read<double>(name, value, "a number or None");
}

}  // namespace

nb::tuple to_tuple(std::span<const std::int64_t> numbers) {
  auto tuple = nb::steal<nb::tuple>(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  if (!tuple.is_valid()) throw nb::python_error();
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(numbers[i]));
  }
  return tuple;
}

Place place_of(std::uintptr_t stream, int threads, nb::object allocate) {
  Place place{.stream = reinterpret_cast<void*>(stream), .threads = threads, .allocate = {}};
  if (!allocate.is_none()) {
    place.allocate = [allocate, memory = nb::object()](Device device, std::size_t bytes) mutable {
      memory = allocate(bytes);
      const TensorView& view = nb::cast<const Array&>(memory).view;
      if (view.device != device || view.bytes() < bytes) {
        throw Error("allocate returned " + std::to_string(view.bytes()) + " bytes on " + name_of(view.device) +
                    "; expected " + std::to_string(bytes) + " on " + name_of(device));
      }
      return view.data;
    };
  }
  return place;
}

void run(Device device, const Place& place, const std::function<void(Context&)>& call) {
  const CurrentDevice current(device);
  Lease lease(device, place);
  Context& context = lease.context();
  if (place.allocate) {
    context.scratch().begin_planning();
    call(context);
    const std::size_t bytes = context.scratch().peak();
    context.scratch().borrow(bytes > 0 ? place.allocate(device, bytes) : nullptr, bytes);
  }
  const nb::gil_scoped_release unlocked;
  call(context);
}

std::size_t states_bytes(Device device, const gla::Problem& problem) {
  Lease lease(device, {});
  return gla::states_bytes(lease.context(), problem);
}

gla::Options options_of(nb::handle scale, nb::handle feature_map, nb::handle normalize,
                        nb::handle gate_logit_normalizer, nb::handle gate_clamp_min) {
  gla::Options options;
  if (const auto given = number("scale", scale)) {
    options.scale = *given;
    // The operator's 0 stands for its default, which is None here.
    if (options.scale == 0.0 || !std::isfinite(options.scale)) {
      throw Error("gated_linear_attention", "scale", options.scale == 0.0 ? "is 0" : "is not finite",
                  "another number, or None for K^-1/2");
    }
  }
  options.feature_map = gla::feature_map_from_name(word("feature_map", feature_map));
  options.normalize = flag("normalize", normalize);
  if (const auto normalizer = number("gate_logit_normalizer", gate_logit_normalizer)) {
    if (!(*normalizer > 0.0)) {  // the operator's 0 stands for log gates, which is None here
      throw Error("gated_linear_attention", "gate_logit_normalizer", "is " + std::to_string(*normalizer),
                  "a number above 0, or None where g and gv are log gates");
    }
    options.gate_logit_normalizer = *normalizer;
  }
  if (const auto clamp = number("gate_clamp_min", gate_clamp_min)) options.gate_clamp_min = *clamp;
  return options;
}

gla::Options options_of(nb::handle scale, nb::handle algorithm, nb::handle feature_map, nb::handle normalize,
                        nb::handle float32_math, nb::handle max_seqlen, nb::handle gate_logit_normalizer,
                        nb::handle gate_clamp_min) {
  gla::Options options = options_of(scale, feature_map, normalize, gate_logit_normalizer, gate_clamp_min);
  options.algorithm = gla::algorithm_from_name(word("algorithm", algorithm));
  options.float32_math = float32_math_from_name(word("float32_math", float32_math));
  if (!max_seqlen.is_none()) {
    options.max_seqlen = read<std::int64_t>("max_seqlen", max_seqlen, "an integer or None");
    if (options.max_seqlen < 1) {
      throw Error("gated_linear_attention", "max_seqlen", "is " + std::to_string(options.max_seqlen),
                  "a positive number of tokens, or None");
    }
  }
  return options;
}

Operands::Operands(Views views, const gla::Inputs& inputs, const gla::Options& options)
    : views_(std::move(views)), inputs_(inputs), options_(options), problem_(gla::describe(inputs, options)) {}

std::size_t Operands::states_bytes(int cuda_capability) const {
  if (inputs_.q.device.kind == Device::Kind::cpu) return python::states_bytes(inputs_.q.device, problem_);
#ifdef FLASHGLA_CUDA
  return gla::states_bytes({.device = Device::Kind::cuda, .cuda_capability = cuda_capability}, problem_);
#else
  return gla::cuda::states_bytes(problem_, cuda_capability == 90);  // a build without the kernels knows their plans
#endif
}

nb::tuple Operands::output_shapes() const {
  const gla::Problem& p = problem_;
  const std::int64_t o[] = {p.batch, p.length, p.query_heads, p.value_dim};
  const std::int64_t h[] = {p.sequences, p.heads, p.key_dim, p.value_dim};
  return nb::make_tuple(to_tuple(o), to_tuple(h), to_tuple(std::span(h).first(3)));
}

void Operands::forward(const gla::Outputs& outputs, const Place& place) const {
  run(inputs_.q.device, place, [&](Context& context) { gla::forward(context, inputs_, outputs, options_); });
}

void Operands::backward(const gla::Outputs& outputs, const gla::OutputGradients& output_gradients,
                        const gla::InputGradients& input_gradients, const Place& place) const {
  run(inputs_.q.device, place,
      [&](Context& context) { gla::backward(context, inputs_, outputs, output_gradients, input_gradients, options_); });
}

void step(const gla::StepInputs& inputs, const TensorView& h, const TensorView& z, const TensorView& o,
          const gla::Options& options, const Place& place) {
  run(inputs.q.device, place, [&](Context& context) { gla::step(context, inputs, h, z, o, options); });
}

}  // namespace flashgla::python
