"""Runs clang-tidy over the C++ sources that a build folder compiles: tidy.py BUILD_FOLDER [SOURCE...]

Sources that the build joins are looked at together, so that headers are read once for all of them. What they were found
to be is kept under a hash of all that it depends on (their text, that of the project's headers which they include, the
compiler's command, .clang-tidy), so that only what changed is looked at again. Prints the warnings; exit code 1 when
there is one."""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "flashgla" / "tidy"
HEADERS = f"{ROOT}/(bench|cli|flashgla|python|testing)/.*"  # those of the project


def texts_of(source, seen):
    """Texts of a source and, recursively, of the project's headers that it names, in an order of their own."""
    if source in seen or not source.is_file():
        return
    seen[source] = source.read_bytes().replace(str(ROOT).encode() + b"/", b"")  # joined sources are named with it
    for name in re.findall(rb'^\s*#include "([^"]+)"', seen[source], re.MULTILINE):
        texts_of(ROOT / name.decode(), seen)
        texts_of((source.parent / name.decode()).resolve(), seen)


def joined_by(unity):
    """The sources of a file by which CMake joins them."""
    return {pathlib.Path(name) for name in re.findall(r'^#include "([^"]+)"', unity.read_text(), re.MULTILINE)}


def key_of(source, command, fixed):
    seen = {}
    texts_of(source, seen)
    digest = hashlib.sha256(fixed)
    digest.update(command.replace(str(ROOT), "").encode())
    for path, text in sorted(seen.items()):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + text + b"\0")
    return digest.hexdigest()


def tidy(source, command, build, fixed):
    """The warnings of one source, from the cache where nothing changed."""
    kept = CACHE / key_of(source, command, fixed)
    if kept.exists():
        return kept.read_text(encoding="utf-8")
    done = subprocess.run(["clang-tidy", "-p", str(build), "--quiet", f"--header-filter={HEADERS}", str(source)],
                          capture_output=True, text=True, cwd=ROOT)
    said = done.stdout.replace(str(ROOT) + "/", "")
    if done.returncode != 0 and not said.strip():
        said = done.stderr
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}")
    partial.write_text(said, encoding="utf-8")
    partial.rename(kept)
    return said


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    only = {pathlib.Path(name).resolve() for name in sys.argv[2:]}
    rows = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    commands, sources = {}, 0
    for row in rows:
        source = pathlib.Path(row["directory"], row["file"]).resolve()
        generated = not source.is_relative_to(ROOT) or source.relative_to(ROOT).parts[0].startswith("build")
        joined = joined_by(source) if source.parent.name == "Unity" else {source}
        if source.suffix in (".cpp", ".cxx") and (not generated or source not in joined) and joined & (only or joined):
            commands.setdefault(source, " ".join(shlex.split(row["command"])[1:]))
            sources += len(joined)
    version = subprocess.run(["clang-tidy", "--version"], capture_output=True, check=True).stdout
    fixed = version + (ROOT / ".clang-tidy").read_bytes() + pathlib.Path(__file__).read_bytes()
    in_order = sorted(commands, key=lambda source: (source.parent.name != "Unity", source))  # the longest first
    # A warning in a header comes with every source that includes it: each is shown once.
    warnings = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for said in pool.map(lambda source: tidy(source, commands[source], build, fixed), in_order):
            for block in re.split(r"^(?=\S+:\d+:\d+: (?:warning|error): )", said, flags=re.MULTILINE):
                if block.strip():
                    warnings.setdefault(block.splitlines()[0], block.rstrip())
    for block in warnings.values():
        print(block)
    print(f"{sources} sources checked, {len(warnings)} warnings")
    return 1 if warnings or not sources else 0


sys.exit(main())
