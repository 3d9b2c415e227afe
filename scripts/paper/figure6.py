#!/usr/bin/env python3
"""Writes a run of figure6.sh into docs/PAPER.md, between `<!-- figure6 -->` and `<!-- /figure6 -->`, and its numbers
and pictures into docs/figures/paper. Rows that OUT does not have stay as they were. Needs gnuplot.

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
SAVED = paper.FIGURES / "figure6.json"


def read(out, saved):
    """The rows of OUT's runs put into those that were saved: by length and by batch of each model."""
    by = saved["by"]
    for path in sorted([*out.glob("*.json"), *out.glob("*.partial")]):
        run = json.loads(path.read_text())
        saved["machine"], saved["date"] = run["machine"], run["date"]
        for row in run["rows"]:
            match = ROW.match(row["problem"])
            if match is None:
                continue
            name, batch, length = match[2] + (", recomputed" if match[5] else ""), int(match[3]), int(match[4])
            if row.get("refused"):
                if not row["refused"].startswith("not enough memory"):
                    sys.exit(f"error: {path}, {row['problem']}: {row['refused']}")
                figures = {"refused": row["refused"], "commit": run["commit"]}
            else:
                figures = {"thousand_tokens_a_second": batch * length / row["milliseconds"],
                           "GiB": row["memory_bytes"] / 2 ** 30, "commit": run["commit"]}
            by[match[1]].setdefault(name, {})[str(length if match[1] == "length" else batch)] = figures
            if match[1] == "length" and length == LENGTHS[0]:  # 8 sequences of 2K belong to both
                by["batch"].setdefault(name, {})[str(batch)] = figures
    by["batch"] = {name: by["batch"][name] for name in by["length"]}


def draw(models, png, label, ticks):
    rows = {name: {int(n): (row["thousand_tokens_a_second"], row["GiB"]) for n, row in by.items()
                   if "refused" not in row} for name, by in models.items()}
    paper.draw_by_length(rows, png, ["set logscale x 2", f"set xlabel '{label}'", "set key bottom right",
                                     "set xtics (" + ", ".join(f"'{text}' {n}" for n, text in ticks) + ")",
                                     "set yrange [0:]"],
                         ("tokens a second, in thousands", "memory, GiB"))


def cell(row):
    if row is None:
        return ""
    return "-" if "refused" in row else f"{row['thousand_tokens_a_second']:.1f}, {row['GiB']:.0f}"


def table(models, head, columns):
    return paper.table(["model", *head], [[name, *(cell(by.get(str(n))) for n in columns)]
                                          for name, by in models.items()])


def section(saved):
    by = saved["by"]
    rows = [row for models in by.values() for model in models.values() for row in model.values()]
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    intro = (f"One {saved['machine']}, commits {commits}, {saved['date']}; bf16 with f32 master weights. "
             "Thousands of tokens a second, and GiB held (weights, gradients, optimizer, what backward reads)"
             + ("; -: does not fit into its memory" if any("refused" in row for row in rows) else "") +
             f". A step of {LENGTHS[-1]:,} tokens by the length of its sequences:")
    return "\n\n".join([textwrap.fill(intro, 120),
                        table(by["length"], [f"{LENGTHS[-1] // n} x {n // 1024}K" for n in LENGTHS], LENGTHS),
                        "![training speed and memory by length](figures/paper/figure6.png)",
                        "By the number of sequences of 2K:",
                        table(by["batch"], map(str, BATCHES), BATCHES),
                        "![training speed and memory by batch](figures/paper/figure6-batch.png)"])


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    saved = json.loads(SAVED.read_text())
    read(pathlib.Path(sys.argv[1]), saved)
    SAVED.write_text(json.dumps(saved, indent=1) + "\n")
    by = saved["by"]
    draw(by["length"], paper.FIGURES / "figure6.png", "length of a sequence",
         [(n, f"{n // 1024}K") for n in LENGTHS])
    draw(by["batch"], paper.FIGURES / "figure6-batch.png", "sequences of 2K", [(n, n) for n in BATCHES])
    paper.put("figure6", section(saved))


main()
