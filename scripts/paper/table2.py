#!/usr/bin/env python3
"""The losses of table2.sh's runs: mean training loss of the last 200 steps, the paper's measure (of runs of less than
800 the last quarter), over the seeds.

    python3 table2.py gather OUT SEEDS NAME:GATE:HEADS:PAPER:FIRST_VERSION...    writes OUT/table2.json, prints a table
    python3 table2.py document OUT...    writes one run, or several of a size with other normalizers, into
                                         docs/PAPER.md, between `<!-- table2: SIZE -->` and `<!-- /table2 -->`, and
                                         their numbers into docs/figures/paper; SIZE has -stories behind it of runs
                                         on made stories, and -cpu of runs on a CPU (--device cpu)
"""

import json
import math
import pathlib
import statistics
import sys
import textwrap

import paper

LAST = 200


def last_of(steps):
    return min(LAST, max(1, steps // 4))


def of_run(folder):
    with open(folder / "metrics.jsonl", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    train = [row["loss"] for row in rows if row["kind"] == "train"]
    validation = [row["loss"] for row in rows if row["kind"] == "eval"]
    return {"steps": len(train), "loss": statistics.fmean(train[-last_of(len(train)):]),
            "validation": validation[-1] if validation else None}


def summary(row):
    losses = [run["loss"] for run in row["runs"]]
    validation = [run["validation"] for run in row["runs"] if run["validation"] is not None]
    return (statistics.fmean(losses), statistics.stdev(losses) if len(losses) > 1 else math.nan,
            statistics.fmean(validation) if validation else math.nan)


def gather(out, seeds, rows):
    table = []
    for text in rows:
        name, gate, heads, paper, first = text.split(":")
        folders = [out / f"{name}-{seed}" for seed in range(1, seeds + 1)]
        runs = [of_run(folder) for folder in folders if (folder / "done").exists()]
        if not runs:
            continue
        table.append({"name": name, "gate": gate, "heads": int(heads), "paper": paper, "first_version": first,
                      "runs": runs})
    settings = json.loads((out / "settings.json").read_text())
    (out / "table2.json").write_text(json.dumps({"settings": settings, "rows": table}, indent=1) + "\n")
    print(f"{'gate':12} {'loss':>8} {'spread':>8} {'perplexity':>10} {'validation':>10}   paper  first version")
    for row in table:
        mean, spread, validation = summary(row)
        print(f"{row['name']:12} {mean:8.4f} {spread:8.4f} {math.exp(mean):10.4f} {math.exp(validation):10.4f}   "
              f"{row['paper']:>5}  {row['first_version']:>5}")


def section(runs):
    settings, steps = runs[0]["settings"], runs[0]["rows"][0]["runs"][0]["steps"]
    lines = [textwrap.fill(
        f"{settings['text']} (bytes), on {settings['device']}, {settings['date']}; {steps} steps. Loss "
        f"in nats, mean over the last {last_of(steps)} steps and over seeds, with the standard deviation between them; "
        "perplexities of the paper are of words.", 120), "",
        "| gate | normalizer | heads | seeds | training loss | validation | the paper's | its first version's |",
        "|---|---|---|---|---|---|---|---|"]
    for run in runs:
        normalizer = run["settings"]["normalizer"]
        for row in run["rows"]:
            mean, spread, validation = summary(row)
            between = "" if math.isnan(spread) else f" ± {spread:.3f}"
            published = (row["paper"], row["first_version"]) if normalizer == 16 else ("", "")
            lines.append(f"| {row['gate']} | {'' if row['gate'] in ('none', 'constant') else normalizer} | "
                         f"{row['heads']} | {len(row['runs'])} | {mean:.3f}{between} | {validation:.3f} | "
                         f"{published[0]} | {published[1]} |")
    return "\n".join(lines)


def document(folders):
    runs = [json.loads((out / "table2.json").read_text()) for out in folders]
    settings = runs[0]["settings"]
    size = settings["size"] + ("-stories" if settings["text"].startswith("stories") else "")
    size += "-cpu" if settings["device"] == "cpu" else ""
    (paper.FIGURES / f"table2-{size}.json").write_text(json.dumps(runs, indent=1) + "\n")
    paper.put(f"table2: {size}", section(runs))


def main():
    if len(sys.argv) >= 4 and sys.argv[1] == "gather":
        gather(pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    elif len(sys.argv) >= 3 and sys.argv[1] == "document":
        document([pathlib.Path(out) for out in sys.argv[2:]])
    else:
        sys.exit(__doc__)


main()
