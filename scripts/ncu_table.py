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
    "time": ["gpu__time_duration.sum"],
    "memory": ["dram__bytes.sum.per_second"],
    "L2": ["lts__throughput.avg.pct_of_peak_sustained_elapsed"],
    "tensor": [
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    ],
    "issue": ["sm__inst_issued.avg.pct_of_peak_sustained_elapsed"],
    "registers": ["launch__registers_per_thread"],
    "static": ["launch__shared_mem_per_block_static"],
    "dynamic": ["launch__shared_mem_per_block_dynamic"],
}
PER_SECOND = {"byte/s": 1.0, "Kbyte/s": 1e3, "Mbyte/s": 1e6, "Gbyte/s": 1e9, "Tbyte/s": 1e12}
BYTES = {"byte": 1.0, "byte/block": 1.0, "Kbyte": 1e3, "Kbyte/block": 1e3}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3}


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


def value_of(row, units, metric, known=None):
    text = row.get(metric, "").replace(",", "")
    if not text or text == "n/a":
        return None
    return float(text) * (known[units[metric]] if known else 1.0)


def profile(bench, skip, count, wanted):
    """Rows of the table for `count` launches from number `skip` on."""
    ncu = ["--launch-skip", str(skip), "--launch-count", str(count), "--section", "WarpStateStats", "--metrics",
           ",".join(wanted.values())]
    rows, units = launches(ncu, bench)
    for row in rows:
        get = lambda name, known=None: value_of(row, units, wanted[name], known) if name in wanted else None
        percent = lambda name: "-" if get(name) is None else f"{get(name):.0f}%"
        stalls = {m.group(1): value_of(row, units, column) for column in row if (m := STALL.fullmatch(column))}
        stalls = {name: value for name, value in stalls.items() if value and name != "selected"}
        total = sum(stalls.values())
        worst = sorted(stalls.items(), key=lambda item: -item[1])[:3]
        shared = get("static", BYTES) + get("dynamic", BYTES)
        yield [
            f"`{short(row['Kernel Name'])}`", f"{shape(row['Grid Size'])} of {shape(row['Block Size'])}",
            f"{get('registers'):.0f}", f"{shared / 1024:.0f}", f"{get('time', SECONDS) * 1e6:.1f}",
            f"{get('memory', PER_SECOND) * 1e-12:.2f}", percent("L2"), percent("tensor"), percent("issue"),
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
    known = set(re.findall(r"^(\w+)", run(["ncu", "--query-metrics", "--query-metrics-mode", "base"]), re.MULTILINE))
    wanted = {}
    for name, candidates in METRICS.items():
        found = [metric for metric in candidates if metric.split(".")[0] in known or metric.startswith("launch__")]
        if found:
            wanted[name] = found[0]
    columns = ["call", "kernel", "blocks of threads", "registers", "shared KiB", "us", "TB/s", "L2", "tensor", "issue",
               "what warps wait for"]
    for problem in arguments.only or PROBLEMS:
        bench = [arguments.flashgla, "bench", "gated_linear_attention", "--device", "cuda", "--implementation",
                 arguments.implementation, "--seconds", "0.0001", "--only", problem]
        rows, _ = launches(["--metrics", METRICS["time"][0]], bench)
        forward, both = calls([row["Kernel Name"] + row["Grid Size"] for row in rows])
        found = [("step", forward)] if " T1 " in problem else [("forward", forward), ("both", both)]
        print(f"\n{problem}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        for call, (skip, count) in found:
            for row in profile(bench, skip, count, wanted):
                print(f"| {' | '.join([call] + row)} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
