#!/usr/bin/env python3
"""Writes a run of figure6.sh into docs/PAPER.md, between `<!-- figure6 -->` and `<!-- /figure6 -->`, and its numbers
and picture into docs/figures/paper. Needs gnuplot.

    python3 scripts/paper/figure6.py OUT       OUT: the folder that figure6.sh wrote
"""

import json
import pathlib
import re
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures" / "paper"
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
    script = ["set terminal pngcairo size 1100,480 font ',11'", f"set output '{png}'",
              "set multiplot layout 1,2", "set logscale x 2", "set xlabel 'length of a sequence'", "set grid",
              "set xtics (" + ", ".join(f"'{length // 1024}K' {length}" for length in LENGTHS) + ")",
              "set key bottom left", "set yrange [0:]"]
    for number, rows in enumerate(models.values()):
        script.append(f"$rows{number} << EOD")
        script += [f"{length} {TOKENS / ms} {memory / 2 ** 30}" for length, (ms, memory) in sorted(rows.items())]
        script.append("EOD")
    for column, label, key in ((2, "tokens a second, in thousands", ""), (3, "memory, GiB", "unset key")):
        script += [f"set ylabel '{label}'", key, "plot " + ", ".join(
            f"$rows{number} using 1:{column} with linespoints pt 7 lw 2 title '{name}'"
            for number, name in enumerate(models))]
    subprocess.run(["gnuplot"], input="\n".join(script), text=True, check=True)


def section(about, models):
    intro = (f"One {about['machine']}, commit {about['commit']}, {about['date']}; a step of {TOKENS} tokens, bf16 with "
             "f32 master weights. Thousands of tokens a second, and GiB held (weights, gradients, optimizer, what "
             "backward reads).")
    lines = [textwrap.fill(intro, 120), "",
             "| model | " + " | ".join(f"{TOKENS // n} x {n // 1024}K" for n in LENGTHS) + " |",
             "|---|" + "---|" * len(LENGTHS)]
    for name, rows in models.items():
        cells = [f"{TOKENS / rows[n][0]:.1f}, {rows[n][1] / 2 ** 30:.0f}" if n in rows else "" for n in LENGTHS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "![training speed and memory by length](figures/paper/figure6.png)"])


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    about, models = read(pathlib.Path(sys.argv[1]))
    FIGURES.mkdir(parents=True, exist_ok=True)
    (FIGURES / "figure6.json").write_text(json.dumps({"about": about, "models": models}, indent=1) + "\n")
    draw(models, FIGURES / "figure6.png")
    document = ROOT / "docs" / "PAPER.md"
    text = document.read_text()
    pattern = re.compile("(<!-- figure6 -->\n).*?(<!-- /figure6 -->)", re.DOTALL)
    if not pattern.search(text):
        sys.exit(f"error: {document} has no place <!-- figure6 -->")
    document.write_text(pattern.sub(lambda match: match[1] + section(about, models) + "\n" + match[2], text))


main()
