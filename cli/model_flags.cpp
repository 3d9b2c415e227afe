#include "cli/model_flags.h"

#include <CLI/CLI.hpp>

#include "cli/checks.h"
#include "cli/devices.h"
#include "flashgla/base/names.h"

namespace flashgla::cli {

void ModelFlags::add_to(CLI::App& verb) {
  verb.add_option("--checkpoint", checkpoint, "Of a run: latest, best, or step-N as its folder is called")
      ->capture_default_str();
  verb.add_option("--dtype", dtype,
                  "Of the weights in memory: f32 or bf16 (default: as stored); on a GPU bf16 computes in bf16, too")
      ->check(floating_dtype());
  verb.add_flag("--mmap", map,
                "Leave the matrices in the mapped file: no memory beyond the system's cache of it. The file must not "
                "change meanwhile");
  verb.add_option("--device", device, "auto (a CUDA device where there is one), cpu or cuda[:N]")
      ->capture_default_str();
  verb.add_option("--threads", threads, "CPU threads; 0: all")->capture_default_str()->transform(thread_count());
}

Device ModelFlags::chosen_device() const { return cli::chosen_device(device); }

model::LoadOptions ModelFlags::load_options(Device device) const {
  model::LoadOptions options;
  options.device = device;
  options.map = map;
  options.threads = threads;
  if (!dtype.empty()) options.dtype = dtype_from_name(dtype);
  return options;
}

}  // namespace flashgla::cli
