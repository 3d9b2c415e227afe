// Flags of the verbs that run a model: which of a run's checkpoints, in what dtype, where.
#pragma once

#include <string>

#include "flashgla/base/context.h"
#include "flashgla/model/checkpoint.h"

namespace CLI {
class App;
}

namespace flashgla::cli {

struct ModelFlags {
  std::string checkpoint = "latest";
  std::string dtype;  // empty: as stored
  bool map = false;   // matrices stay in the file
  std::string device = "auto";
  int threads = 0;  // 0: all

  // --checkpoint, --dtype, --mmap, --device, --threads
  void add_to(CLI::App& verb);
  Device chosen_device() const;  // of --device; auto: what this machine has
  model::LoadOptions load_options(Device device) const;
};

}  // namespace flashgla::cli
