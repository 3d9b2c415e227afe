"""flashgla's operators behind flash-linear-attention's own modules: its models run on them unchanged.

    import flashgla.fla
    flashgla.fla.enable()
    ...                        # build, load, train, generate with FLA's models as ever
    print(flashgla.fla.table())
    flashgla.fla.disable()

A call with an argument, a dtype, a width or a device that flashgla does not cover goes to FLA, but on a CPU, where FLA
does not run; malformed input is refused by name.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from . import ops

__all__ = ["disable", "enable", "table"]

_FAMILIES = {
    "gla": ("chunk_gla", "fused_recurrent_gla"),
    "simple_gla": ("chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla"),
    "retention": ("chunk_retention", "fused_chunk_retention", "parallel_retention", "fused_recurrent_retention"),
    "linear_attn": ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"),
    "lightning_attn": ("chunk_lightning_attn", "fused_recurrent_lightning_attn"),
    "gsa": ("chunk_gsa", "fused_recurrent_gsa"),
}

# FLA's function and what stands for it, by name, while they are replaced.
_replaced: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
_algorithm_before = ops.ALGORITHM  # what disable() gives back
_lock = threading.Lock()  # held while functions are exchanged


def _ours(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    function = getattr(ops, name)
    renames = name in ops._WITH_OLD_NAME

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if renames and "transpose_state_layout" in kwargs:  # one warning, at the caller's line, whoever computes
            layout = {"transpose_state_layout": kwargs.pop("transpose_state_layout")}
            kwargs["state_v_first"] = ops._v_first(name, kwargs.get("state_v_first", False), layout, stacklevel=3)
        try:
            return function(*args, **kwargs)
        except ops.NotCovered:
            q = args[0] if args else kwargs.get("q")
            if getattr(getattr(q, "device", None), "type", "cpu") == "cpu":  # FLA's kernels do not run there
                raise
        return theirs(*args, **kwargs)

    return call


def _exchange(name: str, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Puts `new` wherever a module of FLA holds `old` under that name."""
    for module in _modules():
        if vars(module).get(name) is old:
            setattr(module, name, new)


def _modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items())
            if module is not None and (name == "fla" or name.startswith("fla."))]


def enable(algorithm: str = "chunk_recomputed") -> None:
    """Replaces FLA's functions by flashgla's wherever FLA's modules hold them, and in those that are imported later.
    States between chunks are made anew in the backward, as FLA's are; "automatic" keeps them, which takes their memory
    and is a little faster. Called again, it changes the algorithm."""
    if algorithm not in ("automatic", "chunk_materialized", "chunk_recomputed", "recurrent"):
        raise ValueError(f"algorithm is {algorithm!r}; "
                         "expected 'automatic', 'chunk_materialized', 'chunk_recomputed' or "
                         "'recurrent'")
    global _algorithm_before
    with _lock:
        if not _replaced:
            found = _find()
            for name, pair in found.items():
                _exchange(name, *pair)
            _replaced.update(found)
            _algorithm_before = ops.ALGORITHM
        ops.ALGORITHM = algorithm


def _find() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """FLA's functions and what stands for them, of the families that this version of FLA has."""
    importlib.import_module("fla")
    _import("fla.layers")  # the package fla-core is without
    found = {}
    for family, names in _FAMILIES.items():
        holder = _import(f"fla.ops.{family}")
        for name in names:
            theirs = getattr(holder, name, None)
            if theirs is not None:
                found[name] = theirs, _ours(name, theirs)
    return found


def _import(name: str) -> Any:
    """FLA's module, None where this version of FLA has none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{name}.".startswith(f"{problem.name}."):
            raise
        return None


def disable() -> None:
    """Gives FLA its own functions back, in all of its modules, and flashgla.ops.ALGORITHM what it was before
    enable()."""
    with _lock:
        if not _replaced:
            return
        ops.ALGORITHM = _algorithm_before
        while _replaced:
            name, (theirs, ours) = _replaced.popitem()
            _exchange(name, ours, theirs)


def table() -> str:
    """What is replaced now, a line a function: its name and the modules of FLA that use flashgla's."""
    with _lock:
        replaced = dict(_replaced)
    if not replaced:
        return "Nothing of flash-linear-attention is replaced."
    width = max(map(len, replaced))
    lines = []
    for name, (_, ours) in replaced.items():
        where = sorted(module.__name__ for module in _modules() if vars(module).get(name) is ours)
        lines.append(f"{name:<{width}}  {', '.join(where)}")
    return "\n".join(lines)
