"""cuBLASLt, which models on a GPU need, and cuDNN, which softmax attention can use: NVIDIA's packages on PyPI
(nvidia-cublas, nvidia-cudnn-cu13, which PyTorch brings) have them where the system's loader does not look."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path


def library_folders() -> list[Path]:
    """Folders of NVIDIA's packages that hold a cuBLASLt or a cuDNN."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    names = ("libcublasLt.so.*", "libcudnn.so.9")
    return sorted({library.parent for root in roots for name in names for library in root.glob(f"*/lib/{name}")})


def load_cublaslt() -> None:
    """Loads it, so that the extension, which asks for it by name, finds it; without such a package the system's is."""
    for folder in library_folders():
        for library in sorted(folder.glob("libcublasLt.so.*")):
            try:
                ctypes.CDLL(str(library))
            except OSError:  # of another CUDA, or needs what is not there: the extension says what it wants
                continue
