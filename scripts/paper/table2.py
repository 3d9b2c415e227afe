"""Mean training loss of the last 200 steps (the paper's measure) of table2.sh's runs, over the seeds, and its spread.

python3 table2.py OUT SEEDS NAME:GATE:HEADS:PAPER:FIRST_VERSION...    writes OUT/table2.json and prints a table
"""

import json
import math
import pathlib
import statistics
import sys

LAST = 200


def of_run(folder):
    with open(folder / "metrics.jsonl", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    train = [row["loss"] for row in rows if row["kind"] == "train"]
    validation = [row["loss"] for row in rows if row["kind"] == "eval"]
    return {"steps": len(train), "loss": statistics.fmean(train[-LAST:]),
            "validation": validation[-1] if validation else None}


def main():
    out, seeds = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    rows = []
    for text in sys.argv[3:]:
        name, gate, heads, paper, first = text.split(":")
        runs = [of_run(out / f"{name}-{seed}") for seed in range(1, seeds + 1)]
        rows.append({"name": name, "gate": gate, "heads": int(heads), "paper": paper, "first_version": first,
                     "runs": runs})
    settings = json.loads((out / "settings.json").read_text())
    (out / "table2.json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    print(f"{'gate':12} {'loss':>8} {'spread':>8} {'perplexity':>10} {'validation':>10}   paper  first version")
    for row in rows:
        losses = [run["loss"] for run in row["runs"]]
        validation = [run["validation"] for run in row["runs"] if run["validation"] is not None]
        spread = statistics.stdev(losses) if len(losses) > 1 else math.nan
        after = math.exp(statistics.fmean(validation)) if validation else math.nan
        mean = statistics.fmean(losses)
        print(f"{row['name']:12} {mean:8.4f} {spread:8.4f} {math.exp(mean):10.4f} {after:10.4f}   {row['paper']:>5}  "
              f"{row['first_version']:>5}")


main()
