"""flash-linear-attention's own models with and without flashgla.fla.enable(). Needs a GPU, PyTorch, FLA, transformers.

    python fla_check.py agree [NAME...]   outputs, gradients, decoding of small models, Lightning's operators, names and
                                          signatures, the example of README.md; exit code 1 when one is wrong
    python fla_check.py speed [SIZE...]   training steps of FLA's GLA; SIZE 340M (16x2048 tokens) or 1.3B (8x2048)

`agree`: both run in bfloat16 and are compared, tensor by tensor, with the same weights in float32 on flashgla: ours may
be twice as far from that as FLA's own, plus 2e-3, and FLA's own at most 0.2 (else the float32 model is not the model).
Every call of a model must have reached flashgla. With --first-config FLA's autotuner takes the first configuration of
each kernel: quick, the same but for rounding.

`speed`: one model in one process, in turn with a stand-in that returns v (none), with flashgla's operators, with these
where states between chunks are kept for the backward (flashgla_kept), and with FLA's. The first step with `none` holds
what the rest of the model needs: Triton compiling and tuning FLA's other kernels. What the first step of the others
takes beyond a later step is then the operators' own (own_start_s); --operators with one name gives the whole first step
instead. Timed steps alternate in rounds; the figure is the median of all. Triton keeps compiled kernels in
TRITON_CACHE_DIR, and FLA's choices too unless FLA_CACHE_RESULTS=0.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import json
import pathlib
import sys
import time
import warnings

warnings.filterwarnings("ignore")

import flashgla.fla  # noqa: E402
import torch  # noqa: E402

import flashgla.ops  # noqa: E402

device = "cuda"


def build(name):
    """A small model of FLA's, or for a layer without one a stack of two layers, in float32."""
    import fla.models as models
    from fla.layers.simple_gla import SimpleGatedLinearAttention

    common = {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 512, "fuse_cross_entropy": device == "cuda"}
    if name == "gla":
        return models.GLAForCausalLM(models.GLAConfig(num_heads=2, **common))
    if name == "retnet":
        return models.RetNetForCausalLM(models.RetNetConfig(num_heads=4, **common))
    if name == "linear_attn":
        return models.LinearAttentionForCausalLM(models.LinearAttentionConfig(num_heads=4, **common))
    if name == "hgrn2":
        return models.HGRN2ForCausalLM(models.HGRN2Config(expand_ratio=64, **common))
    if name == "gsa":
        return models.GSAForCausalLM(models.GSAConfig(num_heads=4, num_slots=32, **common))
    if name == "simple_gla":
        return LayerStack([SimpleGatedLinearAttention(hidden_size=256, num_heads=4, use_short_conv=False, layer_idx=i)
                           for i in range(2)])
    raise SystemExit(f"no model named {name}; known: {', '.join(MODELS)}")


MODELS = ["gla", "retnet", "linear_attn", "hgrn2", "gsa", "simple_gla"]


class LayerStack(torch.nn.Module):
    """Embedding, layers and head: what `run` needs of a model."""

    def __init__(self, layers):
        super().__init__()
        self.embedding = torch.nn.Embedding(512, 256)
        self.layers = torch.nn.ModuleList(layers)
        self.head = torch.nn.Linear(256, 512, bias=False)

    def forward(self, input_ids, attention_mask=None, labels=None, past_key_values=None, use_cache=False):
        from types import SimpleNamespace

        from fla.models.utils import Cache

        if use_cache and past_key_values is None:
            past_key_values = Cache()
        x = self.embedding(input_ids)
        for layer in self.layers:
            normed = torch.nn.functional.rms_norm(x, (256,))
            x = x + layer(normed, attention_mask, past_key_values=past_key_values, use_cache=use_cache)[0]
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss, past_key_values=past_key_values)


def run_model(name, dtype, ours):
    """Tensors by name: logits and gradients of a training step, logits of a padded batch (packed sequences inside FLA)
    and of a prompt continued token by token."""
    torch.manual_seed(0)
    with torch.device(device):
        model = build(name).bfloat16().to(dtype)
        ids = torch.randint(0, 512, (2, 200))
    model.train()
    with recurrence_of_simple_gla() if name == "simple_gla" and not ours else contextlib.nullcontext():
        model(input_ids=ids, labels=ids).loss.backward()
    results = {"logits": model(input_ids=ids).logits.detach()}
    results |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.eval()
    with torch.no_grad():
        mask = torch.ones_like(ids)
        mask[0, :30] = 0
        results["padded logits"] = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        out = model(input_ids=ids[:, :100], use_cache=True)
        decoded = [out.logits[:, -1]]
        for t in range(100, 104):
            out = model(input_ids=ids[:, t:t + 1], past_key_values=out.past_key_values, use_cache=True)
            decoded.append(out.logits[:, -1])
    results["decoded logits"] = torch.stack(decoded, 1)
    return results


@contextlib.contextmanager
def recurrence_of_simple_gla():
    """FLA's layer on FLA's fused_recurrent_simple_gla: the backward of its chunk_simple_gla refuses Triton 3.4 to 3.7.0
    on Hopper, where it is wrong, and the layer trains in no other mode."""
    import fla.layers.simple_gla as layer

    chunk = layer.chunk_simple_gla
    layer.chunk_simple_gla = layer.fused_recurrent_simple_gla
    try:
        yield
    finally:
        layer.chunk_simple_gla = chunk


def run_lightning(name, dtype, ours):
    """Tensors by name: outputs, final states and gradients of both functions. FLA has no Lightning layer or model."""
    import fla.ops.lightning_attn as functions

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).to(dtype)

    results = {}
    for function, options in (("chunk", {}), ("fused_recurrent", {}), ("fused_recurrent", {"reverse": True})):
        for packed in (False, True):
            torch.manual_seed(0)
            batch = 1 if packed else 2
            leaves = [normal(batch, 192, 4, d).requires_grad_() for d in (64, 64, 128)]
            leaves.append(normal(2, 4, 64, 128, dtype=torch.float32).requires_grad_())
            weights = normal(batch, 192, 4, 128), normal(2, 4, 64, 128, dtype=torch.float32)
            cu_seqlens = torch.tensor([0, 64, 192], device=device) if packed else None
            o, ht = getattr(functions, f"{function}_lightning_attn")(
                *leaves[:3], layer_idx=2, num_layers=5, initial_state=leaves[3], output_final_state=True,
                cu_seqlens=cu_seqlens, **options)
            gradients = torch.autograd.grad([o, ht], leaves, weights)
            what = f"{function}{' reverse' if options else ''}{' packed' if packed else ''}"
            results |= {f"o of {what}": o.detach(), f"ht of {what}": ht.detach()}
            results |= {f"gradient {i} of {what}": x for i, x in enumerate(gradients)}
    return results


def run(name, dtype, ours):
    """The tensors of run_model or run_lightning in float64, and how many calls reached flashgla."""
    flashgla.fla.enable() if ours else flashgla.fla.disable()
    calls = 0
    operator = flashgla.ops.gated_linear_attention

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return operator(*args, **kwargs)

    flashgla.ops.gated_linear_attention = counted
    try:
        results = (run_lightning if name == "lightning_attn" else run_model)(name, dtype, ours)
    finally:
        flashgla.ops.gated_linear_attention = operator
    return {n: x.double() for n, x in results.items()}, calls


# Calls of the operator in a run: a model of two layers is called eight times, GSA's layer calls it twice.
CALLS = dict.fromkeys(MODELS, 16) | {"gsa": 32, "lightning_attn": 6}


def error(actual, expected):
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def agree(name):
    started = time.time()
    reference, _ = run(name, torch.float32, True)
    (ours, calls), (theirs, no_calls) = run(name, torch.bfloat16, True), run(name, torch.bfloat16, False)
    flashgla.fla.disable()
    assert ours.keys() == theirs.keys() == reference.keys()
    worst, failures = {}, []
    if (calls, no_calls) != (CALLS[name], 0):
        failures.append(f"{calls} calls of flashgla with enable(), {no_calls} without; expected {CALLS[name]} and 0")
    for n, expected in reference.items():
        mine, other = error(ours[n], expected), error(theirs[n], expected)
        limit = 2 * other + 2e-3
        group = "gradients" if "gradient" in n else n.split(" of ")[0]
        worst[group] = max(worst.get(group, (0, 0)), (mine, other))
        if not (mine <= limit and other <= 0.2):
            failures.append(f"{n}: ours {mine:.2e}, FLA's {other:.2e}")
    figures = "; ".join(f"{group} {a:.1e} ({b:.1e})" for group, (a, b) in worst.items())
    print(f"{'FAILED' if failures else 'ok':<7} {name:<12} error of ours (of FLA's): {figures}; "
          f"{time.time() - started:.0f} s", *failures, sep="\n        ", flush=True)
    return not failures


def agree_on_names():
    """Whether all functions that FLA has of flashgla's families have its signatures, and enable() puts them there."""
    wrong = []
    for family, names in flashgla.fla._FAMILIES.items():
        holder = importlib.import_module(f"fla.ops.{family}")
        for name in names:
            theirs, ours = (inspect.signature(getattr(x, name)).parameters.values() for x in (holder, flashgla.ops))
            ours = [p for p in ours if name != "chunk_gla" or p.kind != p.VAR_KEYWORD]  # beyond FLA
            if [(p.name, p.default, p.kind) for p in theirs] != [(p.name, p.default, p.kind) for p in ours]:
                wrong.append(f"{name}: signatures differ")
            original = getattr(holder, name)
            flashgla.fla.enable()
            if getattr(holder, name) is original or name not in flashgla.fla.table():
                wrong.append(f"{name}: not replaced")
            flashgla.fla.disable()
            if getattr(holder, name) is not original:
                wrong.append(f"{name}: not given back")
    print("FAILED " if wrong else "ok     ", "signatures", *wrong, sep="\n        " if wrong else " ", flush=True)
    return not wrong


def agree_with_readme():
    """Whether the example of README.md runs as it stands there."""
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    try:
        exec(text.split("## FLA's models")[1].split("```python\n")[1].split("```")[0], {})
    except Exception as problem:
        print(f"FAILED  readme: {problem!r}", flush=True)
        return False
    print("ok      readme", flush=True)
    return True


class StandIn(torch.autograd.Function):
    """In chunk_gla's place: returns v."""

    @staticmethod
    def forward(ctx, q, k, v, g):
        ctx.shape = q.shape
        return v.clone()

    @staticmethod
    def backward(ctx, d_o):
        zeros = d_o.new_zeros(ctx.shape)
        return zeros, zeros, d_o, zeros


ENABLED = {"flashgla": "chunk_recomputed", "flashgla_kept": "automatic"}
OPERATORS = ["none", *ENABLED, "fla"]


def put_in(operators):
    """Makes FLA's GLA layer call `operators`: of OPERATORS."""
    import fla.layers.gla as layer
    import fla.ops.gla

    flashgla.fla.disable()
    layer.chunk_gla = fla.ops.gla.chunk_gla
    if operators in ENABLED:
        flashgla.fla.enable(ENABLED[operators])
    elif operators == "none":
        layer.chunk_gla = lambda q, k, v, g, **_: (StandIn.apply(q, k, v, g), None)


def speed(size, all_operators, rounds):
    """As a user trains: bfloat16 weights, fused AdamW, clipped gradients. Prints a line of JSON for each operators."""
    from fla.models import GLAConfig, GLAForCausalLM

    width, batch = {"340M": (1024, 16), "1.3B": (2048, 8)}[size]
    config = GLAConfig(hidden_size=width, num_hidden_layers=24, num_heads=4, vocab_size=32000, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = GLAForCausalLM(config).to(torch.bfloat16)
        ids = torch.randint(0, 32000, (batch, 2048))
    weights = [p.detach().to("cpu", copy=True) for p in model.parameters()]

    def timed_step():
        torch.cuda.synchronize()
        started = time.time()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return time.time() - started, loss, norm

    first, peak = {}, {}
    times = {operators: [] for operators in all_operators}
    for operators in all_operators:
        put_in(operators)
        with torch.no_grad():
            for p, initial in zip(model.parameters(), weights):
                p.copy_(initial)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        first[operators] = timed_step()
        torch.cuda.empty_cache()  # of the tuning
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            timed_step()
        peak[operators] = torch.cuda.max_memory_allocated()
    for _ in range(rounds):
        for operators in all_operators:
            put_in(operators)
            for _ in range(2):
                timed_step()
            times[operators] += [timed_step()[0] for _ in range(8)]
    for operators in all_operators:
        seconds, loss, norm = first[operators]
        row = {"model": f"GLA {size}", "tokens": batch * 2048, "operators": operators,
               "first_step_s": round(seconds, 2), "first_loss": round(float(loss), 4),
               "first_gradient_norm": round(float(norm), 4), "peak_gib": round(peak[operators] / 2**30, 1)}
        if rounds:
            ordered = sorted(times[operators])
            median = ordered[len(ordered) // 2]
            row |= {"step_ms": round(median * 1e3, 1), "fastest_ms": round(ordered[0] * 1e3, 1),
                    "slowest_ms": round(ordered[-1] * 1e3, 1), "tokens_per_s": round(batch * 2048 / median)}
            if all_operators[0] == "none" != operators:
                row["own_start_s"] = round(seconds - median, 2)
        print(json.dumps(row), flush=True)
    put_in("fla")


def take_first_configurations():
    import triton.runtime.autotuner as autotuner
    from triton.runtime.errors import OutOfResources

    def run_first(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args))
        for config in self.prune_configs(kwargs):
            if config.pre_hook is not None:
                config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
            try:
                return self.fn.run(*args, **kwargs, **{n: x for n, x in config.all_kwargs().items() if n not in kwargs})
            except OutOfResources:
                continue
        raise RuntimeError(f"no configuration of {self.fn} runs here")

    autotuner.Autotuner.run = run_first


CHECKS = {name: functools.partial(agree, name) for name in CALLS} | {"signatures": agree_on_names,
                                                                     "readme": agree_with_readme}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    agree_parser = verbs.add_parser("agree")
    agree_parser.add_argument("names", nargs="*", help=f"of {', '.join(CHECKS)}; all when none is named")
    agree_parser.add_argument("--first-config", action="store_true")
    speed_parser = verbs.add_parser("speed")
    speed_parser.add_argument("sizes", nargs="+", choices=("340M", "1.3B"))
    speed_parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=OPERATORS)
    speed_parser.add_argument("--rounds", type=int, default=2, help="of 8 timed steps for each operators")
    arguments = parser.parse_args()
    if arguments.verb == "speed":
        for size in arguments.sizes:
            speed(size, arguments.operators, arguments.rounds)
            torch.cuda.empty_cache()
        return 0
    unknown = set(arguments.names) - set(CHECKS)
    if unknown:
        parser.error(f"agree: there is no {', '.join(sorted(unknown))}; known: {', '.join(CHECKS)}")
    if arguments.first_config:
        take_first_configurations()
    agreed = [CHECKS[name]() for name in arguments.names or CHECKS]
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
