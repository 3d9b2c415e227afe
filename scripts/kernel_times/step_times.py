#!/usr/bin/env python3
"""Where a step's time goes on a GPU: a training step, a prompt and a token of gla-1.3b, by kernels of each operator.

    scripts/kernel_times/step_times.py [FLASHGLA] --save steps.json
    scripts/figures.py steps.json

FLASHGLA is the program (default build-cuda/bin/flashgla). Each of `flashgla bench model_training_step model_prefill
model_decoding` runs with kernels counted (kernel_times.sh; needs CUPTI, which comes with the CUDA toolkit), and before
that, unless there is --once, as it is, for the step's time. An operator's floor is the least time for what it must
do: FLOPs at the rate of products whose operands are on the chip, or bytes, each tensor once, at the rate of a copy.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
# gla-1.3b: width, layers, key and value channels, width between the MLP's products, words.
WIDTH, LAYERS, KEYS, VALUES, BETWEEN, WORDS = 2048, 24, 1024, 2048, 5632, 32000
MATRICES = 1_299_978_240  # elements that multiply activations
PARAMETERS = MATRICES + WIDTH * WORDS
STATES = 4 * LAYERS * KEYS * VALUES // 4  # bytes of a sequence, f32, in four heads


def training_floors(tokens):
    """(flops, bytes) of each operator: activations bf16, gradients, moments and master f32."""
    def of_layers(channels):
        return 0, 2 * tokens * LAYERS * channels

    return {
        "matrix products": (6 * tokens * MATRICES, 0),
        # q, k, g, v read and o written; these and do read, dq, dk, dg, dv written.
        "gated_linear_attention": of_layers(3 * KEYS + 2 * VALUES + 6 * KEYS + 3 * VALUES),
        "swiglu": of_layers(3 * BETWEEN + 6 * BETWEEN),  # backward with the output again
        # Two norms of a block; backward x and dy read, dx added to.
        "rms_norm": of_layers(2 * 2 * WIDTH + 2 * 4 * WIDTH),
        "rms_norm_swish_gate": of_layers(3 * VALUES + 5 * VALUES),
        "log_sigmoid_gate": of_layers(2 * KEYS + 3 * KEYS),
        "adamw": (0, PARAMETERS * (4 + 3 * 8 + 2)),
        "global_norm": (0, PARAMETERS * 4),
        "cross_entropy": (0, 2 * 2 * tokens * WORDS),
    }


def prompt_floors(tokens):
    def of_layers(channels):
        return 0, 2 * tokens * LAYERS * channels

    return {
        "matrix products": (2 * tokens * (MATRICES - WIDTH * WORDS), 0),  # of the head one row
        "gated_linear_attention": of_layers(3 * KEYS + 2 * VALUES),
        "swiglu": of_layers(3 * BETWEEN),
        "rms_norm": of_layers(2 * 2 * WIDTH),
        "rms_norm_swish_gate": of_layers(3 * VALUES),
        "log_sigmoid_gate": of_layers(2 * KEYS),
    }


def token_floors(_):
    return {"linear_step": (0, 2 * MATRICES), "gated_linear_attention": (0, 2 * STATES)}


# What, the bench's operation and problem, tokens, floors, whether a step is one graph. The training step is
# the sweep's: of the headline's, gradients are compared with the CPU's first, which takes
# longer than all else here.
STEPS = [
    ("token", "model_decoding", "gla-1.3b batch 1 bf16", 1, token_floors, True),
    ("prompt", "model_prefill", "gla-1.3b 1x2048 bf16", 2048, prompt_floors, False),
    ("training step", "model_training_step --sweep", "by length: gla-1.3b 8x2048 bf16", 16384, training_floors, True),
]
LINE = re.compile(r"\s*([\d.]+) ms\s+(\d+) x\s+[\d.]+ us  graph (\d+) of (\d+)  (.*)")


def run(command, **more):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def operator(name):
    """What a kernel belongs to, by its demangled name."""
    found = [part for part in re.findall(r"flashgla::ops::(\w+)::", name) if part != "cuda"]
    if found:
        return "matrix products" if found[0] == "matmul" else found[0]
    if "reduce_partial_sums" in name:
        return "sums over rows"
    if re.search(r"nvjet|gemm|gemv|cutlass|splitK|cublas", name, re.IGNORECASE):
        return "matrix products"
    return "copies" if name in ("(copy)", "(memset)") else "other"


def counted(path):
    """(graph, milliseconds, launches, nodes, operator) of each line of kernel_times.sh."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    names = subprocess.run(["c++filt"], input="\n".join(LINE.fullmatch(line)[5] for line in lines), text=True,
                           capture_output=True, check=True).stdout.splitlines()
    for line, name in zip(lines, names):
        milliseconds, launches, graph, nodes, _ = LINE.fullmatch(line).groups()
        yield int(graph), float(milliseconds), int(launches), int(nodes), operator(name), name


def of_one_step(rows, is_graph):
    """Milliseconds and launches of each operator in a step: of the graph that takes most of the time, or, where the
    step is none, of all kernels that come as often as steps do, by the number of look-ups in the embedding."""
    rows = list(rows)
    if is_graph:
        graphs = {}
        for graph, milliseconds, *_ in rows:
            graphs[graph] = graphs.get(graph, 0.0) + (milliseconds if graph else 0.0)
        mine = [row for row in rows if row[0] == max(graphs, key=graphs.get)]
        steps = max(launches / nodes for _, _, launches, nodes, *_ in mine)
    else:
        steps = next(row[2] for row in rows if "embedding" in row[5] and "lookup" in row[5])
        mine = [row for row in rows if row[2] % steps == 0 and row[0] == 0 and "ceilings" not in row[5]]
    found = {}
    for _, milliseconds, launches, _, name, _ in mine:
        sums = found.setdefault(name, [0.0, 0.0])
        sums[0] += milliseconds / steps
        sums[1] += launches / steps
    return found


def step(flashgla, operation, problem, tokens, floors, is_graph, seconds, folder, once):
    bench = [flashgla, "bench", *operation.split(), "--device", "cuda", "--only", problem, "--seconds", str(seconds)]
    operation = operation.split()[0]
    saved, times = folder / f"{operation}.json", folder / f"{operation}.txt"
    if not once:
        run([*bench, "--save", str(saved)])
    run([str(HERE / "kernel_times.sh"), str(times), *bench, *(["--save", str(saved)] if once else [])])
    bench_run = json.loads(saved.read_text(encoding="utf-8"))
    row = next(row for row in bench_run["rows"] if row["problem"] == problem and row["operation"] == operation)
    if "milliseconds" not in row:
        sys.exit(f"error: {problem} was not timed: {row.get('refused')}")
    rate = {each["operation"]: each for each in bench_run["rows"] if each["operation"].startswith("ceiling")}
    copy = rate["ceiling: memory copy"]["bytes"] / rate["ceiling: memory copy"]["milliseconds"]
    product = rate["ceiling: bf16 matrix product"]["flops"] / rate["ceiling: bf16 matrix product"]["milliseconds"]
    of_operators = floors(tokens)
    rows = []
    longest_first = sorted(of_one_step(counted(times), is_graph).items(), key=lambda item: -item[1][0])
    for name, (milliseconds, launches) in longest_first:
        flops, moved = of_operators.get(name, (0, 0))
        rows.append({"operator": name, "milliseconds": milliseconds, "launches": launches,
                     "floor_milliseconds": max(flops / product, moved / copy)})
    said = {key: bench_run[key] for key in ("machine", "commit", "date")}
    return {**said, "operation": operation, "problem": problem, "milliseconds": row["milliseconds"], "counted": once,
            "operators": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flashgla", nargs="?", default="build-cuda/bin/flashgla")
    parser.add_argument("--save", required=True, metavar="FILE")
    parser.add_argument("--only", default="", metavar="WHAT", help="token, prompt or training (default: all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each step is timed (default 1)")
    parser.add_argument("--once", action="store_true", help="the step's time is that of the run with kernels counted")
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="where the counts of kernels are left")
    arguments = parser.parse_args()
    if not os.access(arguments.flashgla, os.X_OK):
        sys.exit(f"error: there is no program {arguments.flashgla}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        saved = {"steps": []}
        for what, operation, problem, tokens, floors, is_graph in STEPS:
            if arguments.only not in what:
                continue
            found = step(arguments.flashgla, operation, problem, tokens, floors, is_graph,
                         arguments.seconds, folder, arguments.once)
            saved["steps"].append({"what": what, **found})
            print(f"{problem}, {what}: {found['milliseconds']:.3f} ms")
            for row in found["operators"]:
                print(f"  {row['operator']:24} {row['milliseconds']:9.3f} ms {row['launches']:7.1f} launches, "
                      f"floor {row['floor_milliseconds']:.3f} ms")
            sys.stdout.flush()
            pathlib.Path(arguments.save).write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
