"""flashgla's operators behind flash-linear-attention's own modules: its models run on them unchanged.

    import flashgla.fla
    flashgla.fla.enable()
    ...                        # build, load, train, generate with FLA's models as ever
    print(flashgla.fla.table())
    flashgla.fla.disable()

A call with an argument that flashgla does not cover goes to FLA.
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

# (module, name, FLA's function) of every replacement now in force.
_replaced: list[tuple[Any, str, Callable[..., Any]]] = []


def _ours(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    function = getattr(ops, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ops.NotCovered:
            return theirs(*args, **kwargs)

    return call


def enable() -> None:
    """Replaces FLA's functions by flashgla's wherever FLA's modules hold them. Does nothing when they are replaced."""
    if _replaced:
        return
    importlib.import_module("fla.layers")
    modules = [module for name, module in sys.modules.items() if name == "fla" or name.startswith("fla.")]
    for family, names in _FAMILIES.items():
        holder = importlib.import_module(f"fla.ops.{family}")
        for name in names:
            theirs: Any = getattr(holder, name, None)
            if theirs is None:  # not in this version of FLA
                continue
            ours = _ours(name, theirs)
            for module in modules:
                if vars(module).get(name) is theirs:
                    _replaced.append((module, name, theirs))
                    setattr(module, name, ours)


def disable() -> None:
    """Gives FLA its own functions back."""
    while _replaced:
        module, name, theirs = _replaced.pop()
        setattr(module, name, theirs)


def table() -> str:
    """What is replaced now, a line a function: its name and the modules of FLA that use flashgla's."""
    modules: dict[str, list[str]] = {}
    for module, name, _ in _replaced:
        modules.setdefault(name, []).append(module.__name__)
    if not modules:
        return "Nothing of flash-linear-attention is replaced."
    width = max(map(len, modules))
    return "\n".join(f"{name:<{width}}  {', '.join(sorted(where))}" for name, where in modules.items())
