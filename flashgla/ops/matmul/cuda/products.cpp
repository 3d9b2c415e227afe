#include "flashgla/ops/matmul/cuda/products.h"

#include <algorithm>
#include <cstring>

#include "flashgla/base/cuda/check.h"
#include "flashgla/base/error.h"
#include "flashgla/base/memory.h"
#include "flashgla/ops/matmul/cuda/kernels.h"

namespace flashgla::ops::matmul::cuda {

namespace {

constexpr std::size_t kWorkspace = std::size_t{32} << 20;  // what cuBLASLt asks for on Hopper
constexpr int kCandidates = 8;
constexpr std::int64_t kMostBucketRows = 64;

static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof(Choice::algorithm));

cudaDataType_t type_of(DType dtype) { return dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// From a matrix's first element to its last, as it lies.
std::size_t bytes_of(const Matrix& matrix, std::int64_t rows, std::int64_t columns) {
  const std::int64_t lines = matrix.transposed ? columns : rows, length = matrix.transposed ? rows : columns;
  return static_cast<std::size_t>((lines - 1) * matrix.leading + length) * size_of(matrix.dtype);
}

struct Sizes {
  explicit Sizes(const Key& key)
      : a(aligned(bytes_of(key.a, key.m, key.k))),
        b(aligned(bytes_of(key.b, key.k, key.n))),
        c(aligned(bytes_of(key.c, key.m, key.n))),
        bias(key.bias ? aligned(static_cast<std::size_t>(key.n) * size_of(key.c.dtype)) : 0) {}
  std::size_t total() const { return a + b + c + bias; }
  std::size_t a, b, c, bias;
};

template <class T>
void set(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(cublaslt().desc_set(description, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute");
}

// Row-major memory is the transpose in cuBLASLt's column-major eyes.
cublasLtMatrixLayout_t layout_of(const Matrix& matrix, std::int64_t rows, std::int64_t columns) {
  cublasLtMatrixLayout_t layout = nullptr;
  const auto length = static_cast<std::uint64_t>(matrix.transposed ? rows : columns);
  const auto lines = static_cast<std::uint64_t>(matrix.transposed ? columns : rows);
  check(cublaslt().layout_create(&layout, type_of(matrix.dtype), length, lines, matrix.leading),
        "cublasLtMatrixLayoutCreate");
  return layout;
}

std::string text_of(const Matrix& matrix) {
  return std::string(name_of(matrix.dtype)) + (matrix.transposed ? " T " : " N ") + std::to_string(matrix.leading) +
         " " + std::to_string(matrix.alignment);
}

class Preference {
 public:
  explicit Preference(const Key& key) {
    check(cublaslt().preference_create(&preference_), "cublasLtMatmulPreferenceCreate");
    const auto workspace = static_cast<std::uint64_t>(kWorkspace);
    // Never sums over parts of K in the output's dtype.
    const auto reductions = static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
    // a and b change places: c's transpose is what cuBLASLt computes.
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<std::uint32_t>(key.b.alignment));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<std::uint32_t>(key.a.alignment));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<std::uint32_t>(key.c.alignment));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<std::uint32_t>(key.c.alignment));
  }
  ~Preference() { cublaslt().preference_destroy(preference_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  cublasLtMatmulPreference_t get() const { return preference_; }

 private:
  template <class T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    check(cublaslt().preference_set(preference_, attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
  }
  cublasLtMatmulPreference_t preference_ = nullptr;
};

std::string name_of_library_and_device(Device device) {
  cudaDeviceProp properties{};
  flashgla::cuda::check(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
  return "cuBLASLt " + std::to_string(cublaslt().version()) + " on " + properties.name + " with " +
         std::to_string(properties.multiProcessorCount) + " multiprocessors";
}

}  // namespace

Key Key::of_bucket() const {
  Key key = *this;
  if (m <= kMostBucketRows) {
    key.m = m <= 32 ? 32 : kMostBucketRows;
    if (a.transposed) key.a.leading = std::max(key.a.leading, key.m);
  }
  return key;
}

std::string Key::text() const {
  const Key bucket = of_bucket();
  return std::to_string(bucket.m) + "x" + std::to_string(n) + "x" + std::to_string(k) + " a " + text_of(bucket.a) +
         " b " + text_of(b) + " c " + text_of(c) + (accumulate ? " accumulate" : "") + (bias ? " bias" : "");
}

Plan::Plan(const Key& product) : key(product) {
  check(cublaslt().desc_create(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  set(description, CUBLASLT_MATMUL_DESC_TRANSA, key.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(description, CUBLASLT_MATMUL_DESC_TRANSB, key.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (key.bias) {
    set(description, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(description, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<std::int32_t>(type_of(key.c.dtype)));
  }
  a = layout_of(key.a, key.m, key.k);
  b = layout_of(key.b, key.k, key.n);
  c = layout_of(key.c, key.m, key.n);
}

Plan::~Plan() {
  for (const cublasLtMatrixLayout_t layout : {a, b, c}) {
    if (layout != nullptr) cublaslt().layout_destroy(layout);
  }
  if (description != nullptr) cublaslt().desc_destroy(description);
}

Products::Products(Queue& queue) : queue_(queue) {
  queue_.activate();
  check(cublaslt().create(&handle_), "cublasLtCreate");
  workspace_ = allocate_memory(kWorkspace, queue_.device());
  choices_.made_by = name_of_library_and_device(queue_.device());
}

Products::~Products() {
  plans_.clear();
  cublaslt().destroy(handle_);
}

std::vector<cublasLtMatmulAlgo_t> Products::candidates(const Key& key, int most) {
  const Plan plan(key);
  const Preference preference(key);
  std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<std::size_t>(most));
  int count = 0;
  const cublasStatus_t status = cublaslt().heuristic(handle_, plan.description, plan.b, plan.a, plan.c, plan.c,
                                                     preference.get(), most, found.data(), &count);
  std::vector<cublasLtMatmulAlgo_t> result;
  if (status != CUBLAS_STATUS_SUCCESS) return result;  // none for such a product
  for (int i = 0; i < count; ++i) {
    const cublasLtMatmulHeuristicResult_t& each = found[static_cast<std::size_t>(i)];
    if (each.state == CUBLAS_STATUS_SUCCESS && each.workspaceSize <= kWorkspace) result.push_back(each.algo);
  }
  return result;
}

bool Products::fits(const Plan& plan) {
  cublasLtMatmulHeuristicResult_t result{};
  return cublaslt().algorithm_check(handle_, plan.description, plan.b, plan.a, plan.c, plan.c, &plan.algorithm,
                                    &result) == CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= kWorkspace;
}

// By what is known of the product, else the library's first candidate, which is known from then on.
void Products::set_algorithm(Plan& plan) {
  const std::string text = plan.key.text();
  const auto known = choices_.by_product.find(text);
  if (known != choices_.by_product.end()) {
    std::memcpy(&plan.algorithm, known->second.algorithm.data(), sizeof(plan.algorithm));
    plan.available = fits(plan);
    if (plan.available) return;
  }
  for (const Key& key : {plan.key.of_bucket(), plan.key}) {
    const std::vector<cublasLtMatmulAlgo_t> found = candidates(key, 1);
    if (found.empty()) continue;
    plan.algorithm = found.front();
    plan.available = fits(plan);
    if (!plan.available) continue;
    Choice first;
    std::memcpy(first.algorithm.data(), &plan.algorithm, sizeof(plan.algorithm));
    choices_.by_product[text] = first;
    return;
  }
}

Plan& Products::plan(const Key& key) {
  const auto known = plans_.find(key);
  if (known != plans_.end()) return *known->second;
  auto plan = std::make_unique<Plan>(key);
  set_algorithm(*plan);
  return *(plans_[key] = std::move(plan));
}

void Products::queue_product(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Operands& operands) {
  const float one = 1.0f, zero = 0.0f;
  if (plan.key.bias) set(plan.description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
  check(cublaslt().matmul(handle_, plan.description, &one, operands.b, plan.b, operands.a, plan.a,
                          plan.key.accumulate ? &one : &zero, operands.addend, plan.c, operands.c, plan.c, &algorithm,
                          workspace_.get(), kWorkspace, static_cast<cudaStream_t>(queue_.stream())),
        "cublasLtMatmul");
}

void Products::adopt(const Choices& others) {
  for (const auto& [product, choice] : others.by_product) {
    choices_.by_product[product] = choice;
    adopted_.insert(product);
  }
  for (auto& [key, plan] : plans_) set_algorithm(*plan);
}

std::map<std::string, Key> Products::untimed(std::int64_t most_rows) const {
  std::map<std::string, Key> result;
  for (const auto& [key, plan] : plans_) {
    const std::string text = key.text();
    const auto known = choices_.by_product.find(text);
    if (key.m > most_rows || known == choices_.by_product.end() || known->second.microseconds > 0.0 ||
        adopted_.contains(text)) {
      continue;
    }
    result.emplace(text, key.of_bucket());
  }
  return result;
}

std::size_t Products::bytes_to_time(std::int64_t most_rows) const {
  std::size_t most = 0;
  for (const auto& [text, key] : untimed(most_rows)) most = std::max(most, Sizes(key).total());
  return most;
}

double Products::microseconds_of(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, std::byte* memory) {
  constexpr int kRuns = 5;
  constexpr double kEnough = 5e3;  // microseconds
  const Sizes sizes(plan.key);
  std::byte *a = memory, *b = a + sizes.a, *c = b + sizes.b;
  const Operands operands{a, b, c, c, c + sizes.c};
  Event begin(queue_, true), end(queue_, true);
  queue_product(plan, algorithm, operands);  // loads the kernel
  double best = 0.0;
  double total = 0.0;
  for (int round = 0; round < 2 || (total < kEnough && round < 20); ++round) {
    begin.record();
    for (int i = 0; i < kRuns; ++i) queue_product(plan, algorithm, operands);
    end.record();
    end.synchronize();
    const double each = end.elapsed_milliseconds(begin) * 1e3 / kRuns;
    best = round == 0 ? each : std::min(best, each);
    total += each * kRuns;
  }
  return best;
}

int Products::time_all(void* memory, std::size_t bytes, std::int64_t most_rows) {
  int left_out = 0;
  queue_.activate();
  for (const auto& [text, key] : untimed(most_rows)) {
    const std::size_t needed = Sizes(key).total();
    if (needed > bytes) {
      ++left_out;
      continue;
    }
    fill_with_noise(queue_, memory, needed);
    const Plan plan(key);
    Choice best;
    for (const cublasLtMatmulAlgo_t& algorithm : candidates(key, kCandidates)) {
      double microseconds = 0.0;
      try {
        microseconds = microseconds_of(plan, algorithm, static_cast<std::byte*>(memory));
      } catch (const Error&) {
        continue;  // a candidate that the library then refuses
      }
      if (best.microseconds > 0.0 && microseconds >= best.microseconds) continue;
      best.microseconds = microseconds;
      std::memcpy(best.algorithm.data(), &algorithm, sizeof(algorithm));
    }
    if (best.microseconds > 0.0) choices_.by_product[text] = best;
  }
  for (auto& [key, plan] : plans_) set_algorithm(*plan);
  return left_out;
}

}  // namespace flashgla::ops::matmul::cuda
