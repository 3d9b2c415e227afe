#!/usr/bin/env bash
# Figure 2 of the paper, and of its first version with that one's Table 3: speed and memory of the operator on one GPU,
# by length.
#   figure2.sh OUT [--seconds S]
# Forward and backward, bf16, a batch of 32, with chunks' states kept and recomputed: linear attention without a gate in
# 16 heads of 64 channels, as in the paper, and GLA of 4 heads of 128 and 256 channels, as in its first version, also
# token by token and in parallel (quadratic) form; and in PyTorch, which must be there with CUDA: softmax attention of
# cuDNN and FlashAttention, the chunk form and the recurrence that go through memory. OUT/paper.json and OUT/first.json
# have the rows; figure2.py writes them into docs/PAPER.md and draws them. Where CUPTI is (kernel_times.sh),
# OUT/kernels-LENGTH.txt has the time of each kernel of GLA with states kept. What is measured already is not measured
# again.
set -euo pipefail
. "$(dirname "$0")/program.sh"
if [ $# -lt 1 ] || [[ $1 == -* ]]; then usage; fi
out=$1 seconds=0.1
shift
take_options 'seconds' "$@"
need_program
mkdir -p "$out"
problem='B32 T'
rows() {  # NAME PROBLEMS
  [ ! -f "$out/$1.json" ] || return 0
  "$flashgla" bench gated_linear_attention --sweep --device cuda --only "$2" --implementation cuda_sm90 \
    --seconds "$seconds" --save "$out/$1.partial" \
    --peer "python3 $root/scripts/torch_peers.py --only '$problem' --unaware '$problem' --seconds $seconds"
  mv "$out/$1.partial" "$out/$1.json"
}
rows paper ' H16 K64 V64 bf16 none gate, '
rows first ' H4 K128 V256 bf16 key gate, '
times=$root/scripts/kernel_times/kernel_times.sh
"$times" --where >/dev/null 2>&1 || exit 0
for length in 1024 2048 4096 8192; do
  [ ! -f "$out/kernels-$length.txt" ] || continue
  "$times" "$out/kernels-$length.partial" "$flashgla" bench gated_linear_attention --sweep --device cuda \
    --only "B32 T$length H4 K128 V256 bf16 key gate, chunk_materialized" --implementation cuda_sm90 --seconds 0.02 \
    >/dev/null
  mv "$out/kernels-$length.partial" "$out/kernels-$length.txt"
done
