#!/usr/bin/env python3
"""What 8 and 4 bits cost a model on a text, as tables in Markdown: presets, then each kind of matrix by itself.

    scripts/quantisation_report.py MODEL HELD_OUT.txt [--calibrate TEXT] [--program build/bin/flashgla] > table.md
    scripts/quantisation_report.py MODEL HELD_OUT.txt --calibrate TEXT --long LONG.txt --about "..." --save run.json

Perplexity is over all of HELD_OUT, KL (nats a token, from the model in floats) over the first --kl-tokens of it. With
--calibrate presets of 4 bits are shown with calibrated scales and with GPTQ too, with --long the loss by position in a
text's first sequences of 65,536 tokens. What --save writes is for scripts/figures.py. Folders are made below --work (as
much as all the variants together) and removed.
"""

import argparse
import datetime
import json
import math
import pathlib
import subprocess
import sys
import tempfile

PRESETS = ["q8", "q4-safe", "q4", "q4-all"]
OF_LENGTH = ["q8", "q4-safe", "q4", "q4, GPTQ"]  # where they are
LENGTH, QUARTER = 65536, 16384
KINDS = ["q_proj", "k_proj", "v_proj", "attn.g_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def run(command):
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"error: {' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


def measure(arguments, variants):
    """Rows of `flashgla evaluate`, bytes, losses by quarter: of the model, then of each variant (name: flags)."""
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        folders, sizes = [arguments.model], [weights_of(arguments.model)]
        for number, flags in enumerate(variants.values()):
            folder = pathlib.Path(work) / str(number)
            run([arguments.program, "convert", arguments.model, str(folder), "--quiet", *flags])
            folders.append(str(folder))
            sizes.append(weights_of(folder))
        command = [arguments.program, "evaluate", *folders, "--data", arguments.held_out, "--json", "--quiet"]
        command += ["--window", str(arguments.window), "--kl", str(arguments.kl_tokens)]
        rows = json.loads(run(command))
        return rows, sizes, losses_by_quarter(arguments, variants, folders) if arguments.long else {}


def weights_of(folder):
    return sum(file.stat().st_size for file in pathlib.Path(folder).glob("*.safetensors"))


def losses_by_quarter(arguments, variants, folders):
    named = {"floats": folders[0], **dict(zip(variants, folders[1:]))}
    losses = {}
    for name in ["floats", *(name for name in OF_LENGTH if name in variants)]:
        command = [arguments.program, "evaluate", named[name], "--data", arguments.long, "--json", "--quiet"]
        command += ["--extrapolate", str(LENGTH), "--bucket", str(QUARTER), "--sequences", str(arguments.sequences)]
        losses[name] = [part["loss"] for part in json.loads(run(command))["positions"]]
    return losses


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
    parser.add_argument("--long", help="a text of at least 65,536 tokens")
    parser.add_argument("--sequences", type=int, default=1, help="of --long, at most")
    parser.add_argument("--save", help="a file for scripts/figures.py")
    parser.add_argument("--about", default="", help="a sentence on the model and the texts, for --save")
    parser.add_argument("--commit", help="of the program, for --save, where this is no clone of the repository")
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
    rows, sizes, lengths = measure(arguments, variants)
    print(f"In floats: perplexity {rows[0]['perplexity']:.4f} over {rows[0]['tokens']} tokens.")
    for title, names in (("weights", presets), ("only", kinds)):
        print(f"\n| {title} | MB | perplexity | more | KL |\n|---|---|---|---|---|")
        for name, row, size in zip(variants, rows[1:], sizes[1:]):
            if name in names:
                print(line(name, rows[0], row, size))
    for name, losses in lengths.items():
        print(f"{name}: loss by quarter of {LENGTH} tokens " + ", ".join(f"{loss:.4f}" for loss in losses))
    if arguments.save:
        saved = [{"name": name, "preset": name in presets or name == "floats", "bytes": size, "loss": row["loss"],
                  "kl": row.get("kl", 0.0)} for name, row, size in zip(["floats", *variants], rows, sizes)]
        commit = arguments.commit or run(["git", "describe", "--always", "--dirty"]).strip()
        pathlib.Path(arguments.save).write_text(json.dumps(
            {"quantised": saved, "quarters": lengths, "about": arguments.about, "tokens": rows[0]["tokens"],
             "window": arguments.window, "kl_tokens": arguments.kl_tokens, "commit": commit,
             "date": str(datetime.date.today())}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
