#include "testing/conformance.h"

#include <algorithm>
#include <sstream>

#include "testing/compare.h"
#include "testing/instruction_sets.h"
#include "testing/random.h"

namespace flashgla::testing {

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

class Run {
 public:
  Run(const OperatorCase& operator_case, const std::vector<Tensor>& values, DTypePair dtypes, bool strided)
      : case_(operator_case) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const Argument& argument = case_.arguments[i];
      allocations_.emplace_back(argument, dtype_of(argument, dtypes), strided);
      copy(values[i], allocations_.back().view);
      tensors_.set(argument.name, allocations_.back().view);
    }
  }

  void execute(const std::string& implementation, int threads) {
    Context context(Device::cpu(), threads);
    context.force_implementation(implementation);
    case_.run(context, tensors_);
    if (context.scratch().used() != 0) throw Error("scratch memory is not given back");
  }

  const Allocation& operator[](std::size_t i) const { return allocations_[i]; }

 private:
  const OperatorCase& case_;
  std::vector<Allocation> allocations_;
  NamedTensors tensors_;
};

bool is_written(const Argument& argument) { return argument.role != Role::input; }

// Planning must take the same workspace as running, and touch nothing.
std::string check_planning(const OperatorCase& operator_case, const std::vector<Tensor>& values, DTypePair dtypes,
                           const std::string& implementation) {
  NamedTensors tensors;
  Context context(Device::cpu(), 2);
  context.force_implementation(implementation);
  for (const Argument& argument : operator_case.arguments) {
    // An address that no process has mapped.
    tensors.set(argument.name, TensorView(reinterpret_cast<void*>(64), dtype_of(argument, dtypes), argument.shape));
  }
  context.scratch().begin_planning();
  operator_case.run(context, tensors);
  context.scratch().commit_plan();
  Run run(operator_case, values, dtypes, false);
  NamedTensors real;
  for (std::size_t i = 0; i < operator_case.arguments.size(); ++i) {
    real.set(operator_case.arguments[i].name, run[i].view);
  }
  try {
    operator_case.run(context, real);
  } catch (const Error& error) {
    return std::string(error.what()) + " after planning\n";
  }
  return "";
}

}  // namespace

std::vector<DTypePair> f32_and_bf16() { return {{DType::f32, DType::f32}, {DType::bf16, DType::bf16}}; }

std::string Coverage::missing() const {
  std::string text;
  for (const std::string& name : names_) {
    if (!runs_.count(name)) text += name + " ";
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
  std::ostringstream failures;
  const DTypePair f64{DType::f64, DType::f64};
  for (const DTypePair dtypes : operator_case.dtypes) {
    const std::vector<Tensor> values = initial_values(operator_case, dtypes);
    Run reference(operator_case, values, f64, false);
    reference.execute("reference", 2);
    for (const std::string& name : coverage.names()) {
      bool best_set = true;
      for (const InstructionSet& set : instruction_sets()) {
        const UseInstructionSet use(set);
        for (const bool strided : {false, true}) {
          if (strided && !best_set) continue;
          const std::string what = operator_case.name + ", " + name_of(dtypes.activation) + " with " +
                                   name_of(dtypes.parameter) + " parameters, " + name + " on " + set.name +
                                   (strided ? ", strided: " : ": ");
          Run run(operator_case, values, dtypes, strided);
          try {
            run.execute(name, 1);
          } catch (const Error& error) {
            if (std::string(error.what()).find("no implementation fits") != std::string::npos) continue;
            failures << what << error.what() << "\n";
            continue;
          }
          coverage.count(name);
          for (std::size_t i = 0; i < operator_case.arguments.size(); ++i) {
            const Argument& argument = operator_case.arguments[i];
            if (!run[i].gaps_untouched()) failures << what << argument.name << " is written between its rows\n";
            if (!is_written(argument)) continue;
            const double relative = argument.relative > 0.0 ? argument.relative : tolerance(run[i].view.dtype);
            const std::string error = check_close(argument.name.c_str(), run[i].view, reference[i].view, relative);
            if (!error.empty()) failures << what << error << "\n";
          }
          if (!best_set) continue;
          for (const int threads : {2, 3}) {
            Run again(operator_case, values, dtypes, strided);
            again.execute(name, threads);
            for (std::size_t i = 0; i < operator_case.arguments.size(); ++i) {
              if (!same_bits(run[i].view, again[i].view)) {
                failures << what << operator_case.arguments[i].name << " differs between 1 and " << threads
                         << " threads\n";
              }
            }
          }
          if (!strided) failures << check_planning(operator_case, values, dtypes, name);
        }
        best_set = false;
        if (name == "reference") break;  // the same code on every instruction set
      }
    }
  }
  return failures.str();
}

std::string check_once(const OperatorCase& operator_case, DTypePair dtypes, const std::string& implementation,
                       double* error) {
  const std::vector<Tensor> values = initial_values(operator_case, dtypes);
  Run reference(operator_case, values, {DType::f64, DType::f64}, false);
  reference.execute("reference", 2);
  Run run(operator_case, values, dtypes, false);
  run.execute(implementation, 2);
  *error = 0.0;
  for (std::size_t i = 0; i < operator_case.arguments.size(); ++i) {
    const Argument& argument = operator_case.arguments[i];
    if (!is_written(argument)) continue;
    *error = std::max(*error, difference(run[i].view, reference[i].view).relative);
    const double relative = argument.relative > 0.0 ? argument.relative : tolerance(run[i].view.dtype);
    std::string failure = check_close(argument.name.c_str(), run[i].view, reference[i].view, relative);
    if (!failure.empty()) return failure;
  }
  return "";
}

PreparedCase::PreparedCase(const OperatorCase& operator_case, DTypePair dtypes) : case_(&operator_case) {
  storage_ = initial_values(operator_case, dtypes);
  for (std::size_t i = 0; i < storage_.size(); ++i) tensors_.set(operator_case.arguments[i].name, storage_[i]);
}

PreparedCase PreparedCase::duplicate() const {
  PreparedCase result;
  result.case_ = case_;
  for (std::size_t i = 0; i < storage_.size(); ++i) {
    result.storage_.push_back(converted(storage_[i], storage_[i]->dtype));
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
