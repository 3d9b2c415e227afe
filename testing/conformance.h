// One check for every operator whose arguments are tensors of seeded noise: each implementation of its table, on its
// device where this machine has one, in each dtype, against the reference run in f64 on the CPU on the same (rounded)
// values; on dense and on strided memory, twice and with several numbers of threads for the same bits, always in
// exactly the workspace that a dry run planned, which like all outputs is filled with NaN; on the CPU's other
// instruction sets once.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"
#include "testing/devices.h"

namespace flashgla::testing {

enum class Role : std::uint8_t {
  input,
  output,       // poisoned before the run; every element must be written
  accumulated,  // holds values before the run, which it adds to or changes
};

enum class Kind : std::uint8_t {
  activation,
  parameter,
  accumulator,  // f32; f64 in the f64 run
  integer,      // i32, filled by `fill`
  fixed,        // of Argument::dtype in every run
};

struct DTypePair {
  DType activation, parameter;
};

struct Argument {
  std::string name;
  Shape shape;
  Role role = Role::input;
  Kind kind = Kind::activation;
  double deviation = 1.0;
  double mean = 0.0;
  bool strided = true;                            // rank 2 and more: also tried with gaps between its rows
  double relative = 0.0;                          // tolerance of an output; 0: by its dtype
  std::function<void(const TensorView&)> fill{};  // instead of noise
  DType dtype = DType::f64;                       // with Kind::fixed
  double relative_on_cuda = 0.0;                  // where it differs from the CPU's; 0: as `relative`
};

// An input that holds these i32 values.
Argument integers(const std::string& name, const std::vector<std::int32_t>& values);
// cu_seqlens of packed sequences that end there.
Argument bounds(const std::vector<std::int32_t>& ends);

// The dtype that an argument has in a run on such a pair.
DType dtype_of(const Argument& argument, DTypePair dtypes);

// Arguments of one run by name; absent view for a name that the case does not have.
class NamedTensors {
 public:
  TensorView operator[](const std::string& name) const {
    const auto found = views_.find(name);
    return found == views_.end() ? TensorView() : found->second;
  }
  void set(const std::string& name, const TensorView& view) { views_[name] = view; }

 private:
  std::map<std::string, TensorView> views_;
};

// f32 alone and bf16 alone.
std::vector<DTypePair> f32_and_bf16();

struct OperatorCase {
  std::string name;
  std::vector<Argument> arguments;
  std::function<void(Context&, const NamedTensors&)> run;
  std::vector<DTypePair> dtypes = f32_and_bf16();
};

// How often each implementation ran; one that never supports a case is a hole in the test.
class Coverage {
 public:
  struct Row {
    std::string name;
    Device device;
    int runs = 0;
  };

  // Rows of a table for devices that tests run on (devices.h).
  template <class Implementations>
  explicit Coverage(const Implementations& implementations) {
    for (const Device device : test_devices()) {
      for (const auto& row : implementations) {
        if (row.device == device.kind) rows_.push_back({row.name, device});
      }
    }
  }
  std::vector<Row>& rows() { return rows_; }
  // Names of implementations that ran nothing.
  std::string missing() const;

 private:
  std::vector<Row> rows_;
};

// Tolerance of an output, relative in the 2-norm: 1e-5 for f32 (sums of some thousands in f32), 5e-3 for bf16 (its
// rounding), 1e-3 for f16, 1e-12 for f64.
double tolerance(DType dtype);

// "" or a line for each failure.
std::string check_conformance(const OperatorCase& operator_case, Coverage& coverage);

// What an operator keeps for its backward, in scratch; absent where that is no bytes.
TensorView kept_in_scratch(Context& context, std::size_t bytes);

// One implementation on one pair of dtypes, dense, best instruction set: "" or the first failure. `error`: the largest
// relative error of an output.
std::string check_once(const OperatorCase& operator_case, DTypePair dtypes, Device device,
                       const std::string& implementation, double* error);

// A case with its tensors on a device, to be run again and again. Noise repeats itself after some millions of elements.
class PreparedCase {
 public:
  PreparedCase(const OperatorCase& operator_case, DTypePair dtypes, Device device);
  PreparedCase duplicate() const;  // with tensors of its own, of the same values
  void run(Context& context) const { case_->run(context, tensors_); }

 private:
  PreparedCase() = default;
  const OperatorCase* case_ = nullptr;  // the caller keeps it
  std::vector<Tensor> storage_;
  NamedTensors tensors_;
};

// sum of a * b: the scalar whose gradient is taken.
double dot(const TensorView& a, const TensorView& b);

// What a call throws: its message, or "no error".
std::string error_of(const std::function<void()>& call);

}  // namespace flashgla::testing
