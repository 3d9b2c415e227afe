"""Checks what flashgla.torch tells PyTorch's compiler: python torch_compile_check.py. Needs PyTorch and an installed
flashgla (or PYTHONPATH). Prints a line a check; exit code 1 when one fails."""

from __future__ import annotations

import sys
import traceback

import torch

import flashgla


def check_many_sequences():
    """Compiled for all lengths, a call of many sequences keeps on the CPU what the graph has room for."""
    compiled = torch.compile(flashgla.gated_linear_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((3, 300), (40, 300), (150, 70)):
        leaves = [torch.randn(batch, length, 1, 8).requires_grad_() for _ in range(3)]
        gradients = [torch.autograd.grad(f(*leaves)[0].sum(), leaves)
                     for f in (flashgla.gated_linear_attention, compiled)]
        assert all(torch.equal(a, b) for a, b in zip(*gradients)), (batch, length)


def main() -> int:
    failed = 0
    for name, check in list(globals().items()):
        if not name.startswith("check_"):
            continue
        try:
            check()
            print(f"ok      {name[6:]}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {name[6:]}\n{traceback.format_exc()}", flush=True)
    print(f"PyTorch {torch.__version__}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
