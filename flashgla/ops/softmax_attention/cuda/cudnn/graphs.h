// Attention as cuDNN's frontend describes it: a graph for each direction, shape and layout, made when it is first asked
// for, in a dry run already, and then looked up.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "flashgla/base/queue.h"

namespace flashgla::ops::softmax_attention::cuda::cudnn {

// Elements from one batch row, token or head of a tensor [B,T,H,K] to the next; channels are neighbours.
struct Layout {
  std::int64_t batch = 0, token = 0, head = 0;
  friend auto operator<=>(const Layout&, const Layout&) = default;
};

// Causal attention over whole sequences in bf16.
struct Key {
  bool backward = false;
  std::int64_t batch = 0, length = 0, heads = 0, groups = 0, channels = 0;
  float scale = 1.0f;
  Layout q, k, v, o, d_o, dq, dk, dv;  // the last four in the backward alone

  friend auto operator<=>(const Key&, const Key&) = default;
};

class Graph {
 public:
  virtual ~Graph() = default;
  // Device memory that a run takes; aligned to 256 bytes.
  virtual std::size_t workspace() const = 0;
};

class Graphs {
 public:
  explicit Graphs(Queue& queue);
  ~Graphs();
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  // Null where cuDNN is not there, has no kernel for it, or one that takes far more memory than cudnn_part() expects.
  const Graph* find(const Key& key);

  // Queues it. Forward: q, k, v, o, lse as f32 [B,T,H]. Backward: q, k, v, o, d_o, lse as f32 [B,H,T], dq, dk, dv; the
  // same bits in every run.
  void run(const Graph& graph, std::span<void* const> tensors, void* workspace);

  // "cuDNN 9.19.0" once a graph was made, else empty.
  const std::string& used() const { return used_; }
  // What the newest find() that gave null met.
  const std::string& trouble() const { return trouble_; }

 private:
  Queue& queue_;
  void* handle_ = nullptr;
  std::map<Key, std::unique_ptr<Graph>> graphs_;
  std::string used_, trouble_;
};

}  // namespace flashgla::ops::softmax_attention::cuda::cudnn
