// Caches: what a call adds to them.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/softmax_attention/cuda/call.cuh"

namespace flashgla::ops::softmax_attention::cuda {

namespace {

using flashgla::cuda::Vector;
namespace house = flashgla::ops::cuda;

struct AppendCall {
  Strided x;
  const std::int32_t* positions = nullptr;
  const std::int32_t* bounds = nullptr;
  const void* before = nullptr;  // null: the cache's other rows stay
  void* cache = nullptr;
  std::int64_t items = 0;  // tokens of the call, or with `before` rows of all caches
  int sequences = 0, length = 0, rows = 0, heads = 0, channels = 0;
};

constexpr int kAppendThreads = 128;

// A thread has N channels of an item: of the first call in so many blocks, of the second in the others.
template <int N, class X, class C>
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(AppendCall first, AppendCall second, std::int64_t first_blocks) {
  flashgla::cuda::wait_for_previous();
  const bool of_first = blockIdx.x < first_blocks;
  const AppendCall& call = of_first ? first : second;
  const int vectors = call.heads * call.channels / N;
  const std::int64_t block = blockIdx.x - (of_first ? 0 : first_blocks);
  const std::int64_t at = block * kAppendThreads + threadIdx.x, item = at / vectors;
  if (item >= call.items) return;
  const int column = static_cast<int>(at % vectors) * N;
  int n, row, token;  // the token of the call that the row gets; none: -1
  std::int64_t begin = 0;
  int length = call.length;
  const auto look_up = [&](int sequence) {
    n = sequence;
    if (call.bounds == nullptr) return;
    begin = call.bounds[n];
    length = static_cast<int>(call.bounds[n + 1] - begin);
  };
  if (call.before == nullptr) {
    int sequence = static_cast<int>(item / call.length);
    if (call.bounds != nullptr) {
      int low = 0, high = call.sequences;  // bounds[low] <= item < bounds[high]
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (call.bounds[middle] <= item ? low : high) = middle;
      }
      sequence = low;
    }
    look_up(sequence);
    token = static_cast<int>(call.bounds == nullptr ? item % call.length : item - begin);
    if (token < length - call.rows) return;  // a newer one has the row
    const std::int64_t position = call.positions != nullptr ? call.positions[n] : 0;
    row = static_cast<int>((position + token) % call.rows);
  } else {
    look_up(static_cast<int>(item / call.rows));
    row = static_cast<int>(item % call.rows);
    const std::int64_t position = call.positions != nullptr ? call.positions[n] : 0;
    const std::int64_t last = position + length - 1, newest = last - ((last - row) % call.rows + call.rows) % call.rows;
    token = length > 0 && newest >= position ? static_cast<int>(newest - position) : -1;
  }
  const std::int64_t place = (static_cast<std::int64_t>(n) * call.rows + row) * call.heads * call.channels + column;
  C* to = static_cast<C*>(call.cache) + place;
  if (token < 0) {
    Vector<C, N>::load(static_cast<const C*>(call.before) + place).store(to);
    return;
  }
  const int batch = call.bounds == nullptr ? n : 0;
  const X* from = call.x.at<X>(batch, begin + token, column / call.channels) + column % call.channels;
  const Vector<X, N> x = Vector<X, N>::load(from);
  float values[N];
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = x[i];
  Vector<C, N>::of(values).store(to);
}

}  // namespace

void append(Context& context, std::span<const Appended> tensors, const TensorView& positions,
            const TensorView& cu_seqlens) {
  if (context.planning()) return;
  const auto call_of = [&](const Appended& one) {
    AppendCall call{.x = Strided(one.x),
                    .positions = positions ? positions.as<std::int32_t>() : nullptr,
                    .bounds = cu_seqlens ? cu_seqlens.as<std::int32_t>() : nullptr,
                    .before = one.before && one.before.data != one.cache.data ? one.before.data : nullptr,
                    .cache = one.cache.data,
                    .items = 0,
                    .sequences = static_cast<int>(one.cache.size(0)),
                    .length = static_cast<int>(one.x.size(1)),
                    .rows = static_cast<int>(one.cache.size(1)),
                    .heads = static_cast<int>(one.x.size(2)),
                    .channels = static_cast<int>(one.x.size(3))};
    call.items = call.before != nullptr ? one.cache.size(0) * one.cache.size(1) : one.x.size(0) * one.x.size(1);
    return call;
  };
  const auto is_aligned = [](const Appended& one) {
    return one.x.size(3) % 8 == 0 && house::are_aligned({&one.x, &one.cache}, 8) &&
           reinterpret_cast<std::uintptr_t>(one.before.data) % 16 == 0;
  };
  // Two tensors a launch.
  for (std::size_t i = 0; i < tensors.size(); i += 2) {
    const bool two = i + 1 < tensors.size();
    const AppendCall first = call_of(tensors[i]), second = two ? call_of(tensors[i + 1]) : AppendCall{};
    const bool aligned = is_aligned(tensors[i]) && (!two || is_aligned(tensors[i + 1]));
    house::with_element(tensors[i].x.dtype, [&](auto from) {
      house::with_element(tensors[i].cache.dtype, [&](auto to) {
        const auto queue = [&](auto* kernel, int each) {
          const auto blocks = [&](const AppendCall& call) {
            const std::int64_t threads = call.items * (call.heads * call.channels / each);
            return (threads + kAppendThreads - 1) / kAppendThreads;
          };
          house::queue_kernel(context, "softmax_attention append", kernel, blocks(first) + blocks(second),
                              kAppendThreads, 0, first, second, blocks(first));
        };
        aligned ? queue(append_kernel<8, decltype(from), decltype(to)>, 8)
                : queue(append_kernel<1, decltype(from), decltype(to)>, 1);
      });
    });
  }
}

}  // namespace flashgla::ops::softmax_attention::cuda
