// Products by cuBLASLt on one queue: a plan for each, made when the product is first asked for, in a dry run already.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "flashgla/base/queue.h"
#include "flashgla/base/tensor.h"
#include "flashgla/ops/matmul/choices.h"
#include "flashgla/ops/matmul/cuda/cublaslt.h"

namespace flashgla::ops::matmul::cuda {

// A matrix as cuBLASLt sees it.
struct Matrix {
  DType dtype = DType::bf16;
  bool transposed = false;   // against row-major [rows, columns] of the product
  std::int64_t leading = 1;  // elements from one contiguous line to the next
  int alignment = 16;        // bytes, of the first element: a power of two up to 16

  friend auto operator<=>(const Matrix&, const Matrix&) = default;
};

// A product with c row-major: c [m,n] (+)= a [m,k] b [k,n] (+ bias [n], of c's dtype).
struct Key {
  std::int64_t m = 0, n = 0, k = 0;
  Matrix a, b, c;
  bool accumulate = false;
  bool bias = false;

  friend auto operator<=>(const Key&, const Key&) = default;

  // "16384x2048x5632 a bf16 N 5632 16 b ...", with few rows (up to 64) rounded up to 32 or 64: one algorithm for all
  // numbers of rows of a bucket, so that a sequence's tokens do not depend on how many others are decoded beside it.
  std::string text() const;
  Key of_bucket() const;
};

struct Plan {
  Key key;
  cublasLtMatmulDesc_t description = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  bool available = false;  // cuBLASLt has an algorithm
  cublasLtMatmulAlgo_t algorithm{};

  explicit Plan(const Key& key);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
};

class Products {
 public:
  explicit Products(Queue& queue);
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  // Made at the first call for this product; after that a look-up.
  Plan& plan(const Key& key);

  struct Operands {
    const void *a, *b, *addend;  // addend lies as c, or is c; read where the plan's product accumulates
    void* c;
    const void* bias;
  };
  // Queues the product; the plan must be available.
  void run(const Plan& plan, const Operands& operands) { queue_product(plan, plan.algorithm, operands); }

  // Of this library and device, for all products so far.
  const Choices& choices() const { return choices_; }
  // Not taken over from others.
  bool timed_here(const std::string& product) const { return !adopted_.contains(product); }
  // Takes algorithms over, also into plans that there are; their products are not timed any more.
  void adopt(const Choices& others);

  // Times the candidates of every product of up to most_rows rows that has not been timed, its operands in `memory`
  // (noise overwrites it), and takes the fastest. Returns the number of products whose operands do not fit.
  int time_all(void* memory, std::size_t bytes, std::int64_t most_rows);
  // The memory that time_all needs to time everything; 0: nothing is left to be timed.
  std::size_t bytes_to_time(std::int64_t most_rows) const;

 private:
  // One product for each algorithm that is still to be timed.
  std::map<std::string, Key> untimed(std::int64_t most_rows) const;
  // The library's candidates in its order, at most `most`.
  std::vector<cublasLtMatmulAlgo_t> candidates(const Key& key, int most);
  bool fits(const Plan& plan);  // whether the plan's algorithm can compute it
  void set_algorithm(Plan& plan);
  double microseconds_of(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, std::byte* memory);
  void queue_product(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Operands& operands);

  Queue& queue_;
  cublasLtHandle_t handle_ = nullptr;
  std::shared_ptr<void> workspace_;
  std::map<Key, std::unique_ptr<Plan>> plans_;
  Choices choices_;
  std::set<std::string> adopted_;
};

}  // namespace flashgla::ops::matmul::cuda
