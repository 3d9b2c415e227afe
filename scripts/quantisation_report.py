#!/usr/bin/env python3
"""What 8 and 4 bits cost a model on a text, as tables in Markdown: presets, then each kind of matrix by itself.

    scripts/quantisation_report.py MODEL HELD_OUT.txt [--calibrate TEXT] [--program build/bin/flashgla] > table.md

Perplexity is over all of HELD_OUT, KL (nats a token, from the model in floats) over the first --kl-tokens of it. With
--calibrate presets of 4 bits are shown with calibrated scales and with GPTQ too. Folders are made below --work (as much
as all the variants together) and removed.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile

PRESETS = ["q8", "q4-safe", "q4", "q4-all"]
KINDS = ["q_proj", "k_proj", "v_proj", "attn.g_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def run(command):
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"error: {' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


def measure(arguments, variants):
    """Rows of `flashgla evaluate` and bytes: of the model in floats, then of each variant (name: flags of convert)."""
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        folders, sizes = [arguments.model], []
        for number, flags in enumerate(variants.values()):
            folder = pathlib.Path(work) / str(number)
            run([arguments.program, "convert", arguments.model, str(folder), "--quiet", *flags])
            folders.append(str(folder))
            sizes.append(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
        command = [arguments.program, "evaluate", *folders, "--data", arguments.held_out, "--json", "--quiet"]
        command += ["--window", str(arguments.window), "--kl", str(arguments.kl_tokens)]
        return json.loads(run(command)), sizes


def line(name, reference, row, size):
    ratio = math.exp(row["loss"] - reference["loss"]) - 1
    return f"| {name} | {size / 1e6:.1f} | {row['perplexity']:.4f} | {100 * ratio:+.2f} % | {row['kl']:.5f} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("held_out")
    parser.add_argument("--calibrate")
    parser.add_argument("--program", default="build/bin/flashgla")
    parser.add_argument("--work", default=tempfile.gettempdir())
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--kl-tokens", type=int, default=16384)
    arguments = parser.parse_args()
    presets, kinds = {}, {}
    for preset in PRESETS:
        presets[preset] = ["--quantise", preset]
        if arguments.calibrate and preset != "q8":
            presets[preset + ", calibrated"] = [*presets[preset], "--calibrate", arguments.calibrate]
            presets[preset + ", GPTQ"] = [*presets[preset + ", calibrated"], "--method", "gptq"]
    for kind in KINDS:
        kinds[kind + " in q4"] = ["--quantise", "q4-all", "--quantise-only", kind]
    variants = {**presets, **kinds}
    rows, sizes = measure(arguments, variants)
    print(f"In floats: perplexity {rows[0]['perplexity']:.4f} over {rows[0]['tokens']} tokens.")
    for title, names in (("weights", presets), ("only", kinds)):
        print(f"\n| {title} | MB | perplexity | more | KL |\n|---|---|---|---|---|")
        for name, row, size in zip(variants, rows[1:], sizes):
            if name in names:
                print(line(name, rows[0], row, size))


if __name__ == "__main__":
    main()
