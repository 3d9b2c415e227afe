"""Checks the documents against the tree: links and paths that lead nowhere, environment variables that the sources read
and docs/environment.md does not name (or the other way round), speeds typed by hand into tables of READMEs, and a
changelog without the project's version.
Prints each offence; exit code 1 when there is one."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE_ENDINGS = "h|cpp|cu|cuh|py|sh|md|json|txt|cmake|toml"
ENVIRONMENT = "docs/environment.md"
# What reads a variable, by the ending of the file; "" for scripts without one.
READS = {
    ".h": r'getenv\("(\w+)"\)',
    ".cpp": r'getenv\("(\w+)"\)',
    ".cu": r'getenv\("(\w+)"\)',
    ".cuh": r'getenv\("(\w+)"\)',
    ".py": r"""(?:os\.environ\.get\(|os\.environ\[|os\.getenv\()["'](\w+)["']""",
    ".sh": r"\$\{([A-Z][A-Z0-9_]+):?[-?+]",
    "": r"\$\{([A-Z][A-Z0-9_]+):?[-?+]",
    ".cmake": r"\$ENV\{(\w+)\}",
    ".txt": r"\$ENV\{(\w+)\}",
}
# Read by libraries that we link, not by us.
READ_BY_LIBRARIES = {"OMP_NUM_THREADS"}


def tracked_files():
    """What git knows, and new files that it does not ignore."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                            check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def without_code_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text):
    """As GitHub makes them of headings."""
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", without_code_blocks(text), re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-"))
    return found


def check_links(document, offences):
    text = document.read_text(encoding="utf-8")
    name = document.relative_to(ROOT)
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code_blocks(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists():
            offences.append(f"{name}: links to {target}, which does not exist")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            offences.append(f"{name}: links to {target}, but that document has no such heading")


def check_paths(document, files, offences):
    """`folder/file.ext` in a text is how the path of some file ends."""
    name = document.relative_to(ROOT)
    whole = [file.relative_to(ROOT).parts for file in files]
    ends = {"/".join(parts[i:]) for parts in whole for i in range(len(parts))}
    text = without_code_blocks(document.read_text(encoding="utf-8"))
    for path in set(re.findall(rf"`((?:[\w.-]+/)+[\w.-]+\.(?:{SOURCE_ENDINGS}))`", text)):
        if path.startswith(("runs/", "build", "checkpoints/")):
            continue
        if not (document.parent / path).exists() and path not in ends:
            offences.append(f"{name}: names `{path}`, which does not exist")


def check_lines(document, offences):
    """At most 120 characters a line, tables apart; a README has at most 150 such lines."""
    name = document.relative_to(ROOT)
    lines = [line for line in document.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("|")]
    for line in lines:
        if len(line) > 120 and "](" not in line:
            offences.append(f"{name}: a line of {len(line)} characters (120 at most): {line[:60]}...")
    if document.name == "README.md" and len(lines) > 150:
        offences.append(f"{name}: {len(lines)} lines beside its tables (150 at most); what is history goes to LOG.md")


# Kernels' designs, whose tables hold what was predicted and why.
DESIGNS = "flashgla/ops/gated_linear_attention/cuda/"
MEASURED = r"\d ?(?:ms|us|tok/s|tokens/s|[KMGT]B/s|[GT]FLOP/s|TFLOPS)\b"


def check_figures(document, offences):
    """Speeds in a README's tables are written by scripts/figures.py from saved runs; others belong into a LOG.md."""
    name = document.relative_to(ROOT)
    if document.name != "README.md" or name.as_posix().startswith(DESIGNS):
        return
    text = re.sub(r"<!-- figures: .*?<!-- /figures -->", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for line in text.splitlines():
        if line.lstrip().startswith("|") and re.search(MEASURED, line):
            offences.append(f"{name}: a speed typed by hand (docs/figures/README.md, or LOG.md): {line[:60]}...")


def check_environment(files, offences):
    read = {}
    for file in files:
        name = file.relative_to(ROOT)
        pattern = READS.get(file.suffix)
        if pattern is None or (file.suffix == "" and not file.read_bytes().startswith(b"#!")):
            continue
        for variable in re.findall(pattern, file.read_text(encoding="utf-8")):
            read.setdefault(variable, name)
    documented = set(re.findall(r"^\| `(\w+)` \|", (ROOT / ENVIRONMENT).read_text(encoding="utf-8"), re.MULTILINE))
    for variable in sorted(set(read) - documented):
        offences.append(f"{read[variable]}: reads {variable}, which {ENVIRONMENT} does not name")
    for variable in sorted(documented - set(read) - READ_BY_LIBRARIES):
        offences.append(f"{ENVIRONMENT}: names {variable}, which nothing reads")


def check_version(offences):
    project = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    version = re.search(r"project\(FlashGLA VERSION ([0-9.]+)", project)[1]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[1]
    if newest != version:
        offences.append(f"CHANGELOG.md: its newest version is {newest}, CMakeLists.txt says {version}")


def main():
    files = tracked_files()
    documents = [file for file in files if file.suffix == ".md"]
    offences = []
    for document in documents:
        check_links(document, offences)
        check_paths(document, files, offences)
        check_lines(document, offences)
        check_figures(document, offences)
    check_environment(files, offences)
    check_version(offences)
    for offence in offences:
        print(offence)
    print(f"{len(documents)} documents checked, {len(offences)} offences")
    return 1 if offences or not documents else 0


sys.exit(main())
