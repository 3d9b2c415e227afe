#include "flashgla/ops/softmax_attention/cuda/cudnn/graphs.h"

#include "flashgla/base/error.h"
#include "flashgla/ops/softmax_attention/by_cudnn.h"
#include "flashgla/ops/softmax_attention/cuda/cudnn/frontend.h"
#include "flashgla/ops/softmax_attention/cuda/cudnn/library.h"

namespace flashgla::ops::softmax_attention::cuda::cudnn {

namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// Names of a graph's tensors: run() takes them in this order.
enum Uid : std::int64_t { kQ = 1, kK, kV, kO, kDO, kLse, kDQ, kDK, kDV };

struct FrontendGraph : Graph {
  std::size_t workspace() const override { return bytes; }
  fe::graph::Graph graph;
  std::size_t bytes = 0;
};

std::vector<std::int64_t> strides_of(const Layout& layout) { return {layout.batch, layout.head, layout.token, 1}; }

// As cuDNN names dimensions: [B,H,T,K], whatever lies how.
void describe(fe::graph::Tensor_attributes& tensor, Uid uid, const Key& key, std::int64_t heads, const Layout& layout) {
  tensor.set_uid(uid).set_dim({key.batch, heads, key.length, key.channels}).set_stride(strides_of(layout));
}

void describe_lse(fe::graph::Tensor_attributes& tensor, const Key& key, const Layout& layout) {
  tensor.set_uid(kLse).set_data_type(fe::DataType_t::FLOAT);
  tensor.set_dim({key.batch, key.heads, key.length, 1}).set_stride(strides_of(layout));
}

Tensor input(fe::graph::Graph& graph, Uid uid, const Key& key, std::int64_t heads, const Layout& layout) {
  fe::graph::Tensor_attributes tensor;
  describe(tensor, uid, key, heads, layout);
  return graph.tensor(tensor);
}

void describe_forward(fe::graph::Graph& graph, const Key& key) {
  const Tensor q = input(graph, kQ, key, key.heads, key.q);
  const Tensor k = input(graph, kK, key, key.groups, key.k), v = input(graph, kV, key, key.groups, key.v);
  fe::graph::SDPA_attributes options;
  options.set_name("attention").set_attn_scale(key.scale).set_generate_stats(true);
  options.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
  const auto [o, lse] = graph.sdpa(q, k, v, options);
  describe(o->set_output(true), kO, key, key.heads, key.o);
  describe_lse(lse->set_output(true), key, {key.length * key.heads, key.heads, 1});
}

void describe_backward(fe::graph::Graph& graph, const Key& key) {
  const Tensor q = input(graph, kQ, key, key.heads, key.q);
  const Tensor k = input(graph, kK, key, key.groups, key.k), v = input(graph, kV, key, key.groups, key.v);
  const Tensor o = input(graph, kO, key, key.heads, key.o), d_o = input(graph, kDO, key, key.heads, key.d_o);
  fe::graph::Tensor_attributes sums;
  describe_lse(sums, key, {key.length * key.heads, 1, key.length});
  fe::graph::SDPA_backward_attributes options;
  options.set_name("attention").set_attn_scale(key.scale).set_deterministic_algorithm(true);
  options.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
  const auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, o, d_o, graph.tensor(sums), options);
  describe(dq->set_output(true), kDQ, key, key.heads, key.dq);
  describe(dk->set_output(true), kDK, key, key.groups, key.dk);
  describe(dv->set_output(true), kDV, key, key.groups, key.dv);
}

// Throws Error with the frontend's words.
void check(const fe::error_t& error) {
  if (error.is_bad()) throw Error("softmax_attention: cuDNN: " + error.err_msg);
}

std::unique_ptr<FrontendGraph> make_graph(const Key& key, cudnnHandle_t handle) {
  // Older ones get such lengths from memory that the frontend fills in every run, which no captured step can hold.
  if (key.backward && key.length % 128 != 0 && cudnnGetVersion() <= 91500) {
    throw Error("softmax_attention: " + library().name + " takes lengths at multiples of 128");
  }
  auto made = std::make_unique<FrontendGraph>();
  fe::graph::Graph& graph = made->graph;
  graph.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  if (key.backward) {
    describe_backward(graph, key);
  } else {
    describe_forward(graph, key);
  }
  check(graph.validate());
  check(graph.build_operation_graph(handle));
  check(graph.create_execution_plans({fe::HeurMode_t::A}));
  check(graph.check_support());
  check(graph.build_plans(handle, fe::BuildPlanPolicy_t::HEURISTICS_CHOICE));
  std::int64_t bytes = 0;
  check(graph.get_workspace_size(bytes));
  made->bytes = static_cast<std::size_t>(bytes);
  if (bytes > 2 * kMostCudnnWorkspace) throw Error("softmax_attention: cuDNN: it wants too much memory");
  return made;
}

void check(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw Error("softmax_attention: " + std::string(what) + ": " + cudnnGetErrorString(status));
}

}  // namespace

Graphs::Graphs(Queue& queue) : queue_(queue) {}

Graphs::~Graphs() {
  graphs_.clear();
  if (handle_ != nullptr) cudnnDestroy(static_cast<cudnnHandle_t>(handle_));
}

const Graph* Graphs::find(const Key& key) {
  const auto found = graphs_.find(key);
  if (found != graphs_.end()) return found->second.get();
  std::unique_ptr<Graph>& graph = graphs_[key];
  try {
    if (!library().missing.empty()) throw Error(library().missing);
    cudnnHandle_t handle = static_cast<cudnnHandle_t>(handle_);
    if (handle == nullptr) check(cudnnCreate(&handle), "cudnnCreate");
    handle_ = handle;
    graph = make_graph(key, handle);
    used_ = library().name;
  } catch (const std::exception& error) {  // the frontend's or ours
    trouble_ = error.what();
  }
  return graph.get();
}

void Graphs::run(const Graph& graph, std::span<void* const> tensors, void* workspace) {
  const auto handle = static_cast<cudnnHandle_t>(handle_);
  check(cudnnSetStream(handle, static_cast<cudaStream_t>(queue_.stream())), "cudnnSetStream");
  void* pointers[kDV];
  std::copy(tensors.begin(), tensors.end(), pointers);
  const fe::graph::Graph& made = static_cast<const FrontendGraph&>(graph).graph;
  check(made.execute(handle, pointers, static_cast<int>(tensors.size()), workspace));
}

}  // namespace flashgla::ops::softmax_attention::cuda::cudnn
