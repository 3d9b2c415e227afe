#!/usr/bin/env bash
# Table 3 of the paper's conference version: recall from real texts (FDA, SWDE, SQuAD), by lm-evaluation-harness with
# flashgla's models.
#   table3.sh MODEL OUT [cpu|cuda] [LIMIT]
# As table1.sh. The harness calls these tasks fda, swde and squad_completion.
set -euo pipefail
# shellcheck source=harness.sh
. "$(dirname "$0")/harness.sh"
run fda,swde,squad_completion 0
