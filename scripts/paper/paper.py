"""What the scripts of the paper's figures and tables share: places in docs/PAPER.md, plots by length."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures" / "paper"


def put(place, text):
    """Writes text into docs/PAPER.md between `<!-- place -->` and `<!-- /NAME -->`; NAME: place up to its colon."""
    path = ROOT / "docs" / "PAPER.md"
    document = path.read_text(encoding="utf-8")
    end = re.escape(place.split(":")[0])
    pattern = re.compile(f"(<!-- {re.escape(place)} -->\n).*?(<!-- /{end} -->)", re.DOTALL)
    if not pattern.search(document):
        sys.exit(f"error: {path} has no place <!-- {place} -->")
    path.write_text(pattern.sub(lambda match: match[1] + text + "\n" + match[2], document), encoding="utf-8")


def plot(script):
    """Lines of gnuplot."""
    subprocess.run(["gnuplot"], input="\n".join(script), text=True, check=True)


def draw_by_length(rows, png, settings, labels):
    """Two plots beside each other: rows[name][length] = (y of the first, y of the second), labels of these."""
    script = ["set terminal pngcairo size 1100,480 font ',11'", f"set output '{png}'", "set multiplot layout 1,2",
              "set grid", *settings]
    for number, by_length in enumerate(rows.values()):
        script.append(f"$rows{number} << EOD")
        script += [f"{length} {first} {second}" for length, (first, second) in sorted(by_length.items())]
        script.append("EOD")
    for column, label, key in ((2, labels[0], ""), (3, labels[1], "unset key")):
        script += [f"set ylabel '{label}'", key, "plot " + ", ".join(
            f"$rows{number} using 1:{column} with linespoints pt 7 lw 2 title '{name}'"
            for number, name in enumerate(rows))]
    plot(script)


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|",
                      *("| " + " | ".join(row) + " |" for row in rows)])
