#!/usr/bin/env python3
"""A text that every machine with Python has: the sources of its own Python and of the packages installed there, a JSON
document a line, each once, in the order of their names within a package folder, until there are N MB.

    python3 python_sources.py OUT.jsonl [--megabytes N]
"""

import argparse
import hashlib
import json
import pathlib
import sys
import sysconfig

SMALLEST, LARGEST = 4_000, 1_000_000  # bytes of a file


def sources():
    paths = sysconfig.get_paths()
    for root in dict.fromkeys(pathlib.Path(paths[key]) for key in ("purelib", "platlib", "stdlib")):
        for path in sorted(root.rglob("*.py")):
            try:
                if SMALLEST <= path.stat().st_size <= LARGEST:
                    yield path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--megabytes", type=float, default=200.0)
    arguments = parser.parse_args()
    seen, size = set(), 0
    with arguments.out.open("w", encoding="utf-8") as out:
        for text in sources():
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen:
                continue
            seen.add(digest)
            out.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode())
            if size >= arguments.megabytes * 1e6:
                break
    print(f"{len(seen)} files, {size / 1e6:.0f} MB", file=sys.stderr)


main()
