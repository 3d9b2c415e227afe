#!/usr/bin/env python3
"""Logits of small HGRN2 and GSA models by flash-linear-attention's own code in f32, beside the formulas of
mixer_goldens.py in float64, from which the golden numbers of flashgla/model/tests/peer_logits_test.cpp are:

    python3 scripts/fla_logits.py       needs torch, transformers and flash-linear-attention

Without a GPU Triton's interpreter runs their kernels: TRITON_INTERPRET=1.

Prints the relative error of all logits, for 16 tokens (their recurrent kernels) and, with --chunks, for 100 (their
chunk kernels, which tune themselves for minutes)."""

import argparse
import os
import sys

os.environ["TRITON_F32_DEFAULT"] = "ieee"  # before Triton is imported: else products of f32 are tf32

import mixer_goldens
import numpy
import torch
import triton
from fla.models import GSAConfig, GSAForCausalLM, HGRN2Config, HGRN2ForCausalLM

ERROR = 1e-4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # nothing to time: any configuration will do
    triton.runtime.autotuner.Autotuner.do_bench = staticmethod(lambda call, quantiles=None: (0.0, 0.0, 0.0))


def names(mixer, convolutions):
    """Of the parameters in flashgla's order."""
    projections = "qfi" if mixer is mixer_goldens.Hgrn2 else "qkvf"
    convolved = projections[:3] if convolutions else ""
    yield "model.embeddings.weight"
    if mixer is mixer_goldens.Hgrn2:
        yield "model.lower_bounds"
    for layer in range(mixer_goldens.LAYERS):
        of = f"model.layers.{layer}."
        yield of + "attn_norm.weight"
        yield from (f"{of}attn.{letter}_proj.weight" for letter in projections)
        yield from (f"{of}attn.{letter}_conv1d.weight" for letter in convolved)
        yield from (of + name + ".weight" for name in ("attn.g_norm", "attn.o_proj", "mlp_norm", "mlp.gate_proj",
                                                       "mlp.up_proj", "mlp.down_proj"))
    yield "model.norm.weight"
    yield "lm_head.weight"


def peer(mixer, convolutions):
    common = {"hidden_size": mixer_goldens.HIDDEN, "num_hidden_layers": mixer_goldens.LAYERS,
              "intermediate_size": mixer_goldens.MLP, "vocab_size": mixer_goldens.WORDS,
              "norm_eps": mixer_goldens.EPSILON, "use_short_conv": convolutions, "use_cache": False}
    if mixer is mixer_goldens.Hgrn2:
        return HGRN2ForCausalLM(HGRN2Config(expand_ratio=mixer.ratio, **common))
    return GSAForCausalLM(GSAConfig(num_heads=mixer.heads, num_kv_heads=mixer.kv_heads, num_slots=mixer.slots,
                                    **common))


def error(mixer, convolutions, tokens):
    expected, parameters = mixer_goldens.model(mixer, mixer is mixer_goldens.Hgrn2, convolutions, tokens)
    model = peer(mixer, convolutions)
    state = dict(zip(names(mixer, convolutions), (torch.tensor(each, dtype=torch.float32) for each in parameters),
                     strict=True))
    model.load_state_dict(state)
    with torch.no_grad():
        logits = model.to(DEVICE).float().eval()(torch.tensor([tokens], device=DEVICE)).logits[0].double().cpu().numpy()
    return numpy.linalg.norm(logits - expected) / numpy.linalg.norm(expected)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", action="store_true", help="their chunk kernels, too")
    arguments = parser.parse_args()
    # Sizes that their kernels take.
    mixer_goldens.HIDDEN, mixer_goldens.MLP = 64, 96
    mixer_goldens.Hgrn2.ratio = mixer_goldens.Gsa.slots = 16
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = numpy.random.default_rng(1)
    failed = False
    for length in (16, 100) if arguments.chunks else (16,):
        tokens = generator.integers(0, mixer_goldens.WORDS, length).tolist()
        for mixer in (mixer_goldens.Hgrn2, mixer_goldens.Gsa):
            for convolutions in (False, True):
                found = error(mixer, convolutions, tokens)
                failed |= not found < ERROR
                print(f"{mixer.__name__.lower()}{', convolutions' if convolutions else ''}, {length} tokens: "
                      f"{found:.1e}", flush=True)
    sys.exit(failed)


main()
