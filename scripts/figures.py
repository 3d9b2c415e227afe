#!/usr/bin/env python3
"""Writes the tables of figures in the documents from saved runs of `flashgla bench` and `scripts/fuzz.sh`.

  scripts/figures.py              writes every table anew from docs/figures/
  scripts/figures.py RUN.json...  the same, after taking runs (bench --save) into docs/figures/
  scripts/figures.py --check      says which tables are not what the saved runs say; exit code 1 when there is one

A table stands in a document between `<!-- figures: NAME -->` and `<!-- /figures -->`. TABLES below says what is in it.
One whose run nobody has saved yet is left as it is."""

import functools
import json
import math
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
FORWARD, BOTH = "gated_linear_attention forward", "gated_linear_attention fwd+bwd"
RECOMPUTED = BOTH + ", states recomputed"
STEP = "gated_linear_attention step"
PEERS = ("softmax_", "fla_", "transformers_")  # how names of other libraries' implementations begin


class Missing(Exception):
    """A run, or a row of it, that a table needs."""


class Run:
    """A file of `flashgla bench --save`."""

    def __init__(self, path):
        if not path.exists():
            raise Missing(f"{path.relative_to(ROOT)} is not saved yet")
        self.__dict__.update(json.loads(path.read_text(encoding="utf-8")))
        self.path = path
        self.used = []  # rows that tables were made of

    def row(self, operation, problem, implementation=None):
        """The first row of an operation and problem; without implementation: of the fastest that is not a peer."""
        found = [row for row in self.rows if row["operation"] == operation and row["problem"] == problem
                 and "milliseconds" in row and (implementation is None or row["implementation"] == implementation)
                 and (implementation or not row["implementation"].startswith(PEERS))]
        if not found:
            raise Missing(f"{self.path.relative_to(ROOT)} has no row '{operation}' of '{problem}'")
        self.used.append(min(found, key=lambda row: row["milliseconds"]))
        return self.used[-1]

    def timed(self):
        """All rows but ceilings, reference implementations and peers."""
        found = [row for row in self.rows if "milliseconds" in row and not row["operation"].startswith("ceiling")
                 and row["implementation"] != "reference" and not row["implementation"].startswith(PEERS)]
        self.used += found
        return found

    def rate(self, ceiling, quantity):
        """FLOPs or bytes per second of a ceiling."""
        row = next((row for row in self.rows if row["operation"] == "ceiling: " + ceiling), None)
        if row is None:
            raise Missing(f"{self.path.relative_to(ROOT)} has no ceiling '{ceiling}'")
        return row[quantity] / row["milliseconds"] * 1e3

    def origin(self, rows=()):
        """Where rows are from: of a file made in several calls each row says so itself (take)."""
        said = {name: list(dict.fromkeys(row.get(name, getattr(self, name)) for row in rows)) or [getattr(self, name)]
                for name in ("command", "commit", "date")}
        calls = f"`{said['command'][0]}`"
        if len(said["command"]) > 1:
            words = [command.split() for command in said["command"]]
            common = [word for word in words[0] if all(word in each for each in words)]
            calls = f"`{' '.join(common)}` in {len(words)} calls"
        commits = ("commit " if len(said["commit"]) == 1 else "commits ") + ", ".join(said["commit"])
        return f"{calls}, {commits}, {', '.join(said['date'])}, {self.machine}"


def milliseconds(row):
    value = row["milliseconds"]
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


def sentences(*parts):
    """Text in lines of at most 120 characters."""
    return textwrap.fill(" ".join(parts), 120, break_long_words=False, break_on_hyphens=False)


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head),
                      *("| " + " | ".join(row) + " |" for row in rows)])


def cpu_table():
    run = Run(FIGURES / "cpu.json")
    product, read = run.rate("fp32 matrix product", "flops"), run.rate("memory read", "bytes")

    def of_product(operation, problem):
        row = run.row(operation, problem)
        return f"{row['flops'] / row['milliseconds'] * 1e3 / product:.2f} of the matrix product", row

    rows = []
    headline = "B2 T2048 H4 K128 V128 {} key gate"
    for dtype in ("f32", "bf16"):
        for operation, name in ((FORWARD, "forward"), (BOTH, "forward and backward")):
            share, row = of_product(operation, headline.format(dtype))
            rows.append([f"GLA {name}, chunk form, {dtype}, B2 T2048 H4 K128 V128", share, f"{milliseconds(row)} ms"])
    share, row = of_product("model_training_step", "d256 8 layers 8x512 tokens f32")
    rows.append(["training step (forward, backward, AdamW), d 256, 8 layers, 8 x 512 tokens, f32", share,
                 f"{milliseconds(row)} ms"])
    row = run.row("model_decoding", "gla-340m batch 1 bf16")
    share = row["bytes"] / row["milliseconds"] * 1e3 / read
    rows.append(["decoding, `gla-340m`, bf16, batch 1", f"{share:.2f} of the memory's read rate",
                 f"{1e3 / row['milliseconds']:.0f} tokens/s"])
    origin = sentences(f"{run.origin()}, {run.threads} threads. In the same run oneDNN's fp32 product of 1024 x 1024",
                       f"matrices had {product / 1e9:.0f} GFLOP/s, and memory was read at {read / 1e9:.1f} GB/s.")
    return origin + "\n\n" + table(["what", "share", ""], rows)


CPU_THREADS = [  # name, operation, problem
    ("GLA forward, chunk form, f32, B2 T2048 H4 K128 V128", FORWARD, "B2 T2048 H4 K128 V128 f32 key gate"),
    ("GLA forward and backward, the same", BOTH, "B2 T2048 H4 K128 V128 f32 key gate"),
    ("training step, d 256, 8 layers, 8 x 512 tokens, f32", "model_training_step", "d256 8 layers 8x512 tokens f32"),
    ("the same of a Transformer", "model_training_step", "transformer d256 8 layers 8x512 tokens f32"),
    *((f"token of `gla-340m`, {name}", "model_decoding", f"gla-340m batch 1 bf16{kind}")
      for name, kind in (("bf16", ""), ("q8", " q8"), ("q4", " q4"))),
]


def cpu_threads_table():
    """Milliseconds by the number of threads, in brackets the share of the floor by the ceilings of each row's run."""
    run = Run(FIGURES / "cpu-threads.json")
    counts = sorted({row["threads"] for row in run.rows})
    used = []

    def cell(operation, problem, threads):
        found = [row for row in run.rows if (row["operation"], row["problem"], row["threads"])
                 == (operation, problem, threads) and row["implementation"] in ("all", "cpu_chunk")]
        used.extend(found)
        if not found:
            return ""
        return f"{milliseconds(found[0])} ({found[0]['floor_milliseconds'] / found[0]['milliseconds']:.2f})"

    rows = [[name, *(cell(operation, problem, threads) for threads in counts)]
            for name, operation, problem in CPU_THREADS]
    rows = [row for row in rows if any(row[1:])]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in used))
    dates = ", ".join(dict.fromkeys(row["date"] for row in used))
    said = sentences(f"`flashgla bench --threads N` in several calls, commit {commits}, {dates}, {run.machine}.",
                     "Milliseconds by the number of threads, in brackets the share of what",
                     "oneDNN's fp32 product (GLA, training) or reading memory (tokens) did with as many in that call.")
    return said + "\n\n" + table(["threads", *map(str, counts)], rows)


GPU_CASES = [  # name, problem
    ("key gate, B32 T2048 H16 K64 V64", "B32 T2048 H16 K64 V64 bf16 key gate"),
    ("key gate, B16 T2048 H4 K128 V256", "B16 T2048 H4 K128 V256 bf16 key gate"),
    ("key gate, B8 T4096 H4 K256 V512", "B8 T4096 H4 K256 V512 bf16 key gate"),
    ("no gate, B8 T4096 H4 K256 V512", "B8 T4096 H4 K256 V512 bf16 none gate"),
    ("no gate, B32 T2048 H16 K64 V64", "B32 T2048 H16 K64 V64 bf16 none gate"),
    ("constant gate, B32 T2048 H16 K64 V64", "B32 T2048 H16 K64 V64 bf16 constant gate"),
    ("scalar gate, B32 T2048 H16 K64 V64", "B32 T2048 H16 K64 V64 bf16 scalar gate"),
    ("key gate, B32 T2048 H16 K64 V64, float16", "B32 T2048 H16 K64 V64 f16 key gate"),
    ("key gate, B32 T2048 H16 K64 V64, float32", "B32 T2048 H16 K64 V64 f32 key gate"),
]
GPU_MORE_CASES = [
    ("key gate, B1 T32768 H4 K256 V512", "B1 T32768 H4 K256 V512 bf16 key gate"),
    ("key gate, B1 T2048 H4 K256 V512", "B1 T2048 H4 K256 V512 bf16 key gate"),
    ("key gate, B32 T512 H16 K64 V64", "B32 T512 H16 K64 V64 bf16 key gate"),
    ("key gate, B32 T1024 H16 K64 V64", "B32 T1024 H16 K64 V64 bf16 key gate"),
]


def of_floor(row):
    """Empty where the row beats its floor: then the run's ceiling was disturbed by something else on the machine."""
    share = row["floor_milliseconds"] / row["milliseconds"]
    return f"{share:.2f}" if share <= 1.0 else ""


def softmax_row(run, problem):
    """The faster of PyTorch's kernels, when the run had peers."""
    cells = [f"softmax attention (PyTorch) as wide, {problem.split(' bf16')[0]}"]
    for operation in (FORWARD, BOTH):
        peers = [run.row(operation, problem, row["implementation"]) for row in run.rows
                 if row["implementation"].startswith("softmax") and row["operation"] == operation
                 and row["problem"] == problem and "milliseconds" in row]
        if not peers:
            return None
        cells += [milliseconds(min(peers, key=lambda row: row["milliseconds"])), ""]
    return cells


def gpu_rows(run, cases, more):
    rows = []
    for name, problem in cases:
        forward, both = run.row(FORWARD, problem), run.row(BOTH, problem)
        cells = [name, milliseconds(forward), of_floor(forward), milliseconds(both), of_floor(both)]
        rows.append(cells + ([f"{both['memory_bytes'] / 2**20:.0f}", f"{both['error']:.1e}"] if more else []))
        softmax = softmax_row(run, problem)
        if softmax:
            rows.append(softmax + (["", ""] if more else []))
    return rows


GPU_HEAD = ["case", "forward ms", "of the floor", "forward + backward ms", "of the floor"]


def gpu_table():
    run = Run(FIGURES / "gpu.json")
    rows = gpu_rows(run, GPU_CASES, more=False)
    return sentences(run.origin(run.used) + ".") + "\n\n" + table(GPU_HEAD, rows)


def gpu_operator_table():
    run = Run(FIGURES / "gpu.json")
    rows = gpu_rows(run, GPU_CASES + GPU_MORE_CASES, more=True)
    for states in ("", ", bf16 states"):
        try:
            step = run.row(STEP, "B64 T1 H4 K256 V512 bf16 key gate" + states)
        except Missing:  # of a run whose --implementation has no step
            continue
        rows.append([f"step, B64 H4 K256 V512{states or ', f32 states'}", milliseconds(step), of_floor(step), "", "",
                     "", f"{step['error']:.1e}"])
    copy, product = run.rate("memory copy", "bytes"), run.rate("bf16 matrix product", "flops")
    origin = sentences(run.origin(run.used) + f". Ceilings there: copy {copy / 1e12:.2f} TB/s (read + written), bf16",
                       f"products with operands on chip {product / 1e12:.0f} TFLOP/s.")
    return origin + "\n\n" + table([*GPU_HEAD, "MiB", "error"], rows)


GATES = [  # name, what bench calls them
    ("logsigmoid(normal) / 16", ""), ("times 1", " x1"), ("times 2", " x2"),
    ("one channel in 16 at -3", " fast channels"), ("times 4", " x4"), ("times 16", " x16"),
    ("one token in a thousand of a head at -inf", " resets"), ("/ 16, as logits", " as logits"),
    ("/ 16, in f32", " in f32"),
]


def gpu_gates_table():
    """Milliseconds of every strength of gates, and over those of gates / 16."""
    run = Run(FIGURES / "gpu.json")
    rows = [[name] for name, _ in GATES]
    for problem in ("B32 T2048 H16 K64 V64", "B16 T2048 H4 K128 V256", "B8 T4096 H4 K256 V512"):
        for operation in (FORWARD, BOTH):
            plain = run.row(operation, f"{problem} bf16 key gate")
            for cells, (_, gates) in zip(rows, GATES):
                try:
                    row = run.row(operation, f"{problem} bf16 key gate{gates}")
                except Missing:  # of a run that was cut short
                    cells.append("")
                    continue
                ratio = row["milliseconds"] / plain["milliseconds"]
                cells.append(milliseconds(row) + (f" ({ratio:.2f})" if gates else ""))
    return sentences(run.origin(run.used) + ".") + "\n\n" + table(
        ["gates", "64x64, B32 T2048 H16: forward", "forward + backward", "128x256, B16 T2048 H4: forward",
         "forward + backward", "256x512, B8 T4096 H4: forward", "forward + backward"], rows)


def gpu_training_table():
    run = Run(FIGURES / "gpu-training.json")
    rows = []
    for row in run.timed():
        sequences, length = (int(number) for number in re.search(r" (\d+)x(\d+) ", row["problem"]).groups())
        tokens = sequences * length * 1e3 / row["milliseconds"]
        name = re.sub(r"(\d)x(\d)", r"\1 x \2", row["problem"])
        rows.append([name, milliseconds(row), f"{tokens:,.0f}", of_floor(row)])
    return (sentences(run.origin(run.used) + ". A step of the optimizer, everything included; the floor is that of its",
                      "matrix products' FLOPs.") + "\n\n" +
            table(["model, sequences x tokens", "ms a step", "tokens a second", "of the floor"], rows))


PEER_NAMES = {"fla_eager": "flash-linear-attention", "transformers_eager": "transformers",
              "transformers_compiled": "transformers, compiled",
              "transformers_static_cache_compiled": "transformers, static cache, compiled"}


def gpu_peers_table():
    """Whole models beside the fastest of other libraries' that the same call timed."""
    what = {"model_training_step": "a step of", "model_prefill": "a prompt,", "model_decoding": "a token of"}
    used, rows = [], []
    for file in ("gpu-training", "gpu-decoding"):
        run = Run(FIGURES / f"{file}.json")
        peers = [row for row in run.rows if row["implementation"].startswith(PEERS) and row["operation"] in what]
        for row in run.timed():
            theirs = [peer for peer in peers if all(peer[key] == row[key] for key in (
                "operation", "problem", "commit", "date", "command"))]
            if theirs:
                peer = min(theirs, key=lambda each: each["milliseconds"])
                name = PEER_NAMES[peer["implementation"].removesuffix("_bf16_weights_and_moments")]
                rows.append([f"{what[row['operation']]} {row['problem']}", milliseconds(row), name, milliseconds(peer),
                             f"{peer['milliseconds'] / row['milliseconds']:.2f}"])
                used.append(row)
    if not used:
        raise Missing("no call with peers of whole models is saved yet")
    return sentences(run.origin(used) + ". Theirs keep weights and moments in bf16, ours have f32 masters and moments.",
                     "FLA's kernels had been tuned before.") + "\n\n" + table(
        ["what", "ours, ms", "beside", "theirs, ms", "theirs over ours"], rows)


# Operators in gpu-operators.json whose rows have other names than theirs.
OPERATIONS = {"elementwise": ("add", "add_to", "convert", "scale", "zero", "column_sum", "silu", "squared_relu",
                              "sigmoid_gate"),
              "global_norm": ("sum", "non-finite")}
OPERATORS = ("adamw", "elementwise", "embedding", "feature_map", "global_norm", "hyena_filter", "layer_norm",
             "log_sigmoid_gate", "long_convolution", "rms_norm", "rms_norm_swish_gate", "short_convolution", "swiglu",
             "token_shift", "wkv")
CPU_OPERATORS = ("hyena_filter", "long_convolution", "token_shift", "wkv")


def cpu_operator_rows(name):
    """An operator's share of the rate at which the CPU's memory is read."""
    run = Run(FIGURES / "cpu-operators.json")
    read = run.rate("memory read", "bytes")
    used = [row for row in run.timed() if row["operation"].split()[0] == name]
    if not used:
        raise Missing(f"{run.path.relative_to(ROOT)} has no row of {name}")
    rows = [[row["operation"].removeprefix(name + " "), row["problem"],
             f"{row['bytes'] / row['milliseconds'] * 1e3 / read:.2f}"] for row in used]
    origin = sentences(f"{run.origin(used)}, {run.threads} threads; memory was read at {read / 1e9:.1f} GB/s.")
    return origin + "\n\n" + table(["what", "of", "of the memory's read rate"], rows)


def copy_rate(run, row):
    """Bytes per second of a copy in a row's own call: its floor is of it where bytes bound it, as no other bound is
    near; else in the file's last call."""
    copy, own = run.rate("memory copy", "bytes"), row["bytes"] / row["floor_milliseconds"] * 1e3
    return own if own > 0.95 * copy else copy


def gpu_operator_rows(name):
    """An operator that is bound by memory: its share of the rate at which the GPU copies."""
    run = Run(FIGURES / "gpu-operators.json")
    used = {}
    for row in run.timed():
        what = row["operation"], row["problem"]
        if what[0].split()[0] in OPERATIONS.get(name, (name,)):
            used[what] = min(used.get(what, row), row, key=lambda each: each["milliseconds"])
    if not used:
        raise Missing(f"{run.path.relative_to(ROOT)} has no row of {name}")
    rows = []
    for (operation, problem), row in used.items():
        rate = row["bytes"] / row["milliseconds"] * 1e3
        rows.append([operation.removeprefix(name + " "), problem, milliseconds(row), f"{rate / 1e12:.2f}",
                     f"{rate / copy_rate(run, row):.2f}"])
    copies = sorted({f"{copy_rate(run, row) / 1e12:.2f}" for row in used.values()})
    copy = " to ".join(dict.fromkeys((copies[0], copies[-1])))
    origin = sentences(run.origin(used.values()) + f"; a copy of 1 GiB: {copy} TB/s (read and written).")
    return origin + "\n\n" + table(["what", "of", "ms", "TB/s", "of the copy"], rows)


def gpu_scan_table():
    """Mamba's scan: shares of its own floor, which exponentials bound."""
    run = Run(FIGURES / "gpu-operators.json")
    rows = [row for row in run.timed() if row["operation"].startswith("selective_scan")]
    if not rows:
        raise Missing(f"{run.path.relative_to(ROOT)} has no row of selective_scan")
    cells = [[row["operation"].removeprefix("selective_scan "), row["problem"], milliseconds(row), of_floor(row)]
             for row in rows]
    return sentences(run.origin(rows) + ".") + "\n\n" + table(["what", "of", "ms", "of the floor"], cells)


def gpu_decoding_table():
    run = Run(FIGURES / "gpu-decoding.json")
    rows = []
    for row in run.timed():
        if row["operation"] == "model_decoding":
            sequences = int(re.search(r"batch (\d+)", row["problem"])[1])
            tokens = sequences * 1e3 / row["milliseconds"]  # a second
            rows.append(["a token of " + row["problem"], milliseconds(row), of_floor(row), f"{tokens:,.0f} tokens/s"])
        elif row["operation"] == "model_prefill":
            tokens = int(re.search(r"1x(\d+)", row["problem"])[1]) * 1e3 / row["milliseconds"]
            rows.append(["a prompt, " + row["problem"], milliseconds(row), of_floor(row), f"{tokens:,.0f} tokens/s"])
        elif row["operation"] == "model_load":
            rows.append(["reading the checkpoint of " + row["problem"], milliseconds(row), "",
                         f"{row['bytes'] / row['milliseconds'] / 1e6:.1f} GB/s"])
    shown = [row for row in run.used if row["operation"].startswith("model_")]
    return sentences(run.origin(shown) + ".") + "\n\n" + table(["what", "ms", "of the floor", ""], rows)


def gpu_steps_table(what):
    """Where a step's time goes: `flashgla bench --kernels`."""
    path = FIGURES / "gpu-steps.json"
    if not path.exists():
        raise Missing(f"{path.relative_to(ROOT)} is not saved yet")
    saved = json.loads(path.read_text(encoding="utf-8"))
    step = next((step for step in saved["steps"] if step["what"] == what), None)
    if step is None:
        raise Missing(f"{path.relative_to(ROOT)} has no {what}")
    kernels = sum(row["milliseconds"] for row in step["operators"])
    least = 0.002 * kernels
    shown = [row for row in step["operators"] if row["milliseconds"] >= least]
    rest = [row for row in step["operators"] if row["milliseconds"] < least]
    if rest:
        sums = {key: sum(row[key] for row in rest) for key in ("milliseconds", "launches", "floor_milliseconds")}
        shown.append({"operator": f"{len(rest)} others", **sums, "floor_milliseconds": 0.0})
    rows = [[row["operator"], f"{row['milliseconds']:.3g}", f"{row['launches']:.0f}",
             f"{row['milliseconds'] / kernels:.1%}",
             f"{row['floor_milliseconds'] / row['milliseconds']:.2f}" if row["floor_milliseconds"] else ""]
            for row in shown]
    origin = sentences(f"`{step['command']}`, commit {step['commit']}, {step['date']}, {step['machine']}:",
                       f"{step['problem']}, {milliseconds(step)} ms, {kernels:.3g} ms of them in kernels.")
    return origin + "\n\n" + table(["operator", "ms", "launches", "of all", "its floor over its time"], rows)


def gpu_attention_table():
    run = Run(FIGURES / "gpu-attention.json")
    rows, timed = [], run.timed()
    for row in timed:
        rate = row["flops"] / row["milliseconds"] / 1e9 if row.get("flops") else 0.0
        of_products = row["operation"] != "rotary" and rate > 20.0
        rows.append([row["operation"].replace("_", " "), row["problem"], milliseconds(row),
                     f"{rate:.0f}" if of_products else "", of_floor(row)])
    return (sentences(run.origin(timed) + ".") + "\n\n" +
            table(["what", "of", "ms", "TFLOP/s", "least possible over measured"], rows))


def fuzz_runs():
    """All runs of scripts/fuzz.sh that were taken, in order; (inputs by target, failures, "commits, dates")."""
    path = FIGURES / "fuzzing.json"
    if not path.exists():
        raise Missing(f"{path.relative_to(ROOT)} is not saved yet")
    runs = json.loads(path.read_text(encoding="utf-8"))
    inputs = {}
    for run in runs:
        for name, count in run["targets"].items():
            inputs[name] = inputs.get(name, 0) + count
    commits = list(dict.fromkeys(run["commit"] for run in runs))
    dates = list(dict.fromkeys(run["date"] for run in runs))
    when = ("commit " if len(commits) == 1 else "commits ") + ", ".join(commits) + ", " + ", ".join(dates)
    return runs, inputs, sum(run["failed"] for run in runs), when


def fuzz_sentence():
    _, inputs, failed, when = fuzz_runs()
    found = ("none crashed it, hung it, or made it take memory out of proportion." if failed == 0 else
             f"{failed} targets found a defect.")
    return sentences(f"Every reader of files was fed {sum(inputs.values()):,} made-up inputs in all under sanitizers",
                     f"([`testing/fuzz`](testing/fuzz/README.md), {when}):", found)


def fuzz_table():
    runs, inputs, failed, when = fuzz_runs()
    rows = [[f"`{name}`", f"{count:,}"] for name, count in sorted(inputs.items())]
    seconds = " and ".join(str(run["seconds"]) for run in runs)
    origin = sentences(f"`scripts/fuzz.sh SECONDS` ({seconds} s a target), {when}: {sum(inputs.values()):,} inputs,",
                       "no target failed." if failed == 0 else f"{failed} failures.")
    return origin + "\n\n" + table(["target", "inputs"], rows)


def small_models_sentences():
    """How good quickstart's model and char-level's become: scripts/small_models.py."""
    path = FIGURES / "small-models.json"
    if not path.exists():
        raise Missing(f"{path.relative_to(ROOT)} is not saved yet")
    saved = json.loads(path.read_text(encoding="utf-8"))

    def seeds(recipe, figure):
        runs = [run for run in saved["runs"] if run["recipe"] == recipe]
        values = ", ".join(f"{run[figure]:.3f}" for run in runs)
        return f"{values} (seeds {', '.join(str(run['seed']) for run in runs)})"

    tokens = {run["recipe"]: run["tokens"] / 1e6 for run in saved["runs"]}
    return sentences(
        f"`quickstart.sh`'s model, {tokens['quickstart']:.1f}M bytes of training: {seeds('quickstart', 'bpb')} bits a",
        f"byte of stories whose true entropy is {saved['stories']['entropy_bits_per_byte']:.3f}. A text of 1.1 MB by",
        f"characters, 0.80M parameters, {tokens['char-level']:.1f}M characters of training",
        "(`configs/char-level.json`):",
        f"{seeds('char-level', 'loss')} nats a character. Validation at the end, f32, `scripts/small_models.py`,",
        f"commit {saved['commit']}, {saved['date']}.")


def quantisation():
    path = FIGURES / "quantisation.json"
    if not path.exists():
        raise Missing(f"{path.relative_to(ROOT)} is not saved yet")
    return json.loads(path.read_text(encoding="utf-8"))


def quantisation_tables():
    """What few bits cost: scripts/quantisation_report.py."""
    saved = quantisation()
    floats = saved["quantised"][0]

    def cells(row):
        size, perplexity = f"{row['bytes'] / 1e6:.1f}", f"{math.exp(row['loss']):.4f}"
        if row is floats:
            return row["name"], size, perplexity, "", ""
        more = f"{100 * math.expm1(row['loss'] - floats['loss']):+.2f} %"
        return row["name"], size, perplexity, more, f"{row['kl']:.5f}"

    head = ("weights", "MB", "perplexity", "more", "KL, nats")
    said = sentences(saved["about"], f"Perplexity over {saved['tokens']:,} tokens in windows of {saved['window']:,},",
                     f"KL over {saved['kl_tokens']:,} of them. `scripts/quantisation_report.py`,",
                     f"commit {saved['commit']}, {saved['date']}.")
    return "\n\n".join([said, table(head, [cells(row) for row in saved["quantised"] if row["preset"]]),
                        table(("only these, in q4", *head[1:]),
                              [(name.removesuffix(" in q4"), *rest) for name, *rest in
                               (cells(row) for row in saved["quantised"] if not row["preset"])])])


def quantisation_length_table():
    saved = quantisation()
    floats = saved["quarters"]["floats"]
    rows = []
    for name, losses in saved["quarters"].items():
        more = [100 * math.expm1(loss - reference) for loss, reference in zip(losses, floats)]
        rows.append((name, *(f"{math.exp(loss):.3f}" + ("" if name == "floats" else f" ({part:+.2f} %)")
                             for loss, part in zip(losses, more))))
    return table(("weights", "first quarter of 65,536 tokens", "second", "third", "last"), rows)


TABLES = {"cpu": cpu_table, "cpu-threads": cpu_threads_table, "gpu": gpu_table, "gpu-operator": gpu_operator_table,
          "gpu-decoding": gpu_decoding_table,
          **{f"gpu-steps-{what.split()[0]}": functools.partial(gpu_steps_table, what)
             for what in ("training step", "prompt", "token")},
          "gpu-attention": gpu_attention_table, "gpu-gates": gpu_gates_table, "gpu-training": gpu_training_table,
          "gpu-peers": gpu_peers_table,
          "gpu-selective_scan": gpu_scan_table, "small-models": small_models_sentences, "fuzz": fuzz_table,
          "quantisation": quantisation_tables, "quantisation-length": quantisation_length_table,
          "fuzz-total": fuzz_sentence,
          **{f"gpu-{name}": functools.partial(gpu_operator_rows, name) for name in OPERATORS},
          **{f"cpu-{name}": functools.partial(cpu_operator_rows, name) for name in CPU_OPERATORS}}

# Which file a row of a GPU goes to, by the first word of its operation; the others go to gpu-operators.json.
KINDS = {"gated_linear_attention": "gpu", "model_decoding": "gpu-decoding", "model_prefill": "gpu-decoding",
         "model_load": "gpu-decoding", "linear_step": "gpu-decoding", "sampling": "gpu-decoding",
         "softmax_attention": "gpu-attention", "rotary": "gpu-attention", "model_training_step": "gpu-training"}


def kind_of(run, operation):
    if run["device"] == "cpu":
        return "cpu-threads" if "--threads" in run["command"] else "cpu-operators"
    return KINDS.get(operation, "gpu-operators")


def models_row(row):
    """A row as it is saved: of the sweep of lengths (Figure 6) those of 8 x 2048 and 1 x 16384 that keep everything are
    their models'. None: of the rest of that sweep."""
    if not row["problem"].startswith("by "):
        return row
    match = re.fullmatch(r"by length: (\S+ (8x2048|1x16384) \S+)", row["problem"])
    return {**row, "problem": match[1]} if match else None


def take_rows(run, kind):
    """Puts a run's rows of a kind into its file, in place of those of the same name; each says its call."""
    path = FIGURES / f"{kind}.json"
    said = {"commit": run["commit"], "date": run["date"], "command": run["command"]}
    if kind == "cpu-threads":
        said["threads"] = run["threads"]
    rows = [{**row, **said} for row in map(models_row, run["rows"]) if row and (
        row["operation"].startswith("ceiling") or kind_of(run, row["operation"].split()[0]) == kind)]
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {**run, "rows": []}
    if kept["machine"] != run["machine"]:
        raise SystemExit(f"{path.relative_to(ROOT)} is of {kept['machine']}, the run of {run['machine']}")

    def name(row):
        return row["operation"], row["problem"], row["implementation"], row.get("threads")

    new = {name(row): row for row in rows}
    old = [{**{key: kept[key] for key in said}, **row} for row in kept["rows"]]
    merged = [new.pop(name(row), row) for row in old]
    path.write_text(json.dumps({**kept, **said, "rows": [*merged, *new.values()]}, indent=1) + "\n", encoding="utf-8")
    print(f"docs/figures/{path.name}: {len(rows)} rows")


# The steps of gpu-steps.json: operation, end of the problem's name, what the tables call it.
STEPS = (("model_training_step", "gla-1.3b 8x2048 bf16", "training step"),
         ("model_prefill", "gla-1.3b 1x2048 bf16", "prompt"), ("model_decoding", "gla-1.3b batch 1 bf16", "token"))


def take_steps(run):
    """Puts where a step's time went, of rows of `flashgla bench --kernels`, into gpu-steps.json; takes it from them."""
    path = FIGURES / "gpu-steps.json"
    steps = {step["what"]: step for step in json.loads(path.read_text(encoding="utf-8"))["steps"]}
    for row in run["rows"]:
        operators = row.pop("operators", None)
        for operation, problem, what in STEPS:
            if operators and row["operation"] == operation and row["problem"].endswith(problem):
                said = {key: run[key] for key in ("machine", "commit", "date", "command")}
                step = {key: row[key] for key in ("operation", "problem", "milliseconds")}
                steps[what] = {"what": what, **said, **step, "operators": operators}
    path.write_text(json.dumps({"steps": list(steps.values())}, indent=1) + "\n", encoding="utf-8")


def take(path):
    """Takes a run into docs/figures/: of the CPU as it is, of a GPU and of a number of --threads row by row, of steps
    one by one, of scripts/fuzz.sh to those there."""
    # scripts/small_models.py has "runs", scripts/fuzz.sh "targets", scripts/quantisation_report.py "quantised".
    FIGURES.mkdir(parents=True, exist_ok=True)
    taken = json.loads(path.read_text(encoding="utf-8"))
    if "targets" in taken:
        kept = FIGURES / "fuzzing.json"
        runs = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
        kept.write_text(json.dumps([*runs, taken], indent=1) + "\n", encoding="utf-8")
        return
    if "runs" in taken:
        (FIGURES / "small-models.json").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
        return
    if "quantised" in taken:
        (FIGURES / "quantisation.json").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
        return
    run = Run(path.resolve())
    if run.commit.endswith("-dirty") or run.commit == "unknown":
        print(f"note: {path} is of commit {run.commit}; figures for the documents are best of a committed tree")
    operations = {row["operation"].split()[0] for row in run.rows if not row["operation"].startswith("ceiling")}
    if run.device == "cpu" and "--threads" not in run.command and not operations <= set(CPU_OPERATORS):
        (FIGURES / "cpu.json").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
        print(f"docs/figures/cpu.json: {run.origin()}")
        return
    if any("operators" in row for row in taken["rows"]):
        take_steps(taken)
    for kind in sorted({kind_of(taken, operation) for operation in operations}):
        take_rows(taken, kind)


def main():
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        for path in map(pathlib.Path, sys.argv[1:]):
            if not path.is_file():
                raise SystemExit(f"error: there is no run '{path}'; see {sys.argv[0]} --help")
            take(path)
    stale = 0
    found = set()
    for document in sorted(ROOT.glob("**/*.md")):
        name = document.relative_to(ROOT)
        if name.parts[0].startswith(("build", ".")):
            continue
        text = document.read_text(encoding="utf-8")

        def write(match, name=name):
            key = match[2]
            if key not in TABLES:
                raise SystemExit(f"{name}: there is no table '{key}'; known: {', '.join(TABLES)}")
            found.add(key)
            try:
                return f"{match[1]}\n{TABLES[key]()}\n{match[3]}"
            except Missing as missing:
                print(f"note: {name}, table {key}, is left as it is: {missing}")
                return match[0]

        written = re.sub(r"(<!-- figures: ([\w-]+) -->)\n(?:.*?\n)??(<!-- /figures -->)", write, text, flags=re.DOTALL)
        if written != text:
            stale += 1
            print(f"{name}: " + ("its figures are not those of docs/figures/" if check else "written"))
            if not check:
                document.write_text(written, encoding="utf-8")
    for key in TABLES.keys() - found:
        print(f"no document has the table '{key}'")
        stale += 1
    print(f"{len(found)} tables, {stale} {'out of date' if check else 'changed'}")
    return 1 if check and stale else 0


sys.exit(main())
