#include "torch.h"

#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace flashgla::python {

using namespace nb::literals;

// ---- DLPack's C exchange API ----

// As dlpack.h 1.2 has it; minor versions change no field. What is not used has no type here. Memory does not come from
// its allocator: PyTorch's tensors over such memory do not know streams that use them (record_stream), cannot be
// resized, and where there is none left no torch.OutOfMemoryError is raised.
struct ExchangeApi {
  std::uint32_t major, minor;
  const ExchangeApi* previous;  // an older version; null: none
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*read)(void* object, nb::dlpack::dltensor* out);  // null: not supported
  int (*current_stream)(std::int32_t device_type, std::int32_t device_index, void** out);
};

static_assert(sizeof(nb::dlpack::dltensor) == 48 && sizeof(ExchangeApi) == 56);

namespace {

constexpr const char* kFloats = "float64, float32, bfloat16 or float16";

const ExchangeApi* exchange_api_of(nb::handle capsule) {
  constexpr const char* kName = "dlpack_exchange_api";
  if (PyCapsule_IsValid(capsule.ptr(), kName) == 0) return nullptr;
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), kName));
  while (api != nullptr && api->major != 1) api = api->previous;
  return api != nullptr && api->read != nullptr ? api : nullptr;
}

// What PyTorch says of a tensor that it does not hand over, with the argument's name.
[[noreturn]] void throw_naming(const char* name, const nb::python_error& error) {
  PyErr_Format(error.type().ptr(), "%s: %S", name, error.value().ptr());
  throw nb::python_error();
}

gla::Options options_of(nb::tuple o) {
  if (o.size() != 8) throw nb::type_error("expected 8 options");
  return python::options_of(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]);
}
gla::Options step_options_of(nb::tuple o) {
  if (o.size() != 5) throw nb::type_error("expected 5 options");
  return python::options_of(o[0], o[1], o[2], o[3], o[4]);
}

}  // namespace

// ---- one call's tensors ----

// Views of tensors that the caller keeps, and of the copies that it made of some, which it keeps itself.
class Torch::Reader {
 public:
  explicit Reader(const Torch& torch) : torch_(torch) {}

  // Where it lies.
  TensorView as_is(nb::handle tensor, const char* name, const char* dtypes = kFloats) const {
    if (tensor.is_none()) return {};
    nb::dlpack::dltensor found;
    nb::object capsule;
    if (torch_.api_ != nullptr) {
      if (torch_.api_->read(tensor.ptr(), &found) != 0) throw_naming(name, nb::python_error());
    } else {
      try {
        capsule = torch_.to_dlpack_(tensor);
      } catch (const nb::python_error& error) {
        throw_naming(name, error);
      }
      const void* pointer = PyCapsule_GetPointer(capsule.ptr(), "dltensor");
      if (pointer == nullptr) throw nb::python_error();
      found = *static_cast<const nb::dlpack::dltensor*>(pointer);
    }
    if (!dtype_of(found.dtype)) {
      const nb::object dtype = tensor.attr("dtype");
      throw Error(std::string(name) + " is of " + nb::str(dtype).c_str() + "; expected " + dtypes);
    }
    if (found.data == nullptr) throw Error(std::string(name) + " has no elements; expected one at least");
    return view_of(found, name);
  }

  // Contiguous in its last dimension.
  TensorView rows(nb::handle tensor, const char* name) {
    const TensorView view = as_is(tensor, name);
    if (!view || view.rank() == 0 || view.stride[static_cast<std::size_t>(view.rank() - 1)] == 1) return view;
    return copied(tensor, name);
  }

  TensorView contiguous(nb::handle tensor, const char* name, const char* dtypes = kFloats) {
    const TensorView view = as_is(tensor, name, dtypes);
    return !view || view.is_contiguous() ? view : copied(tensor, name);
  }

  gla::Inputs inputs(nb::tuple tensors) {
    if (tensors.size() != 8) throw nb::type_error("expected 8 tensors");
    return {rows(tensors[0], "q"),
            rows(tensors[1], "k"),
            rows(tensors[2], "v"),
            rows(tensors[3], "g"),
            rows(tensors[4], "gv"),
            contiguous(tensors[5], "initial_state"),
            contiguous(tensors[6], "initial_state"),
            contiguous(tensors[7], "cu_seqlens", "int32 or int64")};
  }

 private:
  TensorView copied(nb::handle tensor, const char* name) {
    copies_.push_back(tensor.attr("contiguous")());
    return as_is(copies_.back(), name);
  }

  const Torch& torch_;
  std::vector<nb::object> copies_;
};

// The call's device is CUDA's current one, until this is gone.
class Torch::DeviceGuard {
 public:
  DeviceGuard(const Torch& torch, Device device) : torch_(torch) {
    if (device.kind == Device::Kind::cpu) return;
    const int current = nb::cast<int>(torch.c_.attr("_cuda_getDevice")());
    if (current == device.index) return;
    torch.c_.attr("_cuda_setDevice")(device.index);
    before_ = current;
  }
  ~DeviceGuard() {
    if (before_ < 0) return;
    try {
      torch_.c_.attr("_cuda_setDevice")(before_);
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("flashgla");
    }
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const Torch& torch_;
  int before_ = -1;
};

// ---- what PyTorch makes ----

struct Torch::Made {
  nb::object tensor = nb::none();
  TensorView view;
};

Torch::Torch(nb::object torch, nb::handle api)
    : api_(exchange_api_of(api)),
      c_(torch.attr("_C")),
      to_dlpack_(torch.attr("utils").attr("dlpack").attr("to_dlpack")),
      empty_(torch.attr("empty")),
      get_num_threads_(torch.attr("get_num_threads")),
      empty_cpu_(nb::none()),
      empty_cuda_(nb::none()),
      tensor_(torch.attr("Tensor")),
      parameter_(torch.attr("nn").attr("Parameter")),
      is_neg_(tensor_.attr("is_neg")),
      dispatch_modes_(c_.attr("_len_torch_dispatch_stack")),
      function_modes_(c_.attr("_len_torch_function_stack")),
      tracing_state_(c_.attr("_get_tracing_state")),
      transforms_(c_.attr("_functorch").attr("peek_interpreter_stack")),
      is_grad_enabled_(torch.attr("is_grad_enabled")) {
  const char* names[] = {"float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "uint8"};
  for (std::size_t i = 0; i < dtypes_.size(); ++i) dtypes_[i] = torch.attr(names[i]);
  // What PyTorch's compiler makes its tensors by, in a third of torch.empty's time. Not public: tried first.
  try {
    const nb::object guards = c_.attr("_dynamo").attr("guards");
    const nb::object cpu = guards.attr("_empty_strided_cpu"), cuda = guards.attr("_empty_strided_cuda");
    const nb::tuple one = nb::make_tuple(1);
    cpu(one, one, dtypes_[static_cast<std::size_t>(DType::u8)]);
    empty_cpu_ = cpu;
    empty_cuda_ = cuda;
  } catch (const nb::python_error&) {
    empty_cpu_ = nb::none();
  }
}

// A new contiguous tensor on like's device, which is the current one.
Torch::Made Torch::empty(nb::handle like, const Shape& shape, DType dtype, Device device) const {
  const TensorView contiguous(nullptr, dtype, shape);
  const auto rank = static_cast<std::size_t>(shape.rank());
  const nb::tuple sizes = to_tuple(std::span(shape.begin(), rank));
  const nb::object& type = dtypes_[static_cast<std::size_t>(dtype)];
  Made made;
  if (empty_cpu_.is_none()) {
    made.tensor = empty_(sizes, "dtype"_a = type, "device"_a = like.attr("device"));
  } else {
    const nb::tuple strides = to_tuple(std::span(contiguous.stride.data(), rank));
    made.tensor = (device.kind == Device::Kind::cpu ? empty_cpu_ : empty_cuda_)(sizes, strides, type);
  }
  made.view = Reader(*this).as_is(made.tensor, "a result");
  return made;
}

Place Torch::place(nb::handle q, Device device) const {
  if (device.kind == Device::Kind::cpu) return {.threads = nb::cast<int>(get_num_threads_())};
  Place place;
  if (api_ == nullptr) {
    const nb::object stream = c_.attr("_cuda_getCurrentRawStream")(device.index);
    place.stream = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(stream));
  } else if (api_->current_stream(nb::device::cuda::value, device.index, &place.stream) != 0) {
    throw nb::python_error();
  }
  place.allocate = [this, q, memory = Made()](Device where, std::size_t bytes) mutable {
    memory = empty(q, {static_cast<std::int64_t>(bytes)}, DType::u8, where);
    return memory.view.data;
  };
  return place;
}

// ---- calls ----

int Torch::way(nb::tuple tensors) const {
  bool differentiable = false;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const nb::handle tensor = tensors[i], type = tensor.type();
    if (tensor.is_none() && i > 2) continue;
    if (!type.is(tensor_) && !type.is(parameter_)) return kByDispatcher;
    if (is_neg_(tensor).is(Py_True)) return kByDispatcher;  // which negates what lies there
    differentiable = differentiable || nb::cast<bool>(tensor.attr("requires_grad"));
  }
  const nb::handle first = tensors[0];
  if (!nb::cast<bool>(first.attr("is_cuda")) && !nb::cast<bool>(first.attr("is_cpu"))) return kByDispatcher;
  if (nb::cast<int>(dispatch_modes_()) != 0 || nb::cast<int>(function_modes_()) != 0 || !tracing_state_().is_none() ||
      !transforms_().is_none()) {
    return kByDispatcher;
  }
  return differentiable && nb::cast<bool>(is_grad_enabled_()) ? kPastWithGradients : kPast;
}

nb::tuple Torch::forward(nb::tuple tensors, nb::tuple options, bool final_state, bool keep) const {
  Reader reader(*this);
  const gla::Options parsed = options_of(options);
  const gla::Inputs inputs = reader.inputs(tensors);
  const gla::Problem p = gla::describe(inputs, parsed);
  const nb::handle q = tensors[0];
  const Device device = inputs.q.device;
  const DeviceGuard guard(*this, device);

  const auto make = [&](const Shape& shape, DType dtype) { return empty(q, shape, dtype, device); };
  const DType state_dtype = p.dtype == DType::f64 ? DType::f64 : DType::f32;
  const bool keeps_states = keep && p.batch * p.length >= kKeepFrom * p.sequences;
  const auto states_size = static_cast<std::int64_t>(keeps_states ? states_bytes(device, p) : 0);
  const Made o = make({p.batch, p.length, p.query_heads, p.value_dim}, p.dtype);
  const Made ht = final_state ? make({p.sequences, p.heads, p.key_dim, p.value_dim}, state_dtype) : Made();
  const Made zt = final_state && p.normalize ? make({p.sequences, p.heads, p.key_dim}, state_dtype) : Made();
  const Made states = states_size > 0 ? make({states_size}, DType::u8) : Made();
  run(device, place(q, device), [&](Context& context) {
    gla::forward(context, inputs, {o.view, ht.view, zt.view, states.view}, parsed);
  });
  return nb::make_tuple(o.tensor, ht.tensor, zt.tensor, states.tensor);
}

nb::tuple Torch::backward(nb::tuple tensors, nb::tuple options, nb::handle o, nb::handle states, nb::handle d_o,
                          nb::handle d_ht, nb::handle d_zt, nb::sequence wanted) const {
  Reader reader(*this);
  const gla::Options parsed = options_of(options);
  const gla::Inputs inputs = reader.inputs(tensors);
  const gla::Problem p = gla::describe(inputs, parsed);
  const nb::handle q = tensors[0];
  const Device device = inputs.q.device;
  const DeviceGuard guard(*this, device);

  // In the inputs' order. The operator's gradient of a constant gate is of the states' dtype.
  const TensorView* of[] = {&inputs.q, &inputs.k, &inputs.v, &inputs.g, &inputs.gv, &inputs.h0, &inputs.z0};
  constexpr std::size_t kGate = 3;
  std::array<Made, std::size(of)> made;
  for (std::size_t i = 0; i < made.size(); ++i) {
    if (!*of[i] || !nb::cast<bool>(wanted[i])) continue;
    const bool is_constant_gate = i == kGate && p.gate == gla::GateKind::constant;
    made[i] = empty(q, of[i]->shape, is_constant_gate && p.dtype != DType::f64 ? DType::f32 : of[i]->dtype, device);
  }
  auto& [dq, dk, dv, dg, dgv, dh0, dz0] = made;
  const gla::InputGradients gradients{dq.view, dk.view, dv.view, dg.view, dgv.view, dh0.view, dz0.view};
  const gla::Outputs outputs{reader.as_is(o, "o"), {}, {}, reader.as_is(states, "states", "uint8")};
  const gla::OutputGradients output_gradients{reader.rows(d_o, "d_o"), reader.contiguous(d_ht, "d_final_state"),
                                              reader.contiguous(d_zt, "d_final_state")};
  run(device, place(q, device),
      [&](Context& context) { gla::backward(context, inputs, outputs, output_gradients, gradients, parsed); });
  if (dg.view && dg.view.dtype != inputs.g.dtype) dg.tensor = dg.tensor.attr("to")(tensors[kGate].attr("dtype"));
  return nb::make_tuple(dq.tensor, dk.tensor, dv.tensor, dg.tensor, dgv.tensor, dh0.tensor, dz0.tensor);
}

nb::object Torch::step(nb::handle q, nb::handle k, nb::handle v, nb::handle g, nb::handle gv, nb::handle h,
                       nb::handle z, nb::tuple options) const {
  Reader reader(*this);
  const gla::Options parsed = step_options_of(options);
  const gla::StepInputs inputs{reader.rows(q, "q"), reader.rows(k, "k"), reader.rows(v, "v"), reader.rows(g, "g"),
                               reader.rows(gv, "gv")};
  const TensorView h_view = reader.as_is(h, "state"), z_view = reader.as_is(z, "state");
  Shape shape = inputs.q.shape;
  if (shape.rank() > 0 && inputs.v.rank() > 0) shape[-1] = inputs.v.size(-1);
  const Device device = inputs.q.device;
  const DeviceGuard guard(*this, device);
  const Made o = empty(q, shape, inputs.q.dtype, device);
  run(device, place(q, device), [&](Context& context) { gla::step(context, inputs, h_view, z_view, o.view, parsed); });
  return o.tensor;
}

}  // namespace flashgla::python
