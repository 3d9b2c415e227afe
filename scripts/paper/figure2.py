#!/usr/bin/env python3
"""Writes a run of figure2.sh into docs/PAPER.md, between `<!-- figure2-NAME -->` and `<!-- /figure2-NAME -->` for each
of its shapes, and numbers and pictures into docs/figures/paper. What the run has takes the place of what is saved of
the same machine and batch; the rest stays, so that a form may be timed alone. Needs gnuplot.

    python3 scripts/paper/figure2.py OUT       OUT: the folder that figure2.sh wrote
"""

import json
import pathlib
import re
import sys
import textwrap

import paper

PROBLEM = re.compile(r"^B(\d+) T(\d+) H\d+ K\d+ V\d+ bf16 \w+ gate, (\w+)$")
SHAPES = {"paper": "16 heads of 64 channels without a gate, bf16 (softmax attention: the same heads)",
          "first": "4 heads of 128 and 256 channels with key gates, bf16 (softmax attention: as wide, heads of 128)"}
NAMES = {"chunk_materialized": "ours, states kept", "chunk_recomputed": "ours, states recomputed",
         "recurrent": "ours, token by token", "parallel": "ours, parallel", "softmax_cudnn": "softmax, cuDNN",
         "softmax_flash": "softmax, FlashAttention", "torch_chunks": "chunk form in PyTorch",
         "torch_recurrence": "recurrence in PyTorch"}
# Kernels of the form in two passes, and what they do.
KERNELS = {"forward_prepare_kernel": "within chunks: pairs of tokens, q and k with their decays",
           "recurrence_kernel": "from chunk to chunk, and what each chunk has of both: o; dv",
           "make_dq_dk_dg_kernel": "dq, dk and dg of each chunk"}
KERNEL = re.compile(r"^ *([\d.]+) ms .* us .*?(\S+)$")
BOTH = "gated_linear_attention fwd+bwd"


def read(path):
    """Where the run was; each form by length: milliseconds forward and backward, bytes; and its commit and date."""
    run, forms, batch = json.loads(path.read_text()), {}, None
    for row in run["rows"]:
        match = PROBLEM.match(row["problem"])
        if match is None or row["operation"] != BOTH or row.get("refused"):
            continue
        ours = row["implementation"].startswith("cuda")
        batch, name = match[1], NAMES[match[3] if ours else row["implementation"]]
        forms.setdefault(name, {})[int(match[2])] = (row["milliseconds"], row["memory_bytes"])
    made = {name: [run["commit"], run["date"]] for name in forms}
    return {"machine": run["machine"], "batch": batch}, forms, made


def shares(out):
    """By length, the share of each of KERNELS in their time forward and backward."""
    by_length = {}
    for path in out.glob("kernels-*.txt"):
        times = dict.fromkeys(KERNELS, 0.0)
        for line in path.read_text().splitlines():
            match = KERNEL.match(line)
            for kernel in times:
                if match and kernel in match[2]:
                    times[kernel] += float(match[1])
        total = sum(times.values())
        if total > 0:
            by_length[int(path.stem.split("-")[1])] = {kernel: ms / total for kernel, ms in times.items()}
    return dict(sorted(by_length.items()))


def draw(forms, png):
    rows = {name: {length: (ms, memory / 2 ** 30) for length, (ms, memory) in by_length.items()}
            for name, by_length in forms.items()}
    paper.draw_by_length(rows, png, ["set logscale xy 2", "set xlabel 'length'", "set key top left",
                                     "set offsets 0, 0, graph 0.45, 0",  # room for the key
                                     "set xtics ('1K' 1024, '2K' 2048, '4K' 4096, '8K' 8192)"],
                         ("forward and backward, ms", "memory beyond the inputs, GiB"))


def digits(value, count):
    """`value` with so many digits, large ones without a fraction."""
    return f"{value:.{count}g}" if value < 10 ** count else f"{value:.0f}"


def section(shape, about, forms, made, kernels):
    lengths = sorted({length for rows in forms.values() for length in rows})
    commits, dates = (", ".join(dict.fromkeys(one[i] for one in sorted(made.values(), key=lambda m: m[1])))
                      for i in range(2))
    intro = (f"One {about['machine']}, commit {commits}, {dates}; batch {about['batch']}, {SHAPES[shape]}. Forward and "
             "backward in ms, and what is held beyond the inputs in GiB.")
    rows = [[name, *(f"{digits(by[n][0], 3)}, {digits(by[n][1] / 2 ** 30, 2)}" if n in by else "" for n in lengths)]
            for name, by in forms.items()]
    parts = [textwrap.fill(intro, 120), paper.table(["form", *map(str, lengths)], rows),
             f"![speed and memory of the operator by length](figures/paper/figure2-{shape}.png)"]
    if kernels:
        said = ("The first version of the paper draws how much of the time is spent within chunks and between them. Of "
                "ours with states kept, which has kernels for both, forward and backward together (CUPTI):")
        parts += [textwrap.fill(said, 120),
                  paper.table(["kernel", "what it does", *map(str, kernels)],
                              [[f"`{kernel}`", does, *(f"{by[kernel]:.0%}" for by in kernels.values())]
                               for kernel, does in KERNELS.items()])]
    return "\n\n".join(parts)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = pathlib.Path(sys.argv[1])
    paper.FIGURES.mkdir(parents=True, exist_ok=True)
    path = paper.FIGURES / "figure2.json"
    saved = json.loads(path.read_text()) if path.exists() else {}
    for shape in SHAPES:
        if not (out / f"{shape}.json").exists():
            continue
        about, forms, made = read(out / f"{shape}.json")
        kernels = shares(out) if shape == "first" else {}
        before = saved.get(shape, {})
        if before.get("about") == about:
            of_lengths = {name: {int(length): row for length, row in by.items()}
                          for name, by in before["forms"].items()}
            forms, made, kernels = of_lengths | forms, before["made"] | made, kernels or before["kernels"]
        forms = {name: forms[name] for name in NAMES.values() if name in forms}
        saved[shape] = {"about": about, "forms": forms, "made": made, "kernels": kernels}
        draw(forms, paper.FIGURES / f"figure2-{shape}.png")
        paper.put(f"figure2-{shape}", section(shape, about, forms, made, kernels))
    path.write_text(json.dumps(saved, indent=1) + "\n")


main()
