"""flash-linear-attention's own models with and without flashgla.fla.enable(). Needs a GPU, PyTorch, FLA, transformers.

    python fla_check.py agree [MODEL...]     outputs, gradients, decoding of small models; exit code 1 when they differ
    python fla_check.py speed SIZE [--fla]   training step of FLA's GLA; SIZE 340M (16x2048 tokens) or 1.3B (8x2048)

`agree`: both run in bfloat16 and are compared, tensor by tensor, with the same weights in float32 on flashgla: ours may
be twice as far from that as FLA's own, plus 2e-3, and FLA's own at most 0.2 (else the float32 model is not the model).
With --first-config FLA's autotuner takes the first configuration of each kernel: quick, the same but for rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings

warnings.filterwarnings("ignore")

import flashgla.fla  # noqa: E402
import torch  # noqa: E402

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


def run(name, dtype, ours):
    """Tensors by name: logits and gradients of a training step, logits of a padded batch (packed sequences inside FLA)
    and of a prompt continued token by token."""
    flashgla.fla.enable() if ours else flashgla.fla.disable()
    torch.manual_seed(0)
    with torch.device(device):
        model = build(name).bfloat16().to(dtype)
        ids = torch.randint(0, 512, (2, 200))
    model.train()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
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
    return {n: x.double() for n, x in results.items()}


def error(actual, expected):
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def agree(name):
    started = time.time()
    reference = run(name, torch.float32, True)
    ours, theirs = run(name, torch.bfloat16, True), run(name, torch.bfloat16, False)
    flashgla.fla.disable()
    assert ours.keys() == theirs.keys() == reference.keys()
    worst, failures = {}, []
    if all(torch.equal(ours[n], theirs[n]) for n in ours):
        failures.append("the same bits with and without enable(): nothing was replaced")
    for n, expected in reference.items():
        mine, other = error(ours[n], expected), error(theirs[n], expected)
        limit = 2 * other + 2e-3
        group = n if "gradient" not in n else "gradients"
        worst[group] = max(worst.get(group, (0, 0)), (mine, other))
        if not (mine <= limit and other <= 0.2):
            failures.append(f"{n}: ours {mine:.2e}, FLA's {other:.2e}")
    figures = "; ".join(f"{group} {a:.1e} ({b:.1e})" for group, (a, b) in worst.items())
    print(f"{'FAILED' if failures else 'ok':<7} {name:<12} error of ours (of FLA's): {figures}; "
          f"{time.time() - started:.0f} s", *failures, sep="\n        ", flush=True)
    return not failures


def speed(size, ours):
    """As a user trains: bfloat16 weights, fused AdamW. The operator's first call and the model's first step, which hold
    FLA's autotuning, are timed apart."""
    from fla.models import GLAConfig, GLAForCausalLM
    from fla.ops import gla

    width, batch = {"340M": (1024, 16), "1.3B": (2048, 8)}[size]
    if ours:
        flashgla.fla.enable()
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(batch, 2048, 4, d // 4, device=device, dtype=torch.bfloat16)
                  for d in (width // 2, width // 2, width, width // 2))
    g = (torch.nn.functional.logsigmoid(g) / 16).requires_grad_()
    torch.cuda.synchronize()
    started = time.time()
    gla.chunk_gla(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), g)[0].sum().backward()
    torch.cuda.synchronize()
    first_call = time.time() - started
    del q, k, v, g
    config = GLAConfig(hidden_size=width, num_hidden_layers=24, num_heads=4, vocab_size=32000, use_cache=False)
    with torch.device(device):
        model = GLAForCausalLM(config).to(torch.bfloat16)
        ids = torch.randint(0, 32000, (batch, 2048))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    def step():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return loss

    times = []
    for _ in range(13):
        started = time.time()
        loss = step()
        times.append(time.time() - started)
    median = sorted(times[3:])[5]
    print(json.dumps({"model": f"GLA {size}", "tokens": batch * 2048, "operators": "flashgla" if ours else "FLA",
                      "operator_first_call_s": round(first_call, 1),
                      "first_step_s": round(times[0], 1), "step_ms": round(median * 1e3, 1),
                      "tokens_per_s": round(batch * 2048 / median), "loss": round(float(loss), 3),
                      "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)}), flush=True)


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    agree_parser = verbs.add_parser("agree")
    agree_parser.add_argument("models", nargs="*", default=MODELS)
    agree_parser.add_argument("--first-config", action="store_true")
    speed_parser = verbs.add_parser("speed")
    speed_parser.add_argument("size", choices=("340M", "1.3B"))
    speed_parser.add_argument("--fla", action="store_true", help="FLA's own operators")
    arguments = parser.parse_args()
    if arguments.verb == "speed":
        speed(arguments.size, not arguments.fla)
        return 0
    if arguments.first_config:
        take_first_configurations()
    return 0 if all([agree(name) for name in arguments.models]) else 1


if __name__ == "__main__":
    sys.exit(main())
