// Calls that a graph replays: of every kernel path (cuda_paths.h), forward and backward, and of a step.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "flashgla/base/memory.h"
#include "flashgla/ops/gated_linear_attention/cuda/tests/cuda_paths.h"
#include "flashgla/ops/gated_linear_attention/tests/test_support.h"
#include "testing/compare.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/base/cuda/check.h"
#include "flashgla/base/cuda/device.h"

namespace flashgla::ops::gated_linear_attention {
namespace {

// A stream, and a graph of what `call` queues on it. Capture in global mode refuses allocation and synchronisation.
class Capture {
 public:
  Capture() { flashgla::cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  ~Capture() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    cudaStreamDestroy(stream_);
  }
  void* stream() const { return stream_; }
  void record(const std::function<void()>& call) {
    flashgla::cuda::check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      call();
    } catch (...) {
      cudaStreamEndCapture(stream_, &graph);
      throw;
    }
    flashgla::cuda::check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    flashgla::cuda::check(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    cudaGraphDestroy(graph);
  }
  void replay() {
    flashgla::cuda::check(cudaDeviceSynchronize(),
                          "cudaDeviceSynchronize");  // this stream waits for no copy on another
    flashgla::cuda::check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
    flashgla::cuda::check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

// A context whose workspace a dry run planned: nothing is allocated afterwards.
void plan(Context& context, const std::function<void()>& call) {
  context.scratch().begin_planning();
  call();
  context.scratch().commit_plan();
}

class CudaGraphs : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_P(CudaGraphs, GraphReplaysTheSameBits) {
  const Case& c = GetParam();
  if (c.gate_values == GateValues::extreme && c.dtype == DType::bf16) return;
  const CaseData host = make_data(c);
  for_each_implementation(describe(host.in, host.options), [&](Device device, const Implementation& row) {
    if (device.kind != Device::Kind::cuda) return;
    const CaseData data = on_device(host, device);
    const std::size_t states = row.states_bytes(describe(data.in, data.options));
    for (const std::size_t kept : {states, std::size_t{0}}) {
      const Results direct = run(device, row.name, host, c.states, kept > 0, true);
      const Results results = make_results(data, c.states, kept);
      Capture capture;
      Context context(device);
      context.set_stream(capture.stream());
      context.force_implementation(row.name);
      auto call = [&] {
        forward(context, data.in, results.out, data.options);
        backward(context, data.in, results.out, data.d_out, results.d_in, data.options);
      };
      plan(context, call);
      capture.record(call);
      for (int replay = 0; replay < 2; ++replay) {
        for (const Tensor& tensor : results.storage) fill_with_nan(tensor->data, tensor->bytes(), device);
        capture.replay();
        const Results replayed = on_cpu(results);
        expect_same_bits(outputs_of(replayed), outputs_of(direct));
        expect_same_bits(gradients_of(replayed), gradients_of(direct));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaGraphs, ::testing::ValuesIn(path_cases()),
                         [](const auto& parameter) { return parameter.param.name; });

TEST(Cuda, GraphOfAStepReplaysTheSameBits) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  for (const DType state_dtype : {DType::f32, DType::bf16}) {
    for (Case c : law_cases(DType::bf16)) {
      SCOPED_TRACE(std::string(name_of(state_dtype)) + " state, " + c.name);
      c.length = 1;
      const CaseData host = make_data(c);
      const Tensor h0 = testing::converted(host.in.h0, state_dtype);
      const Tensor z0 = host.in.z0 ? testing::converted(host.in.z0, state_dtype) : Tensor();
      for_each_implementation(describe(host.in, host.options), [&](Device device, const Implementation& row) {
        if (device.kind != Device::Kind::cuda) return;
        const CaseData data = on_device(host, device);
        auto steps = [&](bool by_graph) {
          std::vector<Tensor> storage;
          const TensorView h = mirrored(h0, device, storage), z = mirrored(z0, device, storage);
          const Results results = make_results(data, false, 0);
          const StepData token = slice_token(data.in, results.out.o, 0);
          Capture capture;
          Context context(device);
          context.set_stream(capture.stream());
          context.force_implementation(row.name);
          auto call = [&] { step(context, token.in, h, z, token.o, data.options); };
          plan(context, call);
          if (by_graph) capture.record(call);
          for (int i = 0; i < 3; ++i) {
            if (by_graph) {
              capture.replay();
            } else {
              call();
            }
          }
          flashgla::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
          Results host_results = on_cpu(results);
          host_results.out.ht = mirrored(h, Device::cpu(), host_results.storage);
          host_results.out.zt = mirrored(z, Device::cpu(), host_results.storage);
          return host_results;
        };
        const Results direct = steps(false), replayed = steps(true);
        expect_same_bits(outputs_of(replayed), outputs_of(direct));
      });
    }
  }
}

}  // namespace
}  // namespace flashgla::ops::gated_linear_attention
#endif
