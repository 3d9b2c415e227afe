#!/usr/bin/env python3
"""What Nsight Compute says of the CUDA kernels of gated_linear_attention, as a table in Markdown.

    scripts/ncu_table.py [FLASHGLA] [--implementation NAME] [--only PROBLEM]... > table.md

FLASHGLA is the program (default build-cuda/bin/flashgla). For each problem of the bench it finds the launches of one
forward and of one forward and backward with states kept, and profiles those: caches as the launches before left them,
clocks free. Needs ncu on PATH and the right to read the device's counters.
"""

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys

PROBLEMS = [
    "B32 T2048 H16 K64 V64 bf16 key gate",
    "B32 T2048 H16 K64 V64 bf16 scalar gate",
    "B32 T2048 H16 K64 V64 bf16 none gate",
    "B16 T2048 H4 K128 V256 bf16 key gate",
    "B8 T4096 H4 K256 V512 bf16 key gate",
    "B8 T4096 H4 K256 V512 bf16 none gate",
    "B1 T32768 H4 K256 V512 bf16 key gate",
    "B1 T2048 H4 K256 V512 bf16 key gate",
    "B32 T2048 H16 K64 V64 f16 key gate",
    "B32 T2048 H16 K64 V64 f32 key gate",
    "B64 T1 H4 K256 V512 bf16 key gate",
]
KERNELS = "regex:gated_linear_attention"  # not those that measure the device
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
METRICS = {
    "time": "gpu__time_duration.sum",
    "memory": "dram__bytes.sum.per_second",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
    "static": "launch__shared_mem_per_block_static",
    "dynamic": "launch__shared_mem_per_block_dynamic",
}
# ncu chooses the unit of each column.
UNITS = {
    "byte/s": 1.0, "Kbyte/s": 1e3, "Mbyte/s": 1e6, "Gbyte/s": 1e9, "Tbyte/s": 1e12,
    "byte/block": 1.0, "Kbyte/block": 1e3,
    "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0,
}


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def launches(ncu, bench):
    """Of each launch, in order: its columns, and their units."""
    lines = run(["ncu", "--csv", "--page", "raw", "--cache-control", "none", "--clock-control", "none", "-k", KERNELS,
                 "--kernel-name-base", "demangled"] + ncu + bench).splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        sys.exit(f"error: ncu saw no kernel in {' '.join(bench)}")
    rows = list(csv.DictReader(io.StringIO("\n".join(line for line in lines[first:] if line.startswith('"')))))
    return rows[1:], rows[0]


def short(name):
    """A kernel's name and template arguments, without where it is from."""
    place = r"flashgla::ops::|gated_linear_attention::|cuda::|[<(](anonymous namespace|unnamed)[>)]::"
    name = re.sub(place + "|^void |TensorCore", "", name)
    return re.match(r"\w+(<.*?>(?=\())?", name).group()


def shape(text):
    """(64, 4, 1) as 64x4."""
    return "x".join(n for n in re.findall(r"\d+", text) if n != "1") or "1"


def number(text):
    return float(text.replace(",", ""))


def profile(bench, skip, count):
    """Rows of the table for `count` launches from number `skip` on."""
    ncu = ["--launch-skip", str(skip), "--launch-count", str(count), "--section", "WarpStateStats", "--metrics",
           ",".join(METRICS.values())]
    rows, units = launches(ncu, bench)
    for row in rows:
        values = {name: number(row[metric]) * UNITS.get(units[metric], 1.0) for name, metric in METRICS.items()}
        stalls = {m.group(1): number(row[column]) for column in row if (m := STALL.fullmatch(column))}
        stalls.pop("selected", None)  # no stall
        total = sum(stalls.values())
        worst = sorted(stalls.items(), key=lambda item: -item[1])[:3]
        yield [
            f"`{short(row['Kernel Name'])}`", f"{shape(row['Grid Size'])} of {shape(row['Block Size'])}",
            f"{values['registers']:.0f}", f"{(values['static'] + values['dynamic']) / 1024:.0f}",
            f"{values['time'] * 1e6:.1f}", f"{values['memory'] * 1e-12:.2f}",
            *(f"{values[name]:.0f}%" for name in ("L2", "tensor", "issue")),
            ", ".join(f"{name.replace('_', ' ')} {100 * value / total:.0f}%" for name, value in worst),
        ]


def period(names):
    """How many launches repeat from the first on."""
    return next((n for n in range(1, len(names) // 2 + 1) if names[:n] == names[n:2 * n]), len(names))


def calls(names):
    """(skip, count) of the first forward, and of the first forward and backward: the bench runs each several times."""
    forward = period(names)
    at = forward
    while names[at:at + forward] == names[:forward]:
        at += forward
    both = period(names[at:])
    # What looked like one more forward may have been the beginning of the first forward and backward.
    if at > forward and names[at - forward:at] == names[at - forward + both:at + both]:
        at -= forward
    return (0, forward), (at, both)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flashgla", nargs="?", default="build-cuda/bin/flashgla")
    parser.add_argument("--implementation", default="cuda_sm90")
    parser.add_argument("--only", action="append", help="a problem of the bench (default: headline cases)")
    arguments = parser.parse_args()
    for program in ("ncu", arguments.flashgla):
        if shutil.which(program) is None:
            sys.exit(f"error: there is no program {program}")
    columns = ["call", "kernel", "blocks of threads", "registers", "shared KiB", "us", "TB/s", "L2", "tensor", "issue",
               "what warps wait for"]
    for problem in arguments.only or PROBLEMS:
        bench = [arguments.flashgla, "bench", "gated_linear_attention", "--device", "cuda", "--implementation",
                 arguments.implementation, "--seconds", "0.0001", "--only", problem]
        rows, _ = launches(["--metrics", METRICS["time"]], bench)
        forward, both = calls([row["Kernel Name"] + row["Grid Size"] for row in rows])
        found = [("step", forward)] if " T1 " in problem else [("forward", forward), ("both", both)]
        print(f"\n{problem}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        for call, (skip, count) in found:
            for row in profile(bench, skip, count):
                print(f"| {' | '.join([call] + row)} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
