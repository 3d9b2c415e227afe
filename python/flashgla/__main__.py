"""The program `flashgla` that this package carries: `flashgla VERB ...`, or `python -m flashgla VERB ...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from . import with_cuda
from ._cuda import library_folders


def main() -> NoReturn:
    folders = [str(folder) for folder in library_folders()] if with_cuda else []
    if folders:
        before = os.environ.get("LD_LIBRARY_PATH")
        os.environ["LD_LIBRARY_PATH"] = ":".join([before, *folders] if before else folders)
    program = Path(__file__).with_name("bin") / "flashgla"
    os.execv(program, ["flashgla", *sys.argv[1:]])


if __name__ == "__main__":
    main()
