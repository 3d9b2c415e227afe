// Selection of an implementation from an operator's table: pure in (problem, architecture, forced name).
#pragma once

#include <span>
#include <string>

#include "flashgla/base/context.h"

namespace flashgla::ops {

// Whether an implementation can run a problem and, if not, why not.
struct Support {
  bool ok = true;
  std::string reason;

  static Support yes() { return {}; }
  static Support no(std::string reason) { return {false, std::move(reason)}; }
  explicit operator bool() const { return ok; }
};

// First row of the table (best first) that supports the problem; with `forced`, the row of that name or an Error.
// A forced name that no row of this table has is ignored: it means another operator's implementation.
// An implementation has: const char* name; Device::Kind device;
// Support (*supports)(const Problem&, const Architecture&).
// Throws Error that lists each implementation's reason when nothing fits.
template <class Implementation, class Problem>
const Implementation& select(const char* operation, std::span<const Implementation> table, const Problem& problem,
                             const Architecture& architecture, const std::string& forced) {
  std::string reasons;
  bool known = false;
  for (const Implementation& row : table) known = known || forced == row.name;
  for (const Implementation& row : table) {
    if (known && forced != row.name) continue;
    const Support support =
        row.device != architecture.device ? Support::no("runs on another device") : row.supports(problem, architecture);
    if (support) return row;
    reasons += std::string(reasons.empty() ? "" : "; ") + row.name + ": " + support.reason;
  }
  throw Error(std::string(operation) + ": no implementation fits (" + reasons + ")");
}

}  // namespace flashgla::ops
