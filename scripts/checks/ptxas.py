"""Checks what ptxas said of the CUDA kernels: ptxas.py BUILD_FOLDER [--write]

The build keeps ptxas' words beside each object (cmake/keep_ptxas_log.sh). Fails on
  - a kernel whose wgmma instructions are serialised,
  - a kernel that spills more than ptxas.tsv declares: nothing for sm_90a, but for rows that somebody wrote by hand, and
    for other architectures what they spilled when the table was made. These figures may only shrink,
  - a kernel with more registers than ptxas.tsv states, and one that the table does not name.
Instantiations of one kernel share a row: the most registers and the most spilled bytes of any of them. Kernels of
libraries (CUB) are left out. --write brings the table up to date; it never raises what may be spilled. Without a table
no kernel for sm_90a may spill, and registers are not looked at."""

import pathlib
import re
import subprocess
import sys

TABLE = pathlib.Path(__file__).with_suffix(".tsv")
NO_SPILLS = {"sm_90a"}
ENTRY = re.compile(r"^ptxas info +: Compiling entry function '(\w+)' for '(\w+)'")
FRAME = re.compile(r"^ +\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"^ptxas info +: Used (\d+) registers")
SERIALIZED = re.compile(r"wgmma.*serialized.*?function '(\w+)'|wgmma.*serialized")


def kernel_name(demangled):
    """A kernel's qualified name, without result, template arguments and parameters."""
    while True:
        shorter = re.sub(r"<[^<>]*>|\([^()]*\)(?! *\()", "", demangled.replace("(anonymous namespace)", "anonymous"))
        if shorter == demangled:
            break
        demangled = shorter
    return demangled.split(" ")[-1].replace("flashgla::ops::", "")


def read_logs(build, offences):
    """(architecture, mangled name) -> [registers, spilled bytes] of every kernel."""
    found = {}
    logs = sorted(build.glob("**/*.cu.o.ptxas"))
    for log in logs:
        key = None  # of the kernel that the lines are about; None: of nobody's, or a library's
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if entry := ENTRY.match(line):
                key = (entry[2], entry[1]) if "8flashgla" in entry[1] else None
                if key:
                    found[key] = [0, 0]
            elif key and (frame := FRAME.match(line)):
                found[key][1] = max(found[key][1], int(frame[1]) + int(frame[2]))
            elif key and (used := USED.match(line)):
                found[key][0] = int(used[1])
            elif SERIALIZED.search(line):
                offences.append(f"{log.relative_to(build)}: {line.strip()}")
    for kept in build.glob("**/*.cu.o"):
        if not kept.with_name(kept.name + ".ptxas").exists():
            offences.append(f"{kept.relative_to(build)}: has no log of ptxas; build it again")
    return found


def by_kernel(found):
    names = sorted({name for _, name in found})
    demangled = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    kernels = dict(zip(names, map(kernel_name, demangled.stdout.splitlines())))
    rows = {}
    for (architecture, name), (registers, spilled) in found.items():
        row = rows.setdefault((architecture, kernels[name]), [0, 0])
        row[:] = max(row[0], registers), max(row[1], spilled)
    return rows


def read_table():
    if not TABLE.exists():
        return {}
    lines = TABLE.read_text(encoding="utf-8").splitlines()[1:]
    return {(architecture, kernel): [int(registers), int(spilled)]
            for architecture, registers, spilled, kernel in (line.split("\t") for line in lines)}


def main():
    build = pathlib.Path(sys.argv[1])
    offences = []
    rows = by_kernel(read_logs(build, offences))
    stated = read_table()
    if sys.argv[2:] == ["--write"]:
        table = {key: [registers, min(spilled, stated.get(key, [0, 0])[1])]
                 for key, (registers, spilled) in rows.items()}
        if not stated:  # the first table declares what is there
            table = {key: [registers, 0 if key[0] in NO_SPILLS else spilled]
                     for key, (registers, spilled) in rows.items()}
        lines = ["\t".join([architecture, str(registers), str(spilled), kernel])
                 for (architecture, kernel), (registers, spilled) in sorted(table.items())]
        TABLE.write_text("\n".join(["architecture\tregisters\tspilled bytes\tkernel", *lines]) + "\n", encoding="utf-8")
        stated = read_table()
    if not TABLE.exists():
        print(f"note: there is no {TABLE.name} yet; --write makes it")
        stated = {key: [registers, 0 if key[0] in NO_SPILLS else spilled] for key, (registers, spilled) in rows.items()}
    for (architecture, kernel), (registers, spilled) in sorted(rows.items()):
        if (architecture, kernel) not in stated:
            offences.append(f"{kernel} for {architecture} is not in {TABLE.name} ({registers} registers, "
                            f"{spilled} bytes spilled)")
            continue
        allowed, spills = stated[architecture, kernel]
        if spilled > spills:
            offences.append(f"{kernel} for {architecture} spills {spilled} bytes; {spills} are declared")
        if registers > allowed:
            offences.append(f"{kernel} for {architecture} has {registers} registers; {allowed} are stated")
    for offence in offences:
        print(offence)
    print(f"{len(rows)} kernels checked, {len(offences)} offences")
    if offences:
        print(f"to mend: keep fewer values alive, or state the registers: python3 {sys.argv[0]} {build} --write")
    return 1 if offences or not rows else 0


sys.exit(main())
