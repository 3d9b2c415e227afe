"""Accuracy of figure4.sh's runs: of each the best evaluation, and of these the best over the learning rates.

python3 figure4.py OUT MODELS SETTINGS WIDTHS RATES    writes OUT/figure4.json and, with gnuplot,
OUT/figure4-T-PAIRS.png; prints a table. Runs that are not there are left out.
python3 figure4.py OUT MODELS SETTINGS WIDTHS RATES --best N    prints MODEL SETTING RATE,... of each: the N rates
of the least validation loss of any evaluation, at any of the widths.
"""

import json
import pathlib
import shutil
import subprocess
import sys


def accuracy_of(run):
    """The best accuracy of a run, its least validation loss and its evaluations; None without one."""
    metrics = run / "metrics.jsonl"
    if not metrics.exists():
        return None
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "eval"]
    return {"accuracy": max(row["accuracy"] for row in rows), "evaluations": len(rows),
            "ended": (run / "done").exists(), "loss": min(row["loss"] for row in rows)} if rows else None


def print_best(rows, number):
    """Of each model and setting, the rates of so many least losses."""
    rates = {}
    for row in sorted(rows, key=lambda row: row["loss"]):
        rates.setdefault((row["model"], f"{row['length']}:{row['pairs']}"), {})[row["rate"]] = None
    for (model, setting), of_model in rates.items():
        print(model, setting, ",".join(list(of_model)[:number]))


def draw(points, models, setting, widths, png):
    script = ["set terminal pngcairo noenhanced size 640,480 font ',11'", f"set output '{png}'",
              "set xlabel 'model width'", "set ylabel 'accuracy'", "set yrange [0:1.02]", "set logscale x 2",
              "set grid", "set key outside right center", f"set xtics ({', '.join(widths)})",
              f"set xrange [{0.9 * int(widths[0])}:{1.1 * int(widths[-1])}]",
              "set linetype 5 lc rgb '#444444'",
              f"set title '{setting.split(':')[0]} tokens, {setting.split(':')[1]} pairs'"]
    curves = []
    for number, model in enumerate(models):
        found = [(width, points[(model, setting, width)]) for width in widths if (model, setting, width) in points]
        if found:
            script += [f"$curve{number} << EOD", *(f"{width} {best['accuracy']}" for width, best in found), "EOD"]
            curves.append(f"$curve{number} with linespoints pt 7 lw 2 title '{model}'")
    subprocess.run(["gnuplot"], input="\n".join([*script, "plot " + ", ".join(curves)]), text=True, check=True)


def main():
    out = pathlib.Path(sys.argv[1])
    models, settings, widths, rates = (text.split(",") for text in sys.argv[2:6])
    points, rows = {}, []
    for setting in settings:
        for width in widths:
            for model in models:
                for rate in rates:
                    found = accuracy_of(out / f"{model}-{setting.replace(':', '-')}-{width}-{rate}")
                    if found is None:
                        continue
                    length, pairs = map(int, setting.split(":"))
                    rows.append({"model": model, "length": length, "pairs": pairs, "width": int(width), "rate": rate,
                                 **found})
                    best = points.get((model, setting, width))
                    if best is None or found["accuracy"] > best["accuracy"]:
                        points[(model, setting, width)] = rows[-1]
    if not rows:
        sys.exit(f"error: {out} holds no run of this grid")
    if len(sys.argv) == 8 and sys.argv[6] == "--best":
        print_best(rows, int(sys.argv[7]))
        return
    run = {"settings": json.loads((out / "settings.json").read_text()), "runs": rows}
    (out / "figure4.json").write_text(json.dumps(run, indent=1) + "\n")
    print(f"{'tokens':>6} {'pairs':>5} {'width':>5}" + "".join(f" {model:>12}" for model in models))
    for setting in settings:
        length, pairs = setting.split(":")
        for width in widths:
            cells = [points.get((model, setting, width)) for model in models]
            print(f"{length:>6} {pairs:>5} {width:>5}" + "".join(
                f" {'-' if cell is None else format(cell['accuracy'], '.3f'):>12}" for cell in cells))
        if shutil.which("gnuplot"):
            draw(points, models, setting, widths, out / f"figure4-{setting.replace(':', '-')}.png")


main()
