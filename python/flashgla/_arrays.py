"""What differs between array libraries: views of their arrays, new arrays, their stream. PyTorch is in torch.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ._flashgla import Array

_NAMES = {"f64": "float64", "f32": "float32", "f16": "float16"}


class NumPy:
    """numpy.ndarray; bfloat16 by ml_dtypes."""

    stream = 0
    allocate: Callable[[int], Array] | None = None

    def view(self, array: Any, writable: bool = False) -> Array:
        if getattr(getattr(array, "dtype", None), "name", "") == "bfloat16" and hasattr(array, "view"):
            return Array(array.view("uint16"), writable, "bf16")  # NumPy's DLPack has no name for it
        return Array(array, writable)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return self._namespace().empty(shape, dtype=self._dtype(dtype))

    def finish(self, array: Any) -> Any:
        return array

    def _namespace(self) -> Any:
        return sys.modules["numpy"]

    @staticmethod
    def _dtype(dtype: str) -> Any:
        if dtype == "bf16":
            import ml_dtypes

            return ml_dtypes.bfloat16
        return _NAMES[dtype]


class CuPy(NumPy):
    """cupy.ndarray, on its device, which need not be CuPy's current one, on CuPy's current stream there and from its
    memory pool."""

    def __init__(self, device: int) -> None:
        self._device = device

    @property
    def stream(self) -> int:  # type: ignore[override]
        with self._there():
            return self._namespace().cuda.get_current_stream().ptr

    def view(self, array: Any, writable: bool = False) -> Array:
        with self._there():
            return super().view(array, writable)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        with self._there():
            return super().empty(shape, dtype)

    def allocate(self, bytes: int) -> Array:
        with self._there():
            return Array(self._namespace().empty(bytes, dtype="uint8"), True)

    def _namespace(self) -> Any:
        return sys.modules["cupy"]

    def _there(self) -> Any:
        return self._namespace().cuda.Device(self._device)


class Jax:
    """jax.Array. On a GPU a call waits for its inputs and for its outputs: JAX does not say what stream it uses."""

    stream = 0
    allocate: Callable[[int], Array] | None = None

    def __init__(self) -> None:
        self._device = "cpu"

    def view(self, array: Any, writable: bool = False) -> Array:
        if isinstance(array, Array):  # from empty
            return array
        if writable:
            raise ValueError("an array that is to be written is a JAX array, which is read-only")
        array.block_until_ready()
        view = Array(array)
        self._device = view.device
        return view

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return Array.empty(list(shape), dtype, self._device)

    def finish(self, array: Any) -> Any:
        if array is None:
            return None
        array.wait()
        return sys.modules["jax"].dlpack.from_dlpack(array.to_dlpack())


Library = NumPy | CuPy | Jax


def library_of(array: Any) -> Library:
    """The library of an array; TypeError when it is none that can be used."""
    name = type(array).__module__.partition(".")[0]
    if name == "numpy":
        return NumPy()
    if name == "cupy":
        return CuPy(array.device.id)
    if name in ("jax", "jaxlib"):
        return Jax()
    raise TypeError(f"q is of type {type(array).__name__}; expected an array of NumPy, PyTorch, CuPy or JAX")


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)
