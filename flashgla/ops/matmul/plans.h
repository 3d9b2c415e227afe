// The plans of products on a CUDA queue: which of cuBLASLt's algorithms each uses. A plan is made when a product is
// first asked for, in a dry run already, with the library's first choice or one taken over from elsewhere; it changes
// only in time_plans and import_plans, so that steps between give the same bits. All of this does nothing on the CPU.
//
// Notices are lines for the user about what did not stop anything.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "flashgla/base/context.h"

namespace flashgla::ops::matmul {

using Notices = std::vector<std::string>;

// Times cuBLASLt's candidates for every product asked for so far that has not been timed, on noise, and takes the
// fastest: about a tenth of a second a product. `memory`: any contiguous tensor on the device, which is overwritten,
// such as an arena's block before the first step; absent, memory is taken for the time of the call. A product whose
// operands do not fit keeps what it has. Not between steps that must give the same bits, nor after a capture.
// most_rows: products with more rows are left as they are.
Notices time_plans(Context& context, const TensorView& memory = {},
                   std::int64_t most_rows = std::numeric_limits<std::int64_t>::max());

// What computes products on the context's device, as "cuBLASLt 130100 on NVIDIA H200 with 132 multiprocessors"; empty
// on the CPU. Throws Error where that library is not found.
std::string library_of(Context& context);

// All that is known of the products asked for so far, for another run on such a device to compute the same bits.
std::string export_plans(Context& context);

// Takes plans over, before the dry run or after it. Those of another device or library version say nothing here: a
// notice tells that results may differ in their last bits. Throws Error when the text is damaged.
Notices import_plans(Context& context, std::string_view text);

// The user's cache: $XDG_CACHE_HOME/flashgla, or ~/.cache/flashgla; empty where there is neither.
std::string plan_cache_folder();
// A file of the folder that is named by library and device. One that is damaged or cannot be read is ignored with a
// notice. Saving keeps what others have put there since, and takes it over for products that were timed here too: call
// it before the first product whose bits matter.
Notices load_plan_cache(Context& context, const std::string& folder);
Notices save_plan_cache(Context& context, const std::string& folder);

}  // namespace flashgla::ops::matmul
