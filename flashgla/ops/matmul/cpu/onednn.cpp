// Large products by oneDNN, one single-threaded call a tile. oneDNN's own threading would cut differently, and so
// round differently, for each number of threads.
#include <omp.h>
#include <signal.h>

#include <array>
#include <cstring>
#include <map>
#include <unordered_map>

#include "dnnl.hpp"
#include "flashgla/base/memory.h"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/matmul/cpu/tiles.h"
#include "flashgla/ops/matmul/implementations.h"
#include "flashgla/ops/rows.h"

namespace flashgla::ops::matmul {

namespace {

dnnl::memory::data_type onednn_type(DType dtype) {
  return dtype == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

// What a compiled product depends on.
struct Key {
  std::int64_t m, n, k;
  std::array<std::int64_t, 2> a_stride, b_stride, c_stride;
  DType a, b, c, bias;
  bool has_bias, accumulate;
  auto operator<=>(const Key&) const = default;  // NOLINT(modernize-use-nullptr): the check is wrong here
};

// oneDNN's primitives and their scratch memory, for one thread: no locks, and nothing is compiled or allocated once
// each shape has been seen.
class Products {
 public:
  static Products& of_this_thread() {
    thread_local Products products;
    return products;
  }

  void run(const Key& key, void* a, void* b, void* c, void* bias) {
    auto found = products_.find(key);
    if (found == products_.end()) {
      if (products_.size() >= kMost) products_.clear();
      found = products_.emplace(key, Product(engine_, key)).first;
      reserve(found->second.scratch_bytes);
    }
    Product& product = found->second;
    product.arguments.at(DNNL_ARG_SRC).set_data_handle(a);
    product.arguments.at(DNNL_ARG_WEIGHTS).set_data_handle(b);
    product.arguments.at(DNNL_ARG_DST).set_data_handle(c);
    product.arguments.at(DNNL_ARG_SCRATCHPAD).set_data_handle(scratch_.get());
    if (key.has_bias) product.arguments.at(DNNL_ARG_BIAS).set_data_handle(bias);
    product.primitive.execute(stream_, product.arguments);
  }

 private:
  static constexpr std::size_t kMost = 1024;  // prompts of ever new lengths must not fill the memory

  struct Product {
    dnnl::matmul primitive;
    std::unordered_map<int, dnnl::memory> arguments;
    std::size_t scratch_bytes = 0;

    Product(const dnnl::engine& engine, const Key& key) {
      using dims = dnnl::memory::dims;
      const dnnl::memory::desc a({key.m, key.k}, onednn_type(key.a), dims{key.a_stride[0], key.a_stride[1]});
      const dnnl::memory::desc b({key.k, key.n}, onednn_type(key.b), dims{key.b_stride[0], key.b_stride[1]});
      const dnnl::memory::desc c({key.m, key.n}, onednn_type(key.c), dims{key.c_stride[0], key.c_stride[1]});
      const dnnl::memory::desc bias({1, key.n}, onednn_type(key.bias), dims{key.n, 1});
      dnnl::primitive_attr attributes;
      attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
      if (key.accumulate) {
        dnnl::post_ops post;
        post.append_sum(1.0f);
        attributes.set_post_ops(post);
      }
      const auto description = key.has_bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
      const dnnl::matmul::primitive_desc compiled(description, attributes, engine);
      primitive = dnnl::matmul(compiled);
      scratch_bytes = compiled.scratchpad_desc().get_size();
      auto argument = [&](int index, const dnnl::memory::desc& memory) {
        arguments.emplace(index, dnnl::memory(memory, engine, nullptr));
      };
      argument(DNNL_ARG_SRC, a);
      argument(DNNL_ARG_WEIGHTS, b);
      argument(DNNL_ARG_DST, c);
      argument(DNNL_ARG_SCRATCHPAD, compiled.scratchpad_desc());
      if (key.has_bias) argument(DNNL_ARG_BIAS, bias);
    }
  };

  void reserve(std::size_t bytes) {
    if (bytes <= scratch_bytes_) return;
    scratch_ = allocate_memory(bytes, Device::cpu());
    scratch_bytes_ = bytes;
  }

  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::map<Key, Product> products_;
  std::shared_ptr<void> scratch_;
  std::size_t scratch_bytes_ = 0;
};

// What must hold on a thread while oneDNN works on it.
//  - It asks OpenMP how many threads it may use, when it compiles and when it runs: one.
//  - Its compiled products (seen in 2.6.3, from AVX2 on) keep data below the stack pointer, where the frame of a signal
//    handler goes: a signal caught in the middle of one corrupts the heap. Signals wait until the product is done.
class OneDnnScope {
 public:
  OneDnnScope() : threads_(omp_get_max_threads()) {
    omp_set_num_threads(1);
    sigset_t caught;
    sigfillset(&caught);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&caught, fault);
    pthread_sigmask(SIG_BLOCK, &caught, &signals_);
  }
  ~OneDnnScope() {
    pthread_sigmask(SIG_SETMASK, &signals_, nullptr);
    omp_set_num_threads(threads_);
  }
  OneDnnScope(const OneDnnScope&) = delete;
  OneDnnScope& operator=(const OneDnnScope&) = delete;

 private:
  int threads_;
  sigset_t signals_;
};

void* element(const TensorView& view, std::int64_t row, std::int64_t col) {
  return static_cast<std::byte*>(view.data) +
         (row * view.stride[0] + col * view.stride[1]) * static_cast<std::int64_t>(size_of(view.dtype));
}

// Strides as oneDNN wants them: a dimension of size 1 may carry any stride, but must not hide which one is dense.
std::array<std::int64_t, 2> strides(const TensorView& view) {
  std::int64_t row = view.stride[0], col = view.stride[1];
  if (view.size(1) <= 1 && row != 1) col = 1;
  if (view.size(0) <= 1 && col != 1) row = 1;
  if (col == 1) row = std::max(row, view.size(1));
  if (row == 1 && col != 1) col = std::max(col, view.size(0));
  return {row, col};
}

void check(dnnl_status_t status) {
  if (status != dnnl_success) throw Error("matmul: oneDNN's sgemm failed with status " + std::to_string(status));
}

// oneDNN's older sgemm: ahead of its matmul primitive, as measured, unless b is a transpose with many columns.
void run_sgemm(const TensorView& a, const TensorView& b, const TensorView& c, const Tile& tile, bool accumulate) {
  const auto a_stride = strides(a), b_stride = strides(b), c_stride = strides(c);
  const bool a_transposed = a_stride[1] != 1, b_transposed = b_stride[1] != 1;
  check(dnnl_sgemm(a_transposed ? 'T' : 'N', b_transposed ? 'T' : 'N', tile.rows, tile.cols, a.size(1), 1.0f,
                   static_cast<const float*>(element(a, tile.row, 0)), a_transposed ? a_stride[1] : a_stride[0],
                   static_cast<const float*>(element(b, 0, tile.col)), b_transposed ? b_stride[1] : b_stride[0],
                   accumulate ? 1.0f : 0.0f, static_cast<float*>(element(c, tile.row, tile.col)), c_stride[0]));
}

// To an f32 tile that is still in the cache. oneDNN takes no bf16 bias beside f32.
void add_bias(const TensorView& bias, const TensorView& c, const Tile& tile) {
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    float* out = static_cast<float*>(element(c, tile.row + row, tile.col));
    if (bias.dtype == DType::f32) {
      const float* from = bias.as<float>() + tile.col;
      for (std::int64_t col = 0; col < tile.cols; ++col) out[col] += from[col];
    } else {
      const BFloat16* from = bias.as<BFloat16>() + tile.col;
      for (std::int64_t col = 0; col < tile.cols; ++col) out[col] += static_cast<float>(from[col]);
    }
  }
}

// Just before the product adds to it.
void copy_tile(const TensorView& from, const TensorView& c, const Tile& tile) {
  if (from.data == c.data) return;
  for (std::int64_t row = tile.row; row < tile.row + tile.rows; ++row) {
    std::memcpy(element(c, row, tile.col), element(from, row, tile.col),
                static_cast<std::size_t>(tile.cols) * size_of(c.dtype));
  }
}

void run_primitive(const TensorView& a, const TensorView& b, const TensorView& c, const Tile& tile, bool accumulate,
                   const TensorView& bias) {
  const Key key{tile.rows,
                tile.cols,
                a.size(1),
                strides(a),
                strides(b),
                strides(c),
                a.dtype,
                b.dtype,
                c.dtype,
                bias.dtype,
                static_cast<bool>(bias),
                accumulate};
  void* bias_data =
      bias ? static_cast<std::byte*>(bias.data) + tile.col * static_cast<std::int64_t>(size_of(bias.dtype)) : nullptr;
  try {
    Products::of_this_thread().run(key, element(a, tile.row, 0), element(b, 0, tile.col),
                                   element(c, tile.row, tile.col), bias_data);
  } catch (const dnnl::error& error) {
    throw Error(std::string("matmul: oneDNN: ") + error.what());
  }
}

// c += the sums of the other parts of K, in their order.
void add_parts(Context& context, const TensorView& parts, const TensorView& c) {
  parallel_for_blocks(context, c.size(0), rows_per_task(c.size(1) * (parts.size(0) + 1)),
                      [&](std::int64_t begin, std::int64_t end) {
                        for (std::int64_t row = begin; row < end; ++row) {
                          auto* out = static_cast<float*>(element(c, row, 0));
                          for (std::int64_t part = 0; part < parts.size(0); ++part) {
                            const auto* from = static_cast<const float*>(element(parts.select(0, part), row, 0));
                            for (std::int64_t col = 0; col < c.size(1); ++col) out[col] += from[col];
                          }
                        }
                      });
}

void run_tiles(Context& context, const TensorView& a, const TensorView& b, const TensorView& c,
               const Options& options) {
  constexpr std::int64_t kFewColumns = 32;
  const bool sgemm = a.dtype == DType::f32 && (strides(b)[1] == 1 || b.size(1) <= kFewColumns);
  const TensorView bias_in_product = c.dtype == DType::bf16 ? options.bias : TensorView();  // before it is rounded
  const Tiles tiles = tiles_of(c.size(0), c.size(1));
  const std::int64_t k_size = a.size(1);
  const std::int64_t parts = c.dtype == DType::f32 ? parts_of_k(tiles, k_size) : 1;
  const std::int64_t k_piece = even_piece(k_size, parts, 64);
  const ArenaScope scope(context.scratch());
  TensorView others;  // what the parts of K but the first come to
  if (parts > 1) {
    others = context.scratch().tensor({parts - 1, c.size(0), c.size(1)}, DType::f32, "matmul: parts of a long sum");
  }
  if (context.planning()) return;
  parallel_for(context, parts * tiles.count(), [&](std::int64_t index) {
    const OneDnnScope within_onednn;
    const Tile tile = tile_at(tiles, index % tiles.count());
    const std::int64_t part = index / tiles.count(), begin = part * k_piece, end = std::min(k_size, begin + k_piece);
    const TensorView a_part = a.slice(1, begin, end), b_part = b.slice(0, begin, end);
    const TensorView to = part == 0 ? c : others.select(0, part - 1);
    const bool accumulate = part == 0 && (options.accumulate || options.addend);
    if (part == 0 && options.addend) copy_tile(options.addend, c, tile);
    if (sgemm) {
      run_sgemm(a_part, b_part, to, tile, accumulate);
    } else {
      run_primitive(a_part, b_part, to, tile, accumulate, bias_in_product);
    }
    if (part == 0 && options.bias && !bias_in_product) add_bias(options.bias, c, tile);
  });
  if (parts > 1) add_parts(context, others, c);
}

void run_onednn(Context& context, const TensorView& a, const TensorView& b, const TensorView& c,
                const Options& options) {
  if (c.stride[1] != 1 && c.size(1) > 1) {
    Options transposed = options;
    if (options.addend) transposed.addend = options.addend.transpose(0, 1);
    run_tiles(context, b.transpose(0, 1), a.transpose(0, 1), c.transpose(0, 1), transposed);
  } else {
    run_tiles(context, a, b, c, options);
  }
}

// view in f32, dense in the same direction; view itself when it is f32 already.
TensorView in_f32(Context& context, const TensorView& view) {
  if (view.dtype == DType::f32) return view;
  const bool transposed = strides(view)[1] != 1;
  const TensorView rows = transposed ? view.transpose(0, 1) : view;
  const TensorView copy = context.scratch().tensor(rows.shape, DType::f32, "matmul: operand in f32");
  elementwise::convert(context, rows, copy);
  return transposed ? copy.transpose(0, 1) : copy;
}

// Panels of columns, with what is not f32 converted there and back.
void run_converted(Context& context, const TensorView& a, const TensorView& b, const TensorView& c,
                   const Options& options) {
  constexpr std::int64_t kPanelElements = std::int64_t{4} << 20;
  if (c.stride[1] != 1 && c.size(1) > 1) {
    run_converted(context, b.transpose(0, 1), a.transpose(0, 1), c.transpose(0, 1), options);
    return;
  }
  ArenaScope scope(context.scratch());
  const TensorView a32 = in_f32(context, a);
  const std::int64_t width = std::max<std::int64_t>(512, kPanelElements / std::max(a.size(0), a.size(1)) / 512 * 512);
  for (std::int64_t begin = 0; begin < b.size(1); begin += width) {
    const std::int64_t end = std::min(b.size(1), begin + width);
    ArenaScope panel(context.scratch());
    const TensorView b32 = in_f32(context, b.slice(1, begin, end));
    const TensorView c_panel = c.slice(1, begin, end);
    TensorView c32 = c_panel;
    if (c.dtype != DType::f32) {
      c32 = context.scratch().tensor(c_panel.shape, DType::f32, "matmul: result in f32");
      if (options.accumulate) elementwise::convert(context, c_panel, c32);
    }
    Options panel_options = options;
    if (options.bias) panel_options.bias = options.bias.slice(0, begin, end);
    run_tiles(context, a32, b32, c32, panel_options);
    if (c.dtype != DType::f32) elementwise::convert(context, c32, c_panel);
    if (context.planning()) return;  // the first panel is the largest
  }
}

bool has_bf16_instructions() {
  static const bool has = dnnl::get_effective_cpu_isa() >= dnnl::cpu_isa::avx512_core_bf16;
  return has;
}

Support supports_shape(const Problem& problem) {
  if (problem.k == 0) return Support::no("K is 0");
  if (!problem.c_rows_contiguous && problem.has_bias) return Support::no("a bias needs c's rows contiguous");
  return Support::yes();
}

}  // namespace

const Implementation kOneDNN{"onednn", Device::Kind::cpu,
                             [](const Problem& problem, const Architecture&) {
                               if (problem.a != problem.b) return Support::no("a and b differ in dtype");
                               if (problem.a == DType::bf16 && !has_bf16_instructions())
                                 return Support::no("the processor has no bf16");
                               const Support dtypes = supports_f32_and_bf16({problem.a, problem.b, problem.c});
                               return dtypes ? supports_shape(problem) : dtypes;
                             },
                             run_onednn, true};

const Implementation kConverted{"onednn_converted", Device::Kind::cpu,
                                [](const Problem& problem, const Architecture&) {
                                  const Support dtypes = supports_f32_and_bf16({problem.a, problem.b, problem.c});
                                  return dtypes ? supports_shape(problem) : dtypes;
                                },
                                run_converted};

}  // namespace flashgla::ops::matmul
