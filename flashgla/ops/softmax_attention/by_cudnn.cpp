#include "flashgla/ops/softmax_attention/by_cudnn.h"

#include "flashgla/ops/softmax_attention/library.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/ops/softmax_attention/cuda/cudnn/graphs.h"
#include "flashgla/ops/softmax_attention/cuda/cudnn/library.h"
#endif

namespace flashgla::ops::softmax_attention {

namespace {

constexpr const char* kOwn = "FlashGLA's kernels";
constexpr std::int64_t kFewest = 64;  // tokens of a sequence
// Measured: of 16,384 tokens of 16 heads of 128 whole steps are no faster as sequences of 2,048, and are as one; a call
// of an eighth of that is slower by itself.
constexpr std::int64_t kFewestFaster = 4096, kFewestQueriesFaster = 16384 * 16;

std::int64_t largest_divisor(std::int64_t of, std::int64_t most) {
  std::int64_t divisor = std::min(of, most);
  while (divisor > 0 && of % divisor != 0) --divisor;
  return divisor;
}

}  // namespace

Support cudnn_takes(const Problem& problem, const Architecture& architecture) {
  if (architecture.cuda_capability != 90) return Support::no("is tried on compute capability 9.0 alone");
  if (problem.dtype != DType::bf16) return Support::no("takes bf16");
  if (problem.key_dim != problem.value_dim || (problem.key_dim != 64 && problem.key_dim != 128)) {
    return Support::no("takes keys and values of 64 or of 128 channels");
  }
  if (problem.dropout) return Support::no("takes no dropout of probabilities");
  if (!problem.whole) return Support::no("takes whole sequences of one length, without a past, a window or packing");
  if (!problem.regular) return Support::no("takes rows at multiples of 16 bytes and a positive scale");
  if (problem.batch == 0 || problem.length < kFewest) {
    return Support::no("takes sequences of " + std::to_string(kFewest) + " tokens or more");
  }
  if (problem.direction == Direction::backward &&
      cudnn_part(problem.batch, problem.length, problem.heads, problem.groups).rows == 0) {
    return Support::no("takes too much memory for so long sequences");
  }
  return Support::yes();
}

bool cudnn_is_faster(const Problem& problem, const Architecture& architecture) {
  if (!problem.training || problem.key_dim != 128 || problem.length < kFewestFaster ||
      problem.batch * problem.length * problem.heads < kFewestQueriesFaster || !cudnn_takes(problem, architecture)) {
    return false;
  }
  if (problem.direction == Direction::forward) return true;
  const CudnnPart part = cudnn_part(problem.batch, problem.length, problem.heads, problem.groups);
  const bool whole = part.rows == problem.batch && part.groups == problem.groups;
  return whole || 2 * part.bytes > kMostCudnnWorkspace;  // small parts leave much of the GPU idle
}

CudnnPart cudnn_part(std::int64_t batch, std::int64_t length, std::int64_t heads, std::int64_t groups) {
  constexpr std::int64_t kTile = 128;
  const std::int64_t side = (length + kTile - 1) / kTile * kTile;
  const std::int64_t group = 2 * side * side * (heads / groups), row = group * groups;  // bytes
  if (row <= kMostCudnnWorkspace) {
    const std::int64_t rows = largest_divisor(batch, kMostCudnnWorkspace / row);
    return {rows, groups, rows * row};
  }
  const std::int64_t fitting = largest_divisor(groups, kMostCudnnWorkspace / group);
  return {fitting > 0 ? 1 : 0, fitting, fitting * group};
}

std::string notice_of_change(const std::string& before, const std::string& now) {
  if (before == now) return {};
  const auto named = [](const std::string& library) { return library.empty() ? kOwn : library; };
  return "softmax attention was computed by " + named(before) + ", and here it is by " + named(now) +
         ": results may differ in their last bits" +
         (before.empty() ? "; FLASHGLA_CUDNN=off computes it as before" : "");
}

#ifdef FLASHGLA_CUDA

std::string library_of(Context& context) {
  if (context.device().kind != Device::Kind::cuda) return {};
  return context.queue().resource<cuda::cudnn::Graphs>().used();
}

std::string describe_library(Context& context) {
  using namespace cuda::cudnn;
  if (context.device().kind != Device::Kind::cuda) return kOwn;
  constexpr std::int64_t kTokens = 128, kChannels = 128;
  Graphs& graphs = context.queue().resource<Graphs>();
  Key key{.batch = 1, .length = kTokens, .heads = 1, .groups = 1, .channels = kChannels};
  key.q = key.k = key.v = key.o = {kTokens * kChannels, kChannels, kChannels};
  if (graphs.find(key) != nullptr) return library().name + " where it is faster, else " + kOwn;
  return std::string(kOwn) + "; not cuDNN: " + graphs.trouble();
}

#else

std::string library_of(Context&) { return {}; }
std::string describe_library(Context&) { return kOwn; }

#endif

}  // namespace flashgla::ops::softmax_attention
