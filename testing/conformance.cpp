#include "testing/conformance.h"

#include <algorithm>
#include <cstdint>
#include <sstream>

#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"
#include "testing/compare.h"
#include "testing/instruction_sets.h"
#include "testing/random.h"

namespace flashgla::testing {

Argument integers(const std::string& name, const std::vector<std::int32_t>& values) {
  Argument argument{name, Shape({static_cast<std::int64_t>(values.size())}), Role::input, Kind::integer};
  argument.fill = [=](const TensorView& view) { std::copy(values.begin(), values.end(), view.as<std::int32_t>()); };
  return argument;
}

Argument bounds(const std::vector<std::int32_t>& ends) {
  std::vector<std::int32_t> values{0};
  values.insert(values.end(), ends.begin(), ends.end());
  return integers("cu_seqlens", values);
}

DType dtype_of(const Argument& argument, DTypePair dtypes) {
  switch (argument.kind) {
    case Kind::activation:
      return dtypes.activation;
    case Kind::parameter:
      return dtypes.parameter;
    case Kind::accumulator:
      return dtypes.activation == DType::f64 ? DType::f64 : DType::f32;
    case Kind::integer:
      return DType::i32;
    case Kind::fixed:
      return argument.dtype;
  }
  return DType::f32;
}

namespace {

constexpr std::int64_t kPadding = 5;

// A tensor with or without gaps between its rows, and what the gaps held.
struct Allocation {
  Tensor storage;
  TensorView view;
  TensorView gaps;
  Tensor gaps_before;

  Allocation(const Argument& argument, DType dtype, bool strided) {
    const bool padded = strided && argument.strided && argument.shape.rank() >= 2;
    Shape shape = argument.shape;
    if (padded) shape[-1] += kPadding;
    storage = Tensor::empty(shape, dtype);
    poison(storage);
    view = storage.view();
    if (!padded) return;
    gaps = view.slice(shape.rank() - 1, argument.shape[-1], shape[-1]);
    view = view.slice(shape.rank() - 1, 0, argument.shape[-1]);
    gaps_before = converted(gaps, dtype);
  }

  bool gaps_untouched() const { return !gaps || same_bits(gaps, gaps_before); }
};

// The values an argument starts with, in its own dtype.
Tensor initial(const Argument& argument, std::uint64_t seed, DType dtype) {
  Tensor values = Tensor::empty(argument.shape, dtype);
  if (argument.role == Role::output) {
    poison(values);
  } else if (argument.fill) {
    argument.fill(values);
  } else {
    fill_normal(values, seed, argument.deviation, argument.mean);
  }
  return values;
}

std::vector<Tensor> initial_values(const OperatorCase& operator_case, DTypePair dtypes) {
  std::vector<Tensor> values;
  for (const Argument& argument : operator_case.arguments) {
    values.push_back(initial(argument, values.size() + 1, dtype_of(argument, dtypes)));
  }
  return values;
}

// One run: the arguments' memory on the CPU, where values are made and compared, and on another device its image.
class Run {
 public:
  Run(const OperatorCase& operator_case, const std::vector<Tensor>& values, DTypePair dtypes, Device device,
      bool strided)
      : case_(operator_case), device_(device) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const Argument& argument = case_.arguments[i];
      allocations_.emplace_back(argument, dtype_of(argument, dtypes), strided);
      copy(values[i], allocations_.back().view);
    }
  }

  void execute(const std::string& implementation, int threads) {
    std::vector<Tensor> images;
    NamedTensors tensors, planned;
    for (std::size_t i = 0; i < allocations_.size(); ++i) {
      TensorView view = allocations_[i].view;
      if (device_.kind != Device::Kind::cpu) {
        images.push_back(copied_to(allocations_[i].storage, device_));
        view.data = images.back()->data;  // a view begins where its storage does
        view.device = device_;
      }
      tensors.set(case_.arguments[i].name, view);
      // As aligned, at an address that no process has mapped.
      view.data = reinterpret_cast<void*>(256 + reinterpret_cast<std::uintptr_t>(view.data) % 256);
      planned.set(case_.arguments[i].name, view);
    }
    Context context(device_, threads);
    context.force_implementation(implementation);
    Arena& scratch = context.scratch();
    scratch.begin_planning();
    case_.run(context, planned);
    const std::size_t workspace = scratch.peak();
    scratch.commit_plan();
    if (workspace > 0) {
      const ArenaScope scope(scratch);
      fill_with_nan(scratch.allocate(workspace), workspace, device_);
    }
    case_.run(context, tensors);
    context.queue().synchronize();
    if (scratch.used() != 0) throw Error("scratch memory is not given back");
    for (std::size_t i = 0; i < images.size(); ++i) {
      const TensorView& storage = allocations_[i].storage;
      copy_memory(storage.data, storage.device, images[i]->data, device_, storage.bytes());
    }
  }

  const Allocation& operator[](std::size_t i) const { return allocations_[i]; }
  Device device() const { return device_; }

 private:
  const OperatorCase& case_;
  Device device_;
  std::vector<Allocation> allocations_;
};

bool is_written(const Argument& argument) { return argument.role != Role::input; }

// What is wrong with a run's results, a line each.
std::string check_results(const OperatorCase& operator_case, const Run& run, const Run& reference) {
  std::string failures;
  for (std::size_t i = 0; i < operator_case.arguments.size(); ++i) {
    const Argument& argument = operator_case.arguments[i];
    if (!run[i].gaps_untouched()) failures += argument.name + " is written between its rows\n";
    if (!is_written(argument)) continue;
    const bool on_cuda = run.device().kind == Device::Kind::cuda && argument.relative_on_cuda > 0.0;
    const double relative = on_cuda                   ? argument.relative_on_cuda
                            : argument.relative > 0.0 ? argument.relative
                                                      : tolerance(run[i].view.dtype);
    const std::string error = check_close(argument.name.c_str(), run[i].view, reference[i].view, relative);
    if (!error.empty()) failures += error + "\n";
  }
  return failures;
}

bool fits_nothing(const Error& error) {
  return std::string(error.what()).find("no implementation fits") != std::string::npos;
}

// Checks one row of a table in one dtype.
class RowCheck {
 public:
  RowCheck(const OperatorCase& operator_case, DTypePair dtypes, const std::vector<Tensor>& values, const Run& reference,
           Coverage::Row& row)
      : case_(operator_case), dtypes_(dtypes), values_(values), reference_(reference), row_(row) {}

  std::string on_cpu() {
    if (row_.name == "reference") return of_reference();
    bool best_set = true;
    for (const InstructionSet& set : instruction_sets()) {
      const UseInstructionSet use(set);
      if (!check(set.name, false, best_set ? std::vector<int>{2, 3} : std::vector<int>{})) break;
      if (best_set) check(set.name, true, {2, 3});
      best_set = false;
    }
    return failures_.str();
  }

  std::string on_device() {
    if (check(name_of(row_.device), false, {1})) check(name_of(row_.device), true, {1});
    return failures_.str();
  }

 private:
  // What is slow and the same code on every instruction set: its bits depend neither on gaps nor on threads, so that
  // two runs say what six would.
  std::string of_reference() {
    Run plain(case_, values_, dtypes_, row_.device, false), strided(case_, values_, dtypes_, row_.device, true);
    if (!execute(plain, "the CPU: ", 1) || !execute(strided, "the CPU, strided: ", 3)) return failures_.str();
    compare_bits(plain, strided, what("the CPU: "), "the second strided and with 3 threads");
    return failures_.str();
  }

  // False when the row does not support the case. Runs once more for each number of threads of `again`.
  bool check(const std::string& where, bool strided, const std::vector<int>& again) {
    const std::string place = where + (strided ? ", strided: " : ": ");
    Run run(case_, values_, dtypes_, row_.device, strided);
    if (!execute(run, place, 1)) return false;
    for (const int threads : again) {
      Run other(case_, values_, dtypes_, row_.device, strided);
      other.execute(row_.name, threads);
      compare_bits(run, other, what(place), "the second with " + std::to_string(threads) + " threads");
    }
    return true;
  }

  std::string what(const std::string& place) const {
    return case_.name + ", " + name_of(dtypes_.activation) + " with " + name_of(dtypes_.parameter) + " parameters, " +
           row_.name + " on " + place;
  }

  // Runs it and compares what comes with the reference; false when the row does not support the case.
  bool execute(Run& run, const std::string& place, int threads) {
    try {
      run.execute(row_.name, threads);
    } catch (const Error& error) {
      if (fits_nothing(error)) return false;
      failures_ << what(place) << error.what() << "\n";
      return true;
    }
    ++row_.runs;
    const std::string wrong = check_results(case_, run, reference_);
    if (!wrong.empty()) failures_ << what(place) << wrong;
    return true;
  }

  void compare_bits(const Run& one, const Run& other, const std::string& what, const std::string& how) {
    for (std::size_t i = 0; i < case_.arguments.size(); ++i) {
      if (same_bits(one[i].view, other[i].view)) continue;
      failures_ << what << case_.arguments[i].name << " differs between two runs, " << how << "\n";
    }
  }

  const OperatorCase& case_;
  DTypePair dtypes_;
  const std::vector<Tensor>& values_;
  const Run& reference_;
  Coverage::Row& row_;
  std::ostringstream failures_;
};

}  // namespace

std::vector<DTypePair> f32_and_bf16() { return {{DType::f32, DType::f32}, {DType::bf16, DType::bf16}}; }

std::string Coverage::missing() const {
  std::string text;
  for (const Row& row : rows_) {
    if (row.runs == 0) text += row.name + " ";
  }
  return text;
}

double tolerance(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 1e-12;
    case DType::f32:
      return 1e-5;
    case DType::bf16:
      return 5e-3;
    case DType::f16:
      return 1e-3;
    default:
      throw Error(std::string("no tolerance for dtype ") + name_of(dtype));
  }
}

std::string check_conformance(const OperatorCase& operator_case, Coverage& coverage) {
  std::string failures;
  for (const DTypePair dtypes : operator_case.dtypes) {
    const std::vector<Tensor> values = initial_values(operator_case, dtypes);
    Run reference(operator_case, values, {DType::f64, DType::f64}, Device::cpu(), false);
    reference.execute("reference", 2);
    for (Coverage::Row& row : coverage.rows()) {
      RowCheck check(operator_case, dtypes, values, reference, row);
      failures += row.device.kind == Device::Kind::cpu ? check.on_cpu() : check.on_device();
    }
  }
  return failures;
}

TensorView kept_in_scratch(Context& context, std::size_t bytes) {
  if (bytes == 0) return {};
  return context.scratch().tensor({static_cast<std::int64_t>(bytes)}, DType::u8, "kept");
}

std::string check_once(const OperatorCase& operator_case, DTypePair dtypes, Device device,
                       const std::string& implementation, double* error) {
  const std::vector<Tensor> values = initial_values(operator_case, dtypes);
  Run reference(operator_case, values, {DType::f64, DType::f64}, Device::cpu(), false);
  reference.execute("reference", 2);
  Run run(operator_case, values, dtypes, device, false);
  run.execute(implementation, 2);
  *error = 0.0;
  for (std::size_t i = 0; i < operator_case.arguments.size(); ++i) {
    if (!is_written(operator_case.arguments[i])) continue;
    *error = std::max(*error, difference(run[i].view, reference[i].view).relative);
  }
  return check_results(operator_case, run, reference);
}

namespace {

// The first elements are the argument's values, and the others repeat them.
Tensor repeated_noise(const Argument& argument, std::uint64_t seed, DType dtype, Device device) {
  constexpr std::int64_t kMost = std::int64_t{1} << 22;
  if (argument.role == Role::output) {
    Tensor result = Tensor::empty(argument.shape, dtype, device);
    fill_with_nan(result->data, result->bytes(), device);
    return result;
  }
  if (argument.fill || argument.shape.numel() <= kMost) {
    Tensor values = initial(argument, seed, dtype);
    return device.kind == Device::Kind::cpu ? std::move(values) : copied_to(values, device);
  }
  const Tensor noise = Tensor::empty({kMost}, dtype);
  fill_normal(noise, seed, argument.deviation, argument.mean);
  Tensor result = Tensor::empty(argument.shape, dtype, device);
  for (std::size_t at = 0; at < result->bytes(); at += noise->bytes()) {
    copy_memory(static_cast<std::byte*>(result->data) + at, device, noise->data, Device::cpu(),
                std::min(noise->bytes(), result->bytes() - at));
  }
  return result;
}

}  // namespace

PreparedCase::PreparedCase(const OperatorCase& operator_case, DTypePair dtypes, Device device) : case_(&operator_case) {
  for (const Argument& argument : operator_case.arguments) {
    storage_.push_back(repeated_noise(argument, storage_.size() + 1, dtype_of(argument, dtypes), device));
    tensors_.set(argument.name, storage_.back());
  }
}

PreparedCase PreparedCase::duplicate() const {
  PreparedCase result;
  result.case_ = case_;
  for (std::size_t i = 0; i < storage_.size(); ++i) {
    result.storage_.push_back(copied_to(storage_[i], storage_[i]->device));
    result.tensors_.set(case_->arguments[i].name, result.storage_[i]);
  }
  return result;
}

double dot(const TensorView& a, const TensorView& b) {
  const Tensor x = converted(a, DType::f64);
  const Tensor y = converted(b, DType::f64);
  double total = 0.0;
  for (std::int64_t i = 0; i < a.numel(); ++i) total += x.as<double>()[i] * y.as<double>()[i];
  return total;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace flashgla::testing
