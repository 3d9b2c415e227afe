"""What torch_check.py's checks share, tensors drawn for them on `device` and comparisons, and how checks are run."""

from __future__ import annotations

import traceback

import torch
from recurrence import error

TOLERANCE = {torch.float64: 5e-12, torch.float32: 1e-5, torch.float16: 6.4e-4, torch.bfloat16: 5e-3}
GATES = ["none", "constant", "scalar", "key", "value", "key_value"]
device = "cpu"  # torch_check.py sets it


def inputs(gate="key", dtype=torch.float32, batch=2, length=70, heads=4, groups=2, key_dim=16, value_dim=32, seed=0,
           gradients=False):
    """[q, k, v, g, gv], drawn anew for each seed."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    q, k, v = normal(batch, length, heads, key_dim), normal(batch, length, groups, key_dim), normal(
        batch, length, groups, value_dim)
    shapes = {"constant": (groups,), "scalar": (batch, length, groups), "key": k.shape, "key_value": k.shape}
    g = -normal(*shapes[gate]).abs() / 4 if gate in shapes else None
    gv = -normal(*v.shape).abs() / 4 if gate in ("value", "key_value") else None
    result = []
    for x in (q, k, v, g, gv):
        constant = x is not None and x.dim() == 1 and dtype != torch.float64
        x = x if x is None else x.to(device, torch.float32 if constant else dtype)
        result.append(x.requires_grad_() if gradients and x is not None else x)
    return result


def normal(*shape, dtype=torch.float32, seed=9):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def cu_seqlens(*ends, dtype=torch.int32):
    return torch.tensor([0, *ends], dtype=dtype, device=device)


def close(actual, expected, tolerance, what=""):
    assert actual is not None, f"{what} is None"
    wrong = error(actual, expected)
    assert wrong <= tolerance, f"{what}: error {wrong:.2e}, tolerance {tolerance:.2e}"


def gradients_close(outputs, expected, leaves, tolerance):
    """Outputs, and the gradients of random linear functions of them, as those of the recurrence."""
    weights = [normal(*x.shape, dtype=torch.float64, seed=20 + i) for i, x in enumerate(expected)]
    names = ["o", "ht", "zt"]
    for name, actual, wanted in zip(names, outputs, expected):
        close(actual, wanted, tolerance, name)
    sums = [sum((x.double() * w).sum() for x, w in zip(group, weights)) for group in (outputs, expected)]
    actual, wanted = (torch.autograd.grad(x, leaves, retain_graph=True) for x in sums)
    for i, (mine, theirs) in enumerate(zip(actual, wanted)):
        assert mine.dtype == leaves[i].dtype
        close(mine, theirs, 2 * tolerance, f"gradient {i}")


def run_checks(module, only="", only_on=None):
    """Calls a module's functions named check_... that hold `only` and prints a line each; those of `only_on` on its
    device alone. Returns the exit code."""
    failed = 0
    for name, check in list(module.items()):
        if not name.startswith("check_") or only not in name:
            continue
        wanted = (only_on or {}).get(check, device)
        if wanted != device:
            print(f"-       {name[6:]} ({wanted} only)")
            continue
        try:
            check()
            print(f"ok      {name[6:]}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {name[6:]}\n{traceback.format_exc()}", flush=True)
    print(f"PyTorch {torch.__version__} on {device}: {failed} failed")
    return 1 if failed else 0
