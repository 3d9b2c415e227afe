#include "bench/kernel_times.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "flashgla/base/error.h"
#include "flashgla/mixers/gla/config.h"

#ifdef FLASHGLA_CUPTI
#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>
#endif

namespace flashgla::bench {

namespace {
constexpr const char* kProducts = "matrix products";
}  // namespace

#ifdef FLASHGLA_CUPTI

namespace {

// The functions of CUPTI, by name, so that a program that counts nothing starts without the library.
class Cupti {
 public:
  static const Cupti& get() {
    static const Cupti loaded;
    return loaded;
  }

  decltype(&::cuptiActivityRegisterCallbacks) register_callbacks;
  decltype(&::cuptiActivityEnable) enable;
  decltype(&::cuptiActivityDisable) disable;
  decltype(&::cuptiActivityFlushAll) flush;
  decltype(&::cuptiActivityGetNextRecord) next_record;

 private:
  Cupti() {
    const std::string name = "libcupti.so." + std::to_string(CUDA_VERSION / 1000);
    void* library = nullptr;
    for (const std::string& folder : {std::string(), std::string(FLASHGLA_CUPTI "/")}) {
      if (library == nullptr) library = ::dlopen((folder + name).c_str(), RTLD_NOW);
    }
    if (library == nullptr) {
      throw Error("bench: --kernels needs " + name +
                  ", which comes with the CUDA toolkit; put its folder into LD_LIBRARY_PATH");
    }
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, symbol));
      if (function == nullptr) throw Error("bench: " + name + " has no " + symbol);
    };
    find(register_callbacks, "cuptiActivityRegisterCallbacks");
    find(enable, "cuptiActivityEnable");
    find(disable, "cuptiActivityDisable");
    find(flush, "cuptiActivityFlushAll");
    find(next_record, "cuptiActivityGetNextRecord");
  }
};

struct Record {
  std::string name;  // as the compiler mangles it
  std::uint64_t begin, end;
};

// What CUPTI's thread hands over.
struct Records {
  std::mutex mutex;
  std::vector<Record> all;
};
Records& records() {
  static Records kept;
  return kept;
}

void give_buffer(std::uint8_t** buffer, std::size_t* bytes, std::size_t* most) {
  *bytes = std::size_t{8} << 20;
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, *bytes));
  *most = 0;
}

void take_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid) {
  Records& to = records();
  const std::lock_guard lock(to.mutex);
  CUpti_Activity* record = nullptr;
  while (Cupti::get().next_record(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      // The fields that are read lie where they are in every later version of the record.
      const auto& kernel = *reinterpret_cast<CUpti_ActivityKernel9*>(record);
      to.all.push_back({kernel.name, kernel.start, kernel.end});
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto& copy = *reinterpret_cast<CUpti_ActivityMemcpy5*>(record);
      to.all.push_back({"copies", copy.start, copy.end});
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto& set = *reinterpret_cast<CUpti_ActivityMemset4*>(record);
      to.all.push_back({"copies", set.start, set.end});
    }
  }
  std::free(buffer);
}

// What a kernel belongs to.
std::string operator_of(const std::string& mangled) {
  int status = 0;
  char* const demangled = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  const std::string name = status == 0 ? demangled : mangled;
  std::free(demangled);
  constexpr std::string_view kOps = "flashgla::ops::";
  for (std::size_t at = name.find(kOps); at != std::string::npos; at = name.find(kOps, at)) {
    at += kOps.size();
    const std::string found = name.substr(at, name.find("::", at) - at);
    if (found != "cuda") return found == "matmul" ? kProducts : found;
  }
  if (name == "copies") return name;
  if (name.find("reduce_partial_sums") != std::string::npos) return "sums over rows";
  for (const char* part : {"nvjet", "gemm", "gemv", "cutlass", "splitK", "cublas"}) {
    if (name.find(part) != std::string::npos) return kProducts;
  }
  return "other";
}

}  // namespace

void require_kernel_times(Device device) {
  if (device.kind != Device::Kind::cuda) throw Error("bench: --kernels counts a GPU's kernels; expected --device cuda");
  Cupti::get();
}

std::vector<testing::OperatorTime> operator_times(const Context& context, const std::function<void()>& run, int steps) {
  const Cupti& cupti = Cupti::get();
  constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                           CUPTI_ACTIVITY_KIND_MEMSET};
  context.queue().synchronize();
  cupti.register_callbacks(give_buffer, take_buffer);
  for (const CUpti_ActivityKind kind : kKinds) {
    if (cupti.enable(kind) != CUPTI_SUCCESS) {
      throw Error("bench: CUPTI may not count kernels here (another profiler, or its driver's settings)");
    }
  }
  run();
  context.queue().synchronize();
  cupti.flush(1);
  for (const CUpti_ActivityKind kind : kKinds) cupti.disable(kind);
  const std::lock_guard lock(records().mutex);
  std::vector<Record> all = std::exchange(records().all, {});
  if (all.empty()) throw Error("bench: CUPTI counted no kernel");
  std::sort(all.begin(), all.end(), [](const Record& a, const Record& b) { return a.end < b.end; });
  std::map<std::string, testing::OperatorTime> sums;
  std::uint64_t until = 0;
  for (const Record& record : all) {
    testing::OperatorTime& sum = sums[operator_of(record.name)];
    const std::uint64_t begin = std::max(record.begin, until);
    if (record.end > begin) sum.milliseconds += static_cast<double>(record.end - begin) * 1e-6 / steps;
    sum.launches += 1.0 / steps;
    until = std::max(until, record.end);
  }
  std::vector<testing::OperatorTime> operators;
  for (auto& [name, sum] : sums) {
    sum.name = name;
    operators.push_back(sum);
  }
  std::sort(operators.begin(), operators.end(),
            [](const auto& a, const auto& b) { return a.milliseconds > b.milliseconds; });
  return operators;
}

#else

void require_kernel_times(Device) {
  throw Error("bench: --kernels needs a build for CUDA that finds CUPTI's cupti.h, which comes with the CUDA toolkit");
}

std::vector<testing::OperatorTime> operator_times(const Context& context, const std::function<void()>&, int) {
  require_kernel_times(context.device());
  return {};
}

#endif

void add_floors(std::vector<testing::OperatorTime>& operators, const model::ModelConfig& config, Step step,
                std::int64_t tokens, double state_bytes) {
  struct Floor {
    double flops, bytes;
  };
  const auto of_all = static_cast<double>(tokens);
  const auto width = static_cast<double>(config.hidden_size), words = static_cast<double>(config.vocab_size);
  const auto layers = static_cast<double>(config.num_hidden_layers), between = static_cast<double>(config.mlp_dim());
  std::map<std::string, Floor> floors;
  // Elements of matrices that multiply activations, and of all.
  const auto parameters = static_cast<double>(model::parameter_count(config));
  const double multiplied = parameters - (config.tie_word_embeddings ? 0.0 : width * words);
  const auto of_channels = [&](double channels) { return Floor{0.0, 2.0 * of_all * layers * channels}; };
  const auto* gla = dynamic_cast<const mixers::GlaConfig*>(config.mixer.operator->());
  if (gla == nullptr) return;
  const double keys = gla->expand_k * width, values = gla->expand_v * width;
  switch (step) {
    case Step::training:
      floors[kProducts] = {6.0 * of_all * multiplied, 0.0};
      // q, k, v, gates read and o written; these and do read, dq, dk, dv, dg written.
      floors["gated_linear_attention"] = of_channels(9.0 * keys + 5.0 * values);
      floors["swiglu"] = of_channels(9.0 * between);        // backward with the output again
      floors["rms_norm"] = of_channels(2.0 * 6.0 * width);  // two a block; backward x and dy read, dx added to
      floors["rms_norm_swish_gate"] = of_channels(8.0 * values);
      floors["log_sigmoid_gate"] = of_channels(5.0 * keys);
      floors["adamw"] = {0.0, parameters * (4.0 + 3.0 * 8.0 + 2.0)};
      floors["global_norm"] = {0.0, parameters * 4.0};
      floors["cross_entropy"] = {0.0, 2.0 * 2.0 * of_all * words};
      break;
    case Step::prompt:
      floors[kProducts] = {2.0 * of_all * (multiplied - width * words), 0.0};  // of the head one row
      floors["gated_linear_attention"] = of_channels(3.0 * keys + 2.0 * values);
      floors["swiglu"] = of_channels(3.0 * between);
      floors["rms_norm"] = of_channels(2.0 * 2.0 * width);
      floors["rms_norm_swish_gate"] = of_channels(3.0 * values);
      floors["log_sigmoid_gate"] = of_channels(2.0 * keys);
      break;
    case Step::token:
      floors["linear_step"] = {0.0, 2.0 * multiplied};
      floors["gated_linear_attention"] = {0.0, state_bytes};
      break;
  }
  for (testing::OperatorTime& each : operators) {
    const auto found = floors.find(each.name);
    if (found != floors.end()) each.flops = found->second.flops, each.bytes = found->second.bytes;
  }
}

}  // namespace flashgla::bench
