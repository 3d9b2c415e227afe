"""The host's time for a call from PyTorch, beside PyTorch's own attention: python host_time.py [--device cpu|cuda]

Needs PyTorch and an installed flashgla. Problems are so small that the device waits for the host: one sequence of 128
tokens, 4 heads of 64 channels, bfloat16 (on a CPU one token of 16 channels in float32, by one thread). Prints
microseconds a call, forward without gradients and forward with backward, the least of five rounds in turns, and their
ratio to those of torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import flashgla

CALLS, ROUNDS = 500, 5


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return flashgla.gated_linear_attention(q, k, v, g)[0]


def microseconds(call: Callable[[], object], device: str) -> float:
    for _ in range(20):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    taken = time.perf_counter() - started
    if device == "cuda":
        torch.cuda.synchronize()
    return taken / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    torch.set_num_threads(1)
    shape, dtype = ((1, 128, 4, 64), torch.bfloat16) if device == "cuda" else ((1, 1, 1, 16), torch.float32)
    tensors = [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]
    tensors[3] = torch.nn.functional.logsigmoid(tensors[3]) / 16
    leaves = [x.clone().requires_grad_() for x in tensors]
    d_o = torch.randn(shape, device=device, dtype=dtype)
    calls = {}
    for name, function, count in (("flashgla", operator, 4), ("attention", attention, 3)):
        calls[name, "forward"] = lambda f=function: f(*tensors)
        calls[name, "forward + backward"] = lambda f=function, n=count: torch.autograd.grad(f(*leaves), leaves[:n], d_o)
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for key, call in calls.items():
            least[key] = min(least[key], microseconds(call, device))
    place = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{place}, PyTorch {torch.__version__}: microseconds a call")
    for what in ("forward", "forward + backward"):
        ours, theirs = least["flashgla", what], least["attention", what]
        print(f"{what:19} flashgla {ours:6.1f}   attention {theirs:6.1f}   ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
