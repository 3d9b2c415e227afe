#!/usr/bin/env python3
"""Logits of small GLA, RetNet, Transformer, linear attention, HGRN2 and GSA models by flash-linear-attention's own code
in f32, beside the formulas of mixer_goldens.py in float64, from which the golden numbers of
flashgla/model/tests/peer_logits_test.cpp are:

    python3 scripts/fla_logits.py       needs torch, transformers and flash-linear-attention

Their Mamba and Mamba-2 are compared with transformers' (of which transformers_goldens.py made the golden numbers) on
random weights, which have the same names. Without a GPU Triton's interpreter runs their kernels: TRITON_INTERPRET=1.
Where flash-attn is not there, PyTorch's attention stands for it in their Transformer.

Prints the relative error of all logits, for 16 tokens (their recurrent kernels) and, with --chunks, for 100 (their
chunk kernels, which tune themselves for minutes)."""

import argparse
import os
import sys

os.environ["TRITON_F32_DEFAULT"] = "ieee"  # before Triton is imported: else products of f32 are tf32

import fla.layers.attn
import fla.models as theirs
import mixer_goldens as ours
import numpy
import torch
import transformers
import triton

ERROR = 1e-4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # nothing to time: any configuration will do
    triton.runtime.autotuner.Autotuner.do_bench = staticmethod(lambda call, quantiles=None: (0.0, 0.0, 0.0))


def attention(q, k, v, causal, window_size):
    """flash_attn_func by PyTorch: [B,T,H,K]; the window's left end counts keys before the query's own."""
    assert causal
    back = torch.arange(q.shape[1], device=q.device)[:, None] - torch.arange(k.shape[1], device=q.device)
    seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
    k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for each in (k, v))
    o = torch.nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), attn_mask=seen)
    return o.transpose(1, 2)


if fla.layers.attn.flash_attn_func is None:
    fla.layers.attn.flash_attn_func = attention


class Case:
    def __init__(self, name, mixer, model, config, parameters, convolved="", settings=None):
        """`parameters`: those of a layer's mixer, in flashgla's order, without the convolutions and what is behind."""
        self.name, self.mixer, self.model, self.config = name, mixer, model, config
        self.parameters, self.convolved, self.settings = parameters, convolved, settings or {}
        self.bounded = mixer is ours.Hgrn2

    def names(self):
        """Of all parameters in flashgla's order."""
        yield "model.embeddings.weight"
        if self.bounded:
            yield "model.lower_bounds"
        for layer in range(ours.LAYERS):
            of = f"model.layers.{layer}."
            yield of + "attn_norm.weight"
            yield from (f"{of}attn.{name}" for name in self.parameters[0])
            yield from (f"{of}attn.{letter}_conv1d.weight" for letter in self.convolved)
            yield from (f"{of}attn.{name}" for name in self.parameters[1])
            yield from (of + name for name in ("attn.o_proj.weight", "mlp_norm.weight", "mlp.gate_proj.weight",
                                               "mlp.up_proj.weight", "mlp.down_proj.weight"))
        yield "model.norm.weight"
        yield "lm_head.weight"

    def error(self, tokens):
        expected, parameters = ours.model(self.mixer, self.bounded, bool(self.convolved), tokens)
        model = self.model(self.config(hidden_size=ours.HIDDEN, num_hidden_layers=ours.LAYERS,
                                       intermediate_size=ours.MLP, vocab_size=ours.WORDS, norm_eps=ours.EPSILON,
                                       use_cache=False, **self.settings))
        model.load_state_dict(dict(zip(self.names(), (torch.tensor(each, dtype=torch.float32) for each in parameters),
                                       strict=True)))
        model = model.to(DEVICE).float().eval()
        with torch.no_grad():
            logits = model(torch.tensor([tokens], device=DEVICE)).logits[0].double().cpu().numpy()
        return numpy.linalg.norm(logits - expected) / numpy.linalg.norm(expected)


def projections(letters):
    return [f"{letter}_proj.weight" for letter in letters]


def cases():
    gla = [*projections("qkv"), "gk_proj.0.weight", "g_proj.weight", "gk_proj.1.weight", "gk_proj.1.bias"]
    for convolved in ("", "qkv"):
        suffix, settings = (", convolutions" if convolved else ""), {"use_short_conv": bool(convolved)}
        yield Case("gla" + suffix, ours.Gla, theirs.GLAForCausalLM, theirs.GLAConfig,
                   (gla, ["g_norm_swish_gate.weight"]), convolved, {"num_heads": ours.Gla.heads, **settings})
    yield Case("retnet", ours.Retention, theirs.RetNetForCausalLM, theirs.RetNetConfig,
               (projections("qkvg"), ["g_norm_swish_gate.weight"]), settings={"num_heads": ours.Retention.heads})
    yield Case("transformer", ours.Attention, theirs.TransformerForCausalLM, theirs.TransformerConfig,
               (projections("qkv"), [*(f"{letter}_proj.bias" for letter in "qkv"), "q_norm.weight", "k_norm.weight"]),
               settings={"num_heads": ours.Attention.heads, "num_kv_heads": ours.Attention.kv_heads, "qkv_bias": True,
                         "qk_norm": True, "window_size": ours.Attention.window})
    product = [f"feature_map_{letter}.layer{i}.{part}"
               for letter in "qk" for part in ("weight", "bias") for i in (1, 2)]
    yield Case("linear_attn", ours.linear_attention(map="elementwise_product", heads=4),
               theirs.LinearAttentionForCausalLM, theirs.LinearAttentionConfig,
               (projections("qkv") + product, ["norm.weight"]), settings={"num_heads": 4})
    for convolved in ("", "qfi"):
        suffix, settings = (", convolutions" if convolved else ""), {"use_short_conv": bool(convolved)}
        yield Case("hgrn2" + suffix, ours.Hgrn2, theirs.HGRN2ForCausalLM, theirs.HGRN2Config,
                   (projections("qfi"), ["g_norm.weight"]), convolved, {"expand_ratio": ours.Hgrn2.ratio, **settings})
    for convolved in ("", "qkv"):
        suffix, settings = (", convolutions" if convolved else ""), {"use_short_conv": bool(convolved)}
        yield Case("gsa" + suffix, ours.Gsa, theirs.GSAForCausalLM, theirs.GSAConfig,
                   (projections("qkvf"), ["g_norm.weight"]), convolved,
                   {"num_heads": ours.Gsa.heads, "num_kv_heads": ours.Gsa.kv_heads, "num_slots": ours.Gsa.slots,
                    **settings})


def error_beside_transformers(kind, tokens, own=None, **sizes):
    """Of FLA's model of this kind against transformers' with the same weights; `own`: what transformers' config has."""
    common = {"hidden_size": ours.HIDDEN, "num_hidden_layers": ours.LAYERS, "vocab_size": ours.WORDS,
              "tie_word_embeddings": False, "use_cache": False, **sizes}
    torch.manual_seed(1)
    expected = getattr(transformers, kind + "ForCausalLM")(
        getattr(transformers, kind + "Config")(**common, **(own or {}))).float().eval()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model = getattr(theirs, kind + "ForCausalLM")(
        getattr(theirs, kind + "Config")(fuse_cross_entropy=False, **common)).float()
    model.load_state_dict(expected.state_dict())
    with torch.no_grad():
        logits = model.to(DEVICE).eval()(torch.tensor([tokens], device=DEVICE)).logits.cpu().double()
        wanted = expected(torch.tensor([tokens])).logits.double()
    return ((logits - wanted).norm() / wanted.norm()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", action="store_true", help="their chunk kernels, too")
    arguments = parser.parse_args()
    # Sizes that their kernels take.
    ours.HIDDEN, ours.MLP = 64, 96
    ours.Hgrn2.ratio = ours.Gsa.slots = 16
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = numpy.random.default_rng(1)
    failed = False
    for length in (16, 100) if arguments.chunks else (16,):
        tokens = generator.integers(0, ours.WORDS, length).tolist()
        for case in cases():
            found = case.error(tokens)
            failed |= not found < ERROR
            print(f"{case.name}, {length} tokens: {found:.1e}", flush=True)
        for kind, own, sizes in (("Mamba", {}, {"state_size": 16}),
                                 ("Mamba2", {"num_heads": 8}, {"state_size": 16, "head_dim": 16, "n_groups": 1})):
            found = error_beside_transformers(kind, tokens, own, **sizes)
            failed |= not found < ERROR
            print(f"{kind.lower()}, {length} tokens: {found:.1e}", flush=True)
    sys.exit(failed)


main()
