#!/usr/bin/env python3
"""Writes a run of figure6.sh into docs/PAPER.md, between `<!-- figure6 -->` and `<!-- /figure6 -->`, and its numbers
and picture into docs/figures/paper. Needs gnuplot.

    python3 scripts/paper/figure6.py OUT       OUT: the folder that figure6.sh wrote
"""

import json
import pathlib
import re
import sys
import textwrap

import paper

TOKENS = 16384
LENGTHS = (2048, 4096, 8192, 16384)
ROW = re.compile(r"^(\S+) (\d+)x(\d+) bf16( recomputed)?$")


def read(out):
    """What the runs have in common, and of each model by length: milliseconds, bytes."""
    models, about = {}, {}
    for path in sorted(out.glob("*.json")):
        run = json.loads(path.read_text())
        about = {key: run[key] for key in ("machine", "commit", "date")}
        for row in run["rows"]:
            match = ROW.match(row["problem"]) if row["operation"] == "model_training_step" else None
            if match is None or row.get("refused"):
                continue
            name = match[1] + (", recomputed" if match[4] else "")
            models.setdefault(name, {})[int(match[3])] = (row["milliseconds"], row["memory_bytes"])
    return about, models


def draw(models, png):
    rows = {name: {length: (TOKENS / ms, memory / 2 ** 30) for length, (ms, memory) in by_length.items()}
            for name, by_length in models.items()}
    paper.draw_by_length(rows, png, ["set logscale x 2", "set xlabel 'length of a sequence'", "set key bottom left",
                                     "set xtics (" + ", ".join(f"'{n // 1024}K' {n}" for n in LENGTHS) + ")",
                                     "set yrange [0:]"],
                         ("tokens a second, in thousands", "memory, GiB"))


def section(about, models):
    intro = (f"One {about['machine']}, commit {about['commit']}, {about['date']}; a step of {TOKENS} tokens, bf16 with "
             "f32 master weights. Thousands of tokens a second, and GiB held (weights, gradients, optimizer, what "
             "backward reads).")
    rows = [[name, *(f"{TOKENS / by[n][0]:.1f}, {by[n][1] / 2 ** 30:.0f}" if n in by else "" for n in LENGTHS)]
            for name, by in models.items()]
    head = ["model", *(f"{TOKENS // n} x {n // 1024}K" for n in LENGTHS)]
    return "\n\n".join([textwrap.fill(intro, 120), paper.table(head, rows),
                        "![training speed and memory by length](figures/paper/figure6.png)"])


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    about, models = read(pathlib.Path(sys.argv[1]))
    paper.FIGURES.mkdir(parents=True, exist_ok=True)
    (paper.FIGURES / "figure6.json").write_text(json.dumps({"about": about, "models": models}, indent=1) + "\n")
    draw(models, paper.FIGURES / "figure6.png")
    paper.put("figure6", section(about, models))


main()
