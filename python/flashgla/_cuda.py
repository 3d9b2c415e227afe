"""cuBLASLt, which models on a GPU need: NVIDIA's package on PyPI (nvidia-cublas, which PyTorch brings) has it where the
system's loader does not look."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path


def library_folders() -> list[Path]:
    """Folders of NVIDIA's packages that hold a cuBLASLt."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return sorted({library.parent for root in roots for library in root.glob("*/lib/libcublasLt.so.*")})


def load_cublaslt() -> None:
    """Loads it, so that the extension, which asks for it by name, finds it; without such a package the system's is."""
    for folder in library_folders():
        for library in sorted(folder.glob("libcublasLt.so.*")):
            try:
                ctypes.CDLL(str(library))
            except OSError:  # of another CUDA, or needs what is not there: the extension says what it wants
                continue
