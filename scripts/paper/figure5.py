#!/usr/bin/env python3
"""Writes a run of figure5.sh into docs/PAPER.md: its table between `<!-- figure5: NAME -->` and `<!-- /figure5 -->`,
its numbers and picture into docs/figures/paper. Needs gnuplot.

    python3 scripts/paper/figure5.py OUT NAME       OUT: the folder that figure5.sh wrote
"""

import json
import math
import pathlib
import sys
import textwrap

import paper

SHOWN = (1, 2, 4, 8, 14)  # multiples of the training length


def draw(run, png):
    """Perplexity over position in multiples of T, on a logarithmic axis."""
    length = run["settings"]["length"]
    script = ["set terminal pngcairo size 900,540 font ',11'", f"set output '{png}'",
              f"set xlabel 'position, in multiples of the training length T = {length}'",
              "set ylabel 'perplexity by byte or word'", "set logscale y", "set key outside right", "set grid"]
    for number, model in enumerate(run["models"]):
        script.append(f"$curve{number} << EOD")
        script += [f"{(each['begin'] + each['end']) / 2 / length} {each['perplexity']}" for each in model["positions"]]
        script.append("EOD")
    script.append("plot " + ", ".join(
        f"$curve{number} with linespoints pt 7 ps 0.6 lw 2 title '{model['model']}'"
        for number, model in enumerate(run["models"])))
    paper.plot(script)


def section(run, name):
    settings = run["settings"]
    length, first = settings["length"], run["models"][0]
    lines = [textwrap.fill(
        f"T = {length}, {settings['steps']} steps of {settings['tokens_of_step']} tokens of {settings['text']}"
        f" ({settings['tokenizer']}), on {settings['device']}, {settings['date']}; {first['sequences']} sequences of "
        f"{14 * length} tokens that no model was trained on. Perplexity in the block of T tokens that ends there, and "
        "the last block's loss less the first one's:", 120), "",
        "| model | " + " | ".join(f"{n} T" for n in SHOWN) + " | 14 T - T, nats |",
        "|---|" + "---|" * (len(SHOWN) + 1)]
    for model in run["models"]:
        losses = [each["loss"] for each in model["positions"]]
        cells = [f"{math.exp(losses[n - 1]):.3f}" for n in SHOWN]
        lines.append(f"| {model['model']} | " + " | ".join(cells) + f" | {losses[13] - losses[0]:+.3f} |")
    return "\n".join([*lines, "", f"![perplexity by position, {name}](figures/paper/figure5-{name}.png)"])


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    out, name = pathlib.Path(sys.argv[1]), sys.argv[2]
    models = json.loads((out / "figure5.json").read_text())
    run = {"settings": json.loads((out / "settings.json").read_text()),
           "models": models if isinstance(models, list) else [models]}
    paper.FIGURES.mkdir(parents=True, exist_ok=True)
    (paper.FIGURES / f"figure5-{name}.json").write_text(json.dumps(run, indent=1) + "\n")
    draw(run, paper.FIGURES / f"figure5-{name}.png")
    paper.put(f"figure5: {name}", section(run, name))


main()
