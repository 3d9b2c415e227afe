"""Checks that every folder includes only what lies to its left, that CUDA stays in the cuda folders, and that files
stay readable in length. Prints each offence; exit code 1 when there is one."""

import pathlib
import re
import sys

# What each folder may include, besides itself.
ALLOWED = {
    "flashgla/base": set(),
    "flashgla/ops": {"flashgla/base"},
    "flashgla/nn": {"flashgla/base", "flashgla/ops"},
    "flashgla/mixers": {"flashgla/base", "flashgla/ops", "flashgla/nn"},
    "flashgla/text": {"flashgla/base"},
    "flashgla/data": {"flashgla/base", "flashgla/text"},
}
ALLOWED["flashgla/model"] = {"flashgla/base", "flashgla/ops", "flashgla/nn", "flashgla/mixers"}
ALLOWED["flashgla/train"] = ALLOWED["flashgla/model"] | {"flashgla/model", "flashgla/text", "flashgla/data"}
ALLOWED["flashgla/generate"] = ALLOWED["flashgla/model"] | {"flashgla/model", "flashgla/text"}
ALLOWED["flashgla/eval"] = ALLOWED["flashgla/model"] | {"flashgla/model", "flashgla/text", "flashgla/data"}
ALLOWED["testing"] = {"flashgla/base"}
ALLOWED["bench"] = ALLOWED["flashgla/train"] | {"flashgla/train", "flashgla/generate", "testing"}
ALLOWED["python"] = ALLOWED["flashgla/generate"] | {"flashgla/generate", "flashgla/eval", "flashgla/train"}
MAX_LINES = 800
SOURCE = {".h", ".cpp", ".cu", ".cuh"}


def folder_of(path):
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "flashgla" else parts[0]


def is_test(path):
    return "tests" in pathlib.PurePath(path).parts


def main():
    root = pathlib.Path(sys.argv[1])
    offences = []
    checked = 0
    patterns = ("flashgla/**/*", "testing/*", "bench/**/*", "cli/*", "python/src/*")
    paths = [path for pattern in patterns for path in root.glob(pattern)]
    for path in sorted(paths):
        if path.suffix not in SOURCE:
            continue
        checked += 1
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        folder = folder_of(name)
        if text.count("\n") > MAX_LINES:
            offences.append(f"{name}: {text.count(chr(10))} lines; split it (limit {MAX_LINES})")
        for target in re.findall(r'^\s*#include "((?:flashgla|testing|bench|cli)/[^"]+)"', text, re.MULTILINE):
            if not (root / target).exists():
                offences.append(f"{name}: includes {target}, which does not exist")
            wanted = folder_of(target)
            if folder == "cli" or wanted == folder:
                continue
            if wanted == "testing" and is_test(name):
                continue
            if wanted not in ALLOWED.get(folder, set()):
                offences.append(f"{name}: includes {target}; {folder} may include {sorted(ALLOWED.get(folder, set()))}")
        if re.search(r"#include <cuda", text) and "/cuda/" not in name:
            offences.append(f"{name}: includes CUDA outside a cuda folder")
    for offence in offences:
        print(offence)
    print(f"{checked} files checked, {len(offences)} offences")
    return 1 if offences or checked == 0 else 0


sys.exit(main())
