#!/usr/bin/env python3
"""Times whole models of other libraries, for `flashgla bench model_training_step model_prefill model_decoding --peer`.

Reads the bench's rows as JSON from standard input and prints rows of the same form, of the same problems: transformers'
LLaMA beside our Transformer, flash-linear-attention's GLA and RetNet beside ours (on a GPU; pip install transformers
flash-linear-attention). Sizes are those of the presets, weights and tokens random, weights of the problem's dtype.

A training step is forward, backward, clipping at 1 and fused AdamW, whose moments are of the weights' dtype, where ours
keeps f32 masters and moments beside bf16: names say so. LLaMA is compiled, which takes a minute; its attention is
PyTorch's. A prompt is a call with a new cache that gives the last token's logits; decoding is calls with the cache, a
token a sequence, drawn by argmax, and for LLaMA also with a static cache and a compiled step. Medians of runs queued
behind one another. What fails, such as for want of memory, says so on standard error and leaves the others.

  flashgla bench model_training_step model_prefill model_decoding --device cuda --peer "python3 scripts/model_peers.py"
  flashgla bench model_training_step --threads 2 --peer "python3 scripts/model_peers.py --device cpu --threads 2"
"""
import argparse
import gc
import importlib.util
import inspect
import json
import math
import os
import re
import signal
import statistics
import sys
import time
from dataclasses import dataclass

import torch

# By the names in the bench's problems: what is built, and its sizes as its config calls them (`flashgla info PRESET`).
MODELS = {
    "transformer d256 8 layers": ("llama", dict(hidden_size=256, num_hidden_layers=8, num_attention_heads=4,
                                                intermediate_size=768, vocab_size=258, tie_word_embeddings=True)),
    "transformer-1.3b": ("llama", dict(hidden_size=2048, num_hidden_layers=24, num_attention_heads=32,
                                       intermediate_size=5632, vocab_size=32000, tie_word_embeddings=False)),
    "gla-small": ("gla", dict(hidden_size=256, num_hidden_layers=8, num_heads=4, intermediate_size=768, vocab_size=258,
                              tie_word_embeddings=True)),
    "gla-340m": ("gla", dict(hidden_size=1024, num_hidden_layers=24, num_heads=4, intermediate_size=2816,
                             vocab_size=32000, tie_word_embeddings=True)),
    "gla-1.3b": ("gla", dict(hidden_size=2048, num_hidden_layers=24, num_heads=4, intermediate_size=5632,
                             vocab_size=32000, tie_word_embeddings=False)),
    "retnet-1.3b": ("retnet", dict(hidden_size=2048, num_hidden_layers=24, num_heads=8, intermediate_size=2816,
                                   vocab_size=32000, tie_word_embeddings=False)),
}
LIBRARIES = {"llama": "transformers", "gla": "fla", "retnet": "fla"}
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
TRAINING, PREFILL, DECODING = "model_training_step", "model_prefill", "model_decoding"
PROBLEM = re.compile(r"(?:by \w+: )?(.+) (?:(\d+)x(\d+)(?: tokens)?|batch (\d+)) (bf16|f32)")

# Tokens that LLaMA's sequences have had before decoding is timed, as in bench/decoding.cpp; states that do not grow are
# the same after one.
BEFORE = {"llama": 2047}
WARM_UP, ROUND = 3, 5  # runs
TOKENS, ROUNDS = 8, 2  # of decoding: tokens a run, and no more rounds than that, so that caches stay about as long


@dataclass
class Case:
    operation: str
    problem: str
    kind: str
    sizes: dict
    sequences: int
    length: int  # tokens of each sequence
    dtype: str
    device: str

    def model(self, attention="sdpa"):
        from transformers import AutoModelForCausalLM, LlamaConfig

        options = {"dtype": DTYPES[self.dtype]}
        if self.kind == "llama":
            config = LlamaConfig(**self.sizes)
            options["attn_implementation"] = attention
        else:
            from fla.models import GLAConfig, RetNetConfig  # and makes them known to transformers

            config = {"gla": GLAConfig, "retnet": RetNetConfig}[self.kind](**self.sizes)
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, **options)

    def tokens(self):
        return torch.randint(0, self.sizes["vocab_size"], (self.sequences, self.length), device=self.device)


def cases(rows, device):
    """Of our rows: those whose model has a peer that runs on the device."""
    for row in rows:
        match = PROBLEM.fullmatch(row["problem"])
        if row["operation"] not in (TRAINING, PREFILL, DECODING) or not match or match[1] not in MODELS:
            continue
        kind, sizes = MODELS[match[1]]
        if device == "cuda" or kind == "llama":
            sequences, length = int(match[2] or match[4]), int(match[3] or BEFORE.get(kind, 1))
            yield Case(row["operation"], row["problem"], kind, sizes, sequences, length, match[5], device)


def unmasked_attention():
    """The name of transformers' "sdpa" without a mask, for which its attention is causal: while it is compiled, PyTorch
    before 2.14 has a mask made, with which FlashAttention is not taken."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_unmasked", sdpa_attention_forward)
    return "sdpa_unmasked"


def training_step(case, compiled):
    model = case.model(unmasked_attention()).train()
    loss_of = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = case.tokens()

    def run():
        loss_of(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


class Session:
    """A model with the cache of its sequences, and the last token of each."""

    def __init__(self, model):
        self.model, self.cache, self.token = model, None, None
        # It had the first name until transformers 5.40, and has it in flash-linear-attention.
        names = inspect.signature(model.forward).parameters
        self.name = "cache" if "cache" in names else "past_key_values"

    @torch.no_grad()
    def take(self, tokens):
        out = self.model(input_ids=tokens, **{self.name: self.cache}, use_cache=True, logits_to_keep=1)
        self.cache = getattr(out, self.name)
        self.token = out.logits[:, -1:].argmax(-1)


def prompt(case):
    session, tokens = Session(case.model().eval()), case.tokens()

    def run():
        session.cache = None
        session.take(tokens)

    return run


def decoding(case, static=False):
    session = Session(case.model().eval())
    if static:
        from transformers import StaticCache

        most = case.length + TOKENS * (WARM_UP + ROUND * ROUNDS)
        session.cache = StaticCache(config=session.model.config, max_cache_len=most)
    session.take(case.tokens())
    if static:
        session.model = torch.compile(session.model, mode="reduce-overhead", dynamic=False)

    def run():
        for _ in range(TOKENS):
            session.take(session.token)

    return run


def ways(case, eager):
    """Names and functions that give what is timed."""
    library = LIBRARIES[case.kind]
    if case.operation == TRAINING:
        compiled = case.kind == "llama" and not eager
        name = f"{library}_{'compiled' if compiled else 'eager'}"
        name += "_bf16_weights_and_moments" if case.dtype == "bf16" else ""
        yield name, lambda: training_step(case, compiled)
    elif case.operation == PREFILL:
        yield f"{library}_eager", lambda: prompt(case)
    else:
        yield f"{library}_eager", lambda: decoding(case)
        if case.kind == "llama" and not eager:
            yield f"{library}_static_cache_compiled", lambda: decoding(case, static=True)


def now(device):
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def median_milliseconds(run, device, seconds, rounds):
    """From the end of a run to that of the next, in rounds behind which the device is waited for."""
    times = []
    begin = time.perf_counter()
    while not times or (time.perf_counter() - begin < seconds and len(times) < ROUND * rounds):
        ends = [now(device)]
        for _ in range(ROUND):
            run()
            ends.append(now(device))
        if device == "cuda":
            torch.cuda.synchronize()
            times += [start.elapsed_time(end) for start, end in zip(ends, ends[1:])]
        else:
            times += [1e3 * (end - start) for start, end in zip(ends, ends[1:])]
    return statistics.median(times)


def row_of(case, name, make, seconds):
    run = make()
    for _ in range(WARM_UP):  # compiles, and tunes kernels
        run()
    if case.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    row = {"operation": case.operation, "implementation": name, "problem": case.problem}
    if case.operation == DECODING:
        row["milliseconds"] = median_milliseconds(run, case.device, seconds, ROUNDS) / TOKENS
    else:
        row["milliseconds"] = median_milliseconds(run, case.device, seconds, math.inf)
    if case.device == "cuda" and case.operation == TRAINING:  # as ours, whose other rows say nothing of it
        row["memory_bytes"] = torch.cuda.max_memory_allocated()
    return row


def say(text):
    print(f"model_peers: {text}", file=sys.stderr, flush=True)


def over_limit(_signal, _frame):
    raise TimeoutError("--limit is reached")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(default cuda)")
    parser.add_argument("--threads", type=int, help="of the CPU (default: as many as PyTorch takes)")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each figure (default 1)")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS",
                        help="for all together: what has no figure by then is given up (default: none)")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.limit
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no part of the answer
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    signal.signal(signal.SIGALRM, over_limit)
    rows, missing = [], set()
    for case in cases(json.load(sys.stdin), arguments.device):
        library = LIBRARIES[case.kind]
        if importlib.util.find_spec(library) is None:
            if library not in missing:
                say(f"without {library}, which is not installed")
            missing.add(library)
            continue
        for name, make in ways(case, arguments.eager):
            left = until - time.monotonic()
            if left <= 0:
                say(f"{name}, {case.problem}: no time left of --limit")
                continue
            try:
                signal.setitimer(signal.ITIMER_REAL, left if math.isfinite(left) else 0.0)
                rows.append(row_of(case, name, make, arguments.seconds))
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                say(f"{name}, {case.problem}: {rows[-1]['milliseconds']:.4g} ms")
            except Exception as error:  # one that does not run must not lose the others
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                say(f"{name}, {case.problem}: {type(error).__name__}: {error}")
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
    json.dump(rows, answer)
    answer.close()


if __name__ == "__main__":
    main()
