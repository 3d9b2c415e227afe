#!/usr/bin/env python3
"""Times peers of gated_linear_attention on one GPU, for `flashgla bench gated_linear_attention --device cuda --peer`.

Reads the bench's rows as JSON from standard input and prints rows of the same form: PyTorch's causal softmax attention
at equal width (cuDNN's and FlashAttention's kernels) for every problem, and with --fla also flash-linear-attention's
chunk and fused_chunk functions for the same gates (pip install fla-core); with --unaware GLA as PyTorch code: its chunk
form, whose every intermediate goes to memory, and the recurrence, which writes every state. Inputs are drawn as the
bench's are: q, k, v and output gradients normal, gates logsigmoid(normal) / 16. Device events, median, cold cache. FLA
tunes itself for minutes on each new shape: --only and --fla take a TEXT that a problem must contain.

  flashgla bench gated_linear_attention --device cuda --peer "python3 scripts/torch_peers.py --only 'B32 ' --fla 'B32 '"
"""
import argparse
import json
import re
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = "cuda"
FORWARD = "gated_linear_attention forward"
BOTH = "gated_linear_attention fwd+bwd"
PROBLEM = re.compile(r"B(\d+) T(\d+) H(\d+) K(\d+) V(\d+) bf16 (\w+) gate(?:, chunk_materialized)?$")


def median_milliseconds(run, seconds, flush):
    """As the bench: cold cache, several runs queued at a time, the first round not counted."""
    times = []
    for round_number in range(1000):
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(5)]
        for start, stop in events:
            flush.zero_()
            start.record()
            run()
            stop.record()
        torch.cuda.synchronize()
        if round_number:
            times += [start.elapsed_time(stop) for start, stop in events]
        if times and sum(times) > 1e3 * seconds:
            break
    return statistics.median(times)


def extra_memory(run):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def time_call(name, problem, call, leaves, gradient, arguments, flush):
    """Yields the rows of forward and of forward + backward of call()."""

    def both():
        call().backward(gradient)

    def forget():
        for leaf in leaves:
            leaf.grad = None

    def both_and_forget():
        both()
        forget()

    with torch.no_grad():
        call()
        row = {"operation": FORWARD, "implementation": name, "problem": problem, "memory_bytes": extra_memory(call),
               "milliseconds": median_milliseconds(call, arguments.seconds, flush)}
    yield row
    both_and_forget()
    memory = extra_memory(both)
    forget()
    yield {"operation": BOTH, "implementation": name, "problem": problem, "memory_bytes": memory,
           "milliseconds": median_milliseconds(both_and_forget, arguments.seconds, flush)}


def normal(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def softmax_rows(problem, B, T, H, K, V, arguments, flush):
    """Attention as wide as q and k are: heads of 64 or 128 channels, as many as that makes."""
    d = 64 if K <= 64 else 128
    heads = max(H * max(K, V) // d, 1)
    q, k, v = (normal(B, heads, T, d).requires_grad_() for _ in range(3))
    gradient = normal(B, heads, T, d)
    for name, backend in (("softmax_cudnn", SDPBackend.CUDNN_ATTENTION), ("softmax_flash", SDPBackend.FLASH_ATTENTION)):

        def call(backend=backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        for row in time_call(name, problem, call, (q, k, v), gradient, arguments, flush):
            # Another operator: its FLOPs (causal: half of the square) and its bytes.
            square = 2.0 * B * heads * T * T * d
            tensor = 2.0 * B * heads * T * d
            forward = row["operation"] == FORWARD
            row["flops"] = square * (1.0 if forward else 3.5)
            row["bytes"] = tensor * (4 if forward else 12)
            yield row


def fla_rows(problem, B, T, H, K, V, gate, arguments, flush):
    from fla.ops import gla, linear_attn, retention, simple_gla

    q, k = (normal(B, T, H, K).requires_grad_() for _ in range(2))
    v, gradient = normal(B, T, H, V).requires_grad_(), normal(B, T, H, V)
    g, options = None, {}
    if gate == "key":
        functions = {"fla_chunk": gla.chunk_gla}
        g = (F.logsigmoid(torch.randn(B, T, H, K, device=DEVICE)) / 16).to(torch.bfloat16).requires_grad_()
    elif gate == "scalar":
        functions = {"fla_chunk": simple_gla.chunk_simple_gla, "fla_fused_chunk": simple_gla.fused_chunk_simple_gla}
        g = (F.logsigmoid(torch.randn(B, T, H, device=DEVICE)) / 16).requires_grad_()
    elif gate == "constant":
        functions = {"fla_chunk": retention.chunk_retention, "fla_fused_chunk": retention.fused_chunk_retention}
    else:
        functions = {"fla_chunk": linear_attn.chunk_linear_attn, "fla_fused_chunk": linear_attn.fused_chunk_linear_attn}
        options = {"normalize": False}
    if g is not None:
        options = {"g": g}
    leaves = [x for x in (q, k, v, g) if x is not None]
    for name, function in functions.items():

        def call(function=function):
            return function(q, k, v, **options)[0]

        try:
            yield from time_call(name, problem, call, leaves, gradient, arguments, flush)
        except Exception as error:  # such as simple GLA's backward, which refuses some Tritons on Hopper
            print(f"torch_peers: {name}, {problem}: {error}", file=sys.stderr)


def chunks_in_torch(q, k, v, g=None, chunk=64):
    """The chunk form (the paper's equations 4 and 5) of key gates or none, in bf16 but for states and sums of gates."""
    B, T, H, K = q.shape

    def in_chunks(x):  # [B, chunks, H, chunk, .]
        return x.view(B, T // chunk, chunk, H, -1).transpose(2, 3)

    q, k, v, queries, decays = in_chunks(q), in_chunks(k), in_chunks(v), K ** -0.5, None
    inside = at_end = k
    if g is not None:
        reached = in_chunks(g).float().cumsum(-2)
        end = reached[..., -1:, :]
        queries = (reached.exp() * K ** -0.5).to(q.dtype)
        inside, at_end = k * (-reached).exp().to(k.dtype), k * (end - reached).exp().to(k.dtype)
        decays = end.exp().transpose(-1, -2)
    added = at_end.transpose(-1, -2) @ v
    state, states = torch.zeros_like(added[:, 0], dtype=torch.float32), []
    for i in range(added.shape[1]):
        states.append(state.to(q.dtype))
        state = added[:, i] + (state if decays is None else decays[:, i] * state)
    gated = q * queries
    o = gated @ torch.stack(states, 1) + (gated @ inside.transpose(-1, -2)).tril() @ v
    return o.transpose(2, 3).reshape(B, T, H, -1)


def recurrence_in_torch(q, k, v, g=None):
    state, states = torch.zeros(*k[:, 0].shape, v.shape[-1], device=DEVICE), []
    for t in range(q.shape[1]):
        decayed = state if g is None else g[:, t].float().exp()[..., None] * state
        state = decayed + k[:, t, ..., None] * v[:, t, :, None]
        states.append(state)
    return torch.einsum("bthk,bthkv->bthv", q * q.shape[-1] ** -0.5, torch.stack(states, 1).to(q.dtype))


def unaware_rows(problem, B, T, H, K, V, gate, arguments, flush):
    q, k = (normal(B, T, H, K).requires_grad_() for _ in range(2))
    v, gradient = normal(B, T, H, V).requires_grad_(), normal(B, T, H, V)
    leaves = [q, k, v]
    if gate == "key":
        leaves += [(F.logsigmoid(torch.randn(B, T, H, K, device=DEVICE)) / 16).to(torch.bfloat16).requires_grad_()]
    for name, function in (("torch_chunks", chunks_in_torch), ("torch_recurrence", recurrence_in_torch)):
        if name == "torch_recurrence" and T > 2048:
            continue  # every state and its gradient: 8 x 2048 tokens of 4 heads of 128 x 256 are 9 GB each

        def call(function=function):
            return function(*leaves)

        yield from time_call(name, problem, call, leaves, gradient, arguments, flush)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fla", metavar="TEXT", help="time flash-linear-attention on problems that contain TEXT")
    parser.add_argument("--unaware", metavar="TEXT", help="time PyTorch code on problems that contain TEXT")
    parser.add_argument("--only", metavar="TEXT", default="", help="time softmax on problems that contain TEXT")
    parser.add_argument("--seconds", type=float, default=0.1, help="time spent on each figure")
    arguments = parser.parse_args()
    problems = []
    for row in json.load(sys.stdin):
        if row["operation"] == FORWARD and row["problem"] not in problems and PROBLEM.match(row["problem"]):
            problems.append(row["problem"])
    torch.manual_seed(0)
    flush = torch.empty(256 << 20, device=DEVICE, dtype=torch.uint8)
    rows, seen = [], set()
    for problem in problems:
        *sizes, gate = PROBLEM.match(problem).groups()
        sizes = [int(size) for size in sizes]
        try:  # rows are taken one by one: those before an error stay
            if arguments.only in problem and tuple(sizes) not in seen:
                seen.add(tuple(sizes))
                for row in softmax_rows(problem, *sizes, arguments, flush):
                    rows.append(row)
            if arguments.fla is not None and arguments.fla in problem:
                for row in fla_rows(problem, *sizes, gate, arguments, flush):
                    rows.append(row)
            if arguments.unaware is not None and arguments.unaware in problem and gate in ("key", "none"):
                for row in unaware_rows(problem, *sizes, gate, arguments, flush):
                    rows.append(row)
        except Exception as error:  # a peer that does not run this shape must not lose the others
            print(f"torch_peers: {problem}: {error}", file=sys.stderr)
        torch.cuda.empty_cache()
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
