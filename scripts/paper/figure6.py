#!/usr/bin/env python3
"""Writes a run of figure6.sh into docs/PAPER.md, between `<!-- figure6 -->` and `<!-- /figure6 -->`, and its numbers
and pictures into docs/figures/paper. Needs gnuplot.

    python3 scripts/paper/figure6.py OUT       OUT: the folder that figure6.sh wrote
"""

import json
import pathlib
import re
import sys
import textwrap

import paper

LENGTHS, BATCHES = (2048, 4096, 8192, 16384), (1, 2, 4, 8, 16)
ROW = re.compile(r"^by (length|batch): (\S+) (\d+)x(\d+) bf16( recomputed)?$")


def read(out):
    """What the runs have in common; by length and by batch of each model: tokens a second in thousands, GiB."""
    about, by = {"machine": [], "commit": [], "date": []}, {"length": {}, "batch": {}}
    for path in sorted([*out.glob("*.json"), *out.glob("*.partial")]):
        run = json.loads(path.read_text())
        for key, said in about.items():
            if run[key] not in said:
                said.append(run[key])
        for row in run["rows"]:
            match = ROW.match(row["problem"])
            if match is None or row.get("refused"):
                continue
            name, batch, length = match[2] + (", recomputed" if match[5] else ""), int(match[3]), int(match[4])
            figures = (batch * length / row["milliseconds"], row["memory_bytes"] / 2 ** 30)
            by[match[1]].setdefault(name, {})[length if match[1] == "length" else batch] = figures
            if match[1] == "length" and length == LENGTHS[0]:  # 8 sequences of 2K belong to both
                by["batch"].setdefault(name, {})[batch] = figures
    return {key: ", ".join(sorted(said)) for key, said in about.items()}, by


def draw(rows, png, label, ticks):
    paper.draw_by_length(rows, png, ["set logscale x 2", f"set xlabel '{label}'", "set key bottom right",
                                     "set xtics (" + ", ".join(f"'{text}' {n}" for n, text in ticks) + ")",
                                     "set yrange [0:]"],
                         ("tokens a second, in thousands", "memory, GiB"))


def table(models, head, columns):
    rows = [[name, *(f"{by[n][0]:.1f}, {by[n][1]:.0f}" if n in by else "" for n in columns)]
            for name, by in models.items()]
    return paper.table(["model", *head], rows)


def section(about, by):
    intro = (f"One {about['machine']}, commits {about['commit']}, {about['date']}; bf16 with f32 master weights. "
             "Thousands of tokens a second, and GiB held (weights, gradients, optimizer, what backward reads). A step "
             f"of {LENGTHS[-1]:,} tokens by the length of its sequences:")
    return "\n\n".join([textwrap.fill(intro, 120),
                        table(by["length"], [f"{LENGTHS[-1] // n} x {n // 1024}K" for n in LENGTHS], LENGTHS),
                        "![training speed and memory by length](figures/paper/figure6.png)",
                        "By the number of sequences of 2K:",
                        table(by["batch"], map(str, BATCHES), BATCHES),
                        "![training speed and memory by batch](figures/paper/figure6-batch.png)"])


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    about, by = read(pathlib.Path(sys.argv[1]))
    paper.FIGURES.mkdir(parents=True, exist_ok=True)
    (paper.FIGURES / "figure6.json").write_text(json.dumps({"about": about, "by": by}, indent=1) + "\n")
    draw(by["length"], paper.FIGURES / "figure6.png", "length of a sequence",
         [(n, f"{n // 1024}K") for n in LENGTHS])
    draw(by["batch"], paper.FIGURES / "figure6-batch.png", "sequences of 2K", [(n, n) for n in BATCHES])
    paper.put("figure6", section(about, by))


main()
