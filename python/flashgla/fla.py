"""flashgla's operators behind flash-linear-attention's own modules: its models run on them unchanged.

    import flashgla.fla
    flashgla.fla.enable()
    ...                        # build, load, train, generate with FLA's models as ever
    print(flashgla.fla.table())
    flashgla.fla.disable()

A call on CUDA tensors with an argument, a dtype or a width that flashgla does not cover goes to FLA; malformed input is
refused by name.
"""

from __future__ import annotations

import functools
import importlib
import sys
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


def _ours(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    function = getattr(ops, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ops.NotCovered:
            q = args[0] if args else kwargs.get("q")
            if not getattr(q, "is_cuda", False):  # FLA's kernels run there alone
                raise
        return theirs(*args, **kwargs)

    return call


def _exchange(name: str, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Puts `new` wherever a module of FLA holds `old` under that name."""
    for module in _modules():
        if vars(module).get(name) is old:
            setattr(module, name, new)


def _modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name == "fla" or name.startswith("fla.")]


def enable(algorithm: str = "chunk_recomputed") -> None:
    """Replaces FLA's functions by flashgla's wherever FLA's modules hold them, and in those that are imported later.
    States between chunks are made anew in the backward, as FLA's are; "automatic" keeps them, which takes their memory
    and is a little faster. Called again, it changes the algorithm."""
    if algorithm not in ("automatic", "chunk_materialized", "chunk_recomputed", "recurrent"):
        raise ValueError(f"algorithm is {algorithm!r}; "
                         "expected 'automatic', 'chunk_materialized', 'chunk_recomputed' or "
                         "'recurrent'")
    ops.ALGORITHM = algorithm
    if _replaced:
        return
    importlib.import_module("fla.layers")
    for family, names in _FAMILIES.items():
        holder = importlib.import_module(f"fla.ops.{family}")
        for name in names:
            theirs = getattr(holder, name, None)
            if theirs is None:  # not in this version of FLA
                continue
            _replaced[name] = theirs, _ours(name, theirs)
            _exchange(name, *_replaced[name])


def disable() -> None:
    """Gives FLA its own functions back, in all of its modules."""
    ops.ALGORITHM = "automatic"
    while _replaced:
        name, (theirs, ours) = _replaced.popitem()
        _exchange(name, ours, theirs)


def table() -> str:
    """What is replaced now, a line a function: its name and the modules of FLA that use flashgla's."""
    if not _replaced:
        return "Nothing of flash-linear-attention is replaced."
    width = max(map(len, _replaced))
    lines = []
    for name, (_, ours) in _replaced.items():
        where = sorted(module.__name__ for module in _modules() if vars(module).get(name) is ours)
        lines.append(f"{name:<{width}}  {', '.join(where)}")
    return "\n".join(lines)
