// The row of the operator's table: cuDNN where it has a graph for the call, else the kernels of ../hopper.
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/softmax_attention/by_cudnn.h"
#include "flashgla/ops/softmax_attention/cuda/call.cuh"
#include "flashgla/ops/softmax_attention/cuda/cudnn/graphs.h"
#include "flashgla/ops/softmax_attention/cuda/cudnn/library.h"
#include "flashgla/ops/softmax_attention/cuda/hopper/launch.h"

namespace flashgla::ops::softmax_attention::cuda::cudnn {

namespace {

constexpr int kThreads = 256;
constexpr const char* kLabel = "attention: cuDNN";

// Of dimensions of one element a stride says nothing: as if the tensor had no gaps there.
Layout layout_of(const TensorView& view) {
  Layout layout;
  layout.head = view.size(2) == 1 ? view.size(3) : view.stride[2];
  layout.token = view.size(1) == 1 ? layout.head * view.size(2) : view.stride[1];
  layout.batch = view.size(0) == 1 ? layout.token * view.size(1) : view.stride[0];
  return layout;
}

Key key_of(const Inputs& in, const TensorView& o, const Options& options) {
  Key key;
  key.batch = in.q.size(0);
  key.length = in.q.size(1);
  key.heads = in.q.size(2);
  key.groups = in.k.size(2);
  key.channels = in.q.size(3);
  key.scale = static_cast<float>(options.scale);
  key.q = layout_of(in.q);
  key.k = layout_of(in.k);
  key.v = layout_of(in.v);
  key.o = layout_of(o);
  return key;
}

void forward(Context& context, const Inputs& in, const Outputs& out, const Options& options) {
  Graphs& graphs = context.queue().resource<Graphs>();
  const Graph* graph = graphs.find(key_of(in, out.o, options));
  if (graph == nullptr) return hopper::forward(context, in, out, options);
  const ArenaScope scope(context.scratch());
  // Asked for in any case: a graph without them is another one, whose outputs may have other bits.
  const Shape rows({in.q.size(0), in.q.size(1), in.q.size(2)});
  const TensorView lse = out.lse ? out.lse : context.scratch().tensor(rows, DType::f32, kLabel);
  void* workspace = context.scratch().allocate(graph->workspace(), kLabel);
  if (context.planning()) return;
  void* const tensors[] = {in.q.data, in.k.data, in.v.data, out.o.data, lse.data};
  graphs.run(*graph, tensors, workspace);
}

// lse [B,T,H] as [B,H,T], a thread an element of the latter.
__global__ void __launch_bounds__(kThreads)
    by_head_kernel(const float* lse, float* by_head, int heads, int length, std::int64_t count) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const std::int64_t row = i / length, token = i - row * length, batch = row / heads, head = row - batch * heads;
  by_head[i] = lse[(batch * length + token) * heads + head];
}

void* part_of(const TensorView& view, std::int64_t row, std::int64_t head) {
  return static_cast<std::byte*>(view.data) +
         (row * view.stride[0] + head * view.stride[2]) * static_cast<std::int64_t>(size_of(view.dtype));
}

void backward(Context& context, const Inputs& in, const Outputs& out, const TensorView& d_o,
              const InputGradients& gradients, const Options& options) {
  Graphs& graphs = context.queue().resource<Graphs>();
  Key key = key_of(in, out.o, options);
  const std::int64_t group = key.heads / key.groups;
  const CudnnPart part = cudnn_part(key.batch, key.length, key.heads, key.groups);
  key.backward = true;
  key.batch = part.rows;
  key.heads = part.groups * group;
  key.groups = part.groups;
  key.d_o = layout_of(d_o);
  key.dq = layout_of(gradients.dq);
  key.dk = layout_of(gradients.dk);
  key.dv = layout_of(gradients.dv);
  const Graph* graph = graphs.find(key);
  if (graph == nullptr) return hopper::backward(context, in, out, d_o, gradients, options);
  const ArenaScope scope(context.scratch());
  const std::int64_t batch = in.q.size(0), heads = in.q.size(2);
  const TensorView lse = context.scratch().tensor({batch, heads, key.length}, DType::f32, kLabel);
  void* workspace = context.scratch().allocate(graph->workspace(), kLabel);
  if (context.planning()) return;
  flashgla::ops::cuda::queue_kernel(
      context, "softmax_attention sums by head", by_head_kernel, (lse.numel() + kThreads - 1) / kThreads, kThreads, 0,
      out.lse.as<float>(), lse.as<float>(), static_cast<int>(heads), static_cast<int>(key.length), lse.numel());
  for (std::int64_t row = 0; row < batch; row += part.rows) {
    for (std::int64_t g = 0; g < in.k.size(2); g += part.groups) {
      const std::int64_t head = g * group;
      void* const tensors[] = {part_of(in.q, row, head),
                               part_of(in.k, row, g),
                               part_of(in.v, row, g),
                               part_of(out.o, row, head),
                               part_of(d_o, row, head),
                               lse.as<float>() + (row * heads + head) * key.length,
                               part_of(gradients.dq, row, head),
                               part_of(gradients.dk, row, g),
                               part_of(gradients.dv, row, g)};
      graphs.run(*graph, tensors, workspace);
    }
  }
}

Support supports(const Problem& problem, const Architecture& architecture) {
  Support takes = cudnn_takes(problem, architecture);
  if (takes && !library().missing.empty()) return Support::no("is not there: " + library().missing);
  return takes;
}

}  // namespace

}  // namespace flashgla::ops::softmax_attention::cuda::cudnn

namespace flashgla::ops::softmax_attention {

const Implementation kCudnn{"cudnn",
                            Device::Kind::cuda,
                            cuda::cudnn::supports,
                            cuda::cudnn::forward,
                            cuda::cudnn::backward,
                            cuda::append,
                            cuda::step,
                            true};

}  // namespace flashgla::ops::softmax_attention
