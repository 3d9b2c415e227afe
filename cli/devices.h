// Which device a verb's --device means.
#pragma once

#include <string>

#include "flashgla/base/context.h"

namespace flashgla::cli {

// The device of that name. Where "auto" is the CPU for want of a usable driver, a line on standard error says so.
Device chosen_device(const std::string& name);

}  // namespace flashgla::cli
