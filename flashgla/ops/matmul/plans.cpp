#include "flashgla/ops/matmul/plans.h"

#include <cstdlib>

#ifdef FLASHGLA_CUDA
#include <algorithm>
#include <cctype>
#include <filesystem>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/base/memory.h"
#include "flashgla/ops/matmul/cuda/products.h"
#endif

namespace flashgla::ops::matmul {

std::string plan_cache_folder() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache == '/') return std::string(cache) + "/flashgla";
  const char* home = std::getenv("HOME");
  return home != nullptr && *home == '/' ? std::string(home) + "/.cache/flashgla" : std::string();
}

#ifdef FLASHGLA_CUDA

namespace {

bool on_cpu(const Context& context) { return context.device().kind == Device::Kind::cpu; }

cuda::Products& products_of(Context& context) { return context.queue().resource<cuda::Products>(); }

std::string cache_file(Context& context, const std::string& folder) {
  std::string name = products_of(context).choices().made_by;
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '-';
  }
  return folder + "/" + name + ".products";
}

}  // namespace

Notices time_plans(Context& context, const TensorView& memory, std::int64_t most_rows) {
  if (on_cpu(context)) return {};
  cuda::Products& products = products_of(context);
  const std::size_t needed = products.bytes_to_time(most_rows);
  if (needed == 0) return {};
  int left_out = 0;
  if (memory) {
    left_out = products.time_all(memory.data, memory.bytes(), most_rows);
  } else {
    left_out = products.time_all(allocate_memory(needed, context.device()).get(), needed, most_rows);
  }
  if (left_out == 0) return {};
  return {std::to_string(left_out) + " matrix products keep cuBLASLt's first choice: timing them takes " +
          std::to_string(needed) + " bytes"};
}

std::string library_of(Context& context) {
  return on_cpu(context) ? std::string() : products_of(context).choices().made_by;
}

std::string export_plans(Context& context) {
  return on_cpu(context) ? std::string() : to_text(products_of(context).choices());
}

Notices import_plans(Context& context, std::string_view text) {
  if (on_cpu(context)) return {};
  const Choices choices = choices_from_text(text);
  cuda::Products& products = products_of(context);
  const std::string& here = products.choices().made_by;
  if (choices.made_by != here) {
    return {"matrix products were planned by " + choices.made_by + ", and here is " + here +
            ": results may differ in their last bits"};
  }
  products.adopt(choices);
  return {};
}

Notices load_plan_cache(Context& context, const std::string& folder) {
  if (on_cpu(context) || folder.empty()) return {};
  const std::string path = cache_file(context, folder);
  if (!std::filesystem::exists(path)) return {};
  try {
    return import_plans(context, read_file(path));
  } catch (const Error& error) {
    return {path + " is ignored: " + error.what()};
  }
}

Notices save_plan_cache(Context& context, const std::string& folder) {
  if (on_cpu(context) || folder.empty()) return {};
  cuda::Products& products = products_of(context);
  try {
    std::filesystem::create_directories(folder);
    const Choices all = add_to_file(cache_file(context, folder), products.choices());
    Choices of_others;  // of what this context has timed, and another program before it
    of_others.made_by = all.made_by;
    for (const auto& [product, choice] : products.choices().by_product) {
      const auto kept = all.by_product.find(product);
      if (products.timed_here(product) && kept != all.by_product.end() && !(kept->second == choice)) {
        of_others.by_product.insert(*kept);
      }
    }
    products.adopt(of_others);
  } catch (const std::exception& error) {  // the system's or ours: a cache need not be there
    return {"matrix products' plans are not kept: " + std::string(error.what())};
  }
  return {};
}

#else

Notices time_plans(Context&, const TensorView&, std::int64_t) { return {}; }
std::string library_of(Context&) { return {}; }
std::string export_plans(Context&) { return {}; }
Notices import_plans(Context&, std::string_view) { return {}; }
Notices load_plan_cache(Context&, const std::string&) { return {}; }
Notices save_plan_cache(Context&, const std::string&) { return {}; }

#endif

}  // namespace flashgla::ops::matmul
