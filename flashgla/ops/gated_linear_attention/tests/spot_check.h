// Correctness of a case that is too large for the reference as a whole: the float64 answer for parts of it.
#pragma once

#include <string>
#include <vector>

#include "flashgla/ops/gated_linear_attention/tests/cases.h"

namespace flashgla::ops::gated_linear_attention {

// The first and the last sequence, of packed ones the longest too, each of the first or the last head. Short sequences
// are taken whole. Of long ones the first
// tokens give o and dq, which depend on nothing later, and the last give dk and dv, which depend on nothing earlier
// (and on d_ht); dg, which depends on both, is compared where the gates have forgotten what lies before the part. A
// constant gate's gradient is one sum over everything and is left to the conformance tests.
class SpotCheck {
 public:
  // `host` on the CPU, kept alive by the caller. The reference runs here, once. part_elements: elements of the state
  // times tokens that it is asked for in one part; 2^27 take about a second of one thread.
  SpotCheck(const CaseData& host, bool gradients, std::int64_t part_elements = std::int64_t{1} << 27);

  // "" or what exceeds its tolerance; `error` becomes the largest relative error. Results on any device.
  std::string compare(const Results& results, bool gradients, double* error) const;

 private:
  struct Part {
    std::int64_t n, head;
    TokenRange tokens;        // of the sequence
    std::int64_t begin, end;  // of these the part's
    bool past, future;        // nothing earlier, nothing later is missing
    std::int64_t dg_begin;    // dg is compared from this token of the part on
    Results expected;
  };
  Problem problem_;
  std::vector<Part> parts_;
};

}  // namespace flashgla::ops::gated_linear_attention
