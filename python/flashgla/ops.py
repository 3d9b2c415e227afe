"""Functions named and shaped as in flash-linear-attention (FLA 0.6), on flashgla's operator.

q, k [B,T,H,K], v [B,T,H,V], o [B,T,H,V]; states float32 [N,H,K,V] ([N,H,V,K] with `state_v_first`); gates are natural
logarithms; `scale` None is K^-1/2; `reverse` runs from the last token to the first; `cu_seqlens` [N+1] packs sequences
(B = 1). Each returns (o, final state), the state None unless asked for. Beyond FLA: k, v and gates may have fewer heads
than q (retention and Lightning attention, whose decay is of a query head, repeat k and v, and have a state a query
head), gates may be -inf, and every function runs on the CPU, in float64 too, and compiles without a graph break.

The prefix (chunk, fused_chunk, fused_recurrent, parallel) names FLA's way to the result; the operator picks its own.
`cu_seqlens_cpu`, a copy of `cu_seqlens`, spares FLA another; here it tells the longest sequence (max_seqlen) and is
checked. Without it the values of a `cu_seqlens` that lies on a GPU are not checked: it must begin with 0, never fall
and end with T. An initial state of another dtype is converted, and so are two gates of different dtypes, to one that
holds both (the operator itself wants them alike). Where a function takes `**kwargs`, `chunk_size`, a hint about FLA's
kernels, is accepted and has no effect. chunk_gla, which takes no further arguments in FLA, accepts it too; chunk_gla
and the fused_recurrent functions with `state_v_first` accept `transpose_state_layout`, its old name, with FLA's
warning. An argument, a dtype, a width or a device that is not supported raises NotCovered; malformed input raises
TypeError or ValueError; both name the argument.
ALGORITHM is what all of them ask for: "chunk_recomputed" keeps no states for the backward and spares their memory.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import Tensor

from . import _flashgla
from .torch import gated_linear_attention

__all__ = [
    "ALGORITHM", "NotCovered", "chunk_gla", "chunk_gsa", "chunk_lightning_attn", "chunk_linear_attn", "chunk_retention",
    "chunk_simple_gla", "fused_chunk_linear_attn", "fused_chunk_retention", "fused_chunk_simple_gla",
    "fused_recurrent_gla", "fused_recurrent_gsa", "fused_recurrent_lightning_attn", "fused_recurrent_linear_attn",
    "fused_recurrent_retention", "fused_recurrent_simple_gla", "parallel_retention", "parallel_simple_gla"]


ALGORITHM = "automatic"


class NotCovered(ValueError):
    """An argument that flash-linear-attention knows and flashgla does not."""


_HINTS = ("chunk_size",)  # about FLA's kernels, without effect here

# Functions that take transpose_state_layout, the old name of state_v_first.
_WITH_OLD_NAME = ("chunk_gla", "fused_recurrent_gla", "fused_recurrent_simple_gla", "fused_recurrent_retention")


def _refuse(function: str, arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in _HINTS and value is not None and value is not False:
            raise NotCovered(f"{function}: {name} is {value!r}; it is not supported, leave it out")


def _v_first(function: str, state_v_first: bool, arguments: dict[str, Any], stacklevel: int = 3) -> bool:
    """state_v_first, by its old name too; refuses the other further arguments."""
    if "transpose_state_layout" in arguments:
        if state_v_first:
            raise ValueError(f"{function}: transpose_state_layout is given beside state_v_first, its new name")
        warnings.warn("`transpose_state_layout` is deprecated and renamed to `state_v_first`.", DeprecationWarning,
                      stacklevel=stacklevel)
        state_v_first = arguments.pop("transpose_state_layout")
    _refuse(function, arguments)
    return state_v_first


# ---- checks in front of the operator ----

_WIDEST = 512  # channels of a head that the CUDA kernels take
_DTYPES = {"cuda": (torch.float32, torch.bfloat16, torch.float16),
           "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16)}

_missing: dict[int | None, str] = {}  # by device


@torch.compiler.assume_constant_result
def _missing_on_cuda(index: int | None) -> str:
    """What keeps the operator from running on this device that PyTorch calls cuda; empty where it runs."""
    if index not in _missing:
        if torch.version.hip is not None:
            missing = "PyTorch is built for ROCm"
        elif not _flashgla.with_cuda:
            missing = "this build of flashgla has no CUDA kernels"
        elif torch.cuda.get_device_capability(index) < (8, 0):
            missing = "the device's compute capability is below 8.0"
        else:
            missing = ""
        _missing[index] = missing
    return _missing[index]


def _check(name: str, x: Any, shape: str) -> None:
    """That x is a tensor with as many dimensions as the shape names."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is of type {type(x).__name__}; expected a torch.Tensor")
    if x.dim() != shape.count(",") + 1:
        raise ValueError(f"{name} has shape [{','.join(map(str, x.shape))}]; expected {shape}")


def _check_covered(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What FLA may take and flashgla does not; of the rest, what the operator cannot name."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            _check(name, x, "[B,T,H,V]" if name == "v" else "[B,T,H,K]")
        if x.dtype not in _DTYPES.get(x.device.type, ()):
            raise NotCovered(f"{name} is of {x.dtype} on {x.device}; it is not supported")
        if x.dtype != q.dtype and (q.dtype == torch.float64 or not torch.is_autocast_enabled(q.device.type)):
            raise NotCovered(f"{name} is of {x.dtype}, q of {q.dtype}; different dtypes are not supported")
        if x.is_cuda:
            if x.shape[3] > _WIDEST:
                raise NotCovered(f"{name} has {x.shape[3]} channels a head; on CUDA up to {_WIDEST} are supported")
            missing = _missing_on_cuda(x.device.index)
            if missing:
                raise NotCovered(f"{name} is on {x.device}; it is not supported, as {missing}")


def _pair_of_states(state: Any, what: str) -> Any:
    if not isinstance(state, (tuple, list)):
        raise TypeError(f"initial_state is of type {type(state).__name__}; expected a pair {what}")
    if len(state) != 2:
        raise ValueError(f"initial_state has {len(state)} elements; expected a pair {what}")
    return state


def _state(state: Tensor | None, q: Tensor) -> Tensor | None:
    """In the dtype of states."""
    if state is None:
        return None
    _check("initial_state", state, "[N,H,K,V]")
    return state.to(_gate_dtype(q)) if state.is_floating_point() else state


def _gate(gate: Tensor | None, q: Tensor) -> Tensor | None:
    """In q's dtype or that of states."""
    return gate if gate is None or not gate.is_floating_point() or gate.dtype == q.dtype else gate.to(_gate_dtype(q))


def _gates(g: Tensor | None, gv: Tensor | None, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Both in one dtype, q's or that of states."""
    g, gv = _gate(g, q), _gate(gv, q)
    if g is not None and gv is not None and g.dtype != gv.dtype and g.is_floating_point() and gv.is_floating_point():
        return g.to(_gate_dtype(q)), gv.to(_gate_dtype(q))
    return g, gv


def _swapped(state: Tensor | None, swap: bool) -> Tensor | None:
    return state.transpose(-1, -2).contiguous() if swap and state is not None else state


def _flipped(*tensors: Tensor | None) -> list[Any]:
    return [x.flip(1) if x is not None and x.dim() > 1 else x for x in tensors]


def _longest(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, length: int) -> int | None:
    """Tokens of the longest packed sequence, None where they are not known."""
    if cu_seqlens_cpu is None or torch.compiler.is_compiling():  # a graph holds for other lengths too
        return None
    _check("cu_seqlens_cpu", cu_seqlens_cpu, "[N+1]")
    if cu_seqlens_cpu.shape != cu_seqlens.shape or cu_seqlens_cpu.shape[0] < 2:
        raise ValueError(f"cu_seqlens_cpu has {cu_seqlens_cpu.shape[0]} elements; expected as many as cu_seqlens, "
                         f"{cu_seqlens.shape[0]}, at least 2")
    if not cu_seqlens_cpu.is_cpu or cu_seqlens_cpu.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens_cpu is of {cu_seqlens_cpu.dtype} on {cu_seqlens_cpu.device}; expected "
                         "torch.int32 or torch.int64 on cpu")
    ends = cu_seqlens_cpu.tolist()
    if ends[0] != 0 or ends[-1] != length:
        raise ValueError(f"cu_seqlens_cpu goes from {ends[0]} to {ends[-1]}; expected from 0 to T, {length}")
    lengths = [end - begin for begin, end in zip(ends, ends[1:])]
    if min(lengths) < 0:
        raise ValueError(f"cu_seqlens_cpu falls by {-min(lengths)} from one element to the next; expected that it "
                         "never falls")
    return max(1, *lengths)


# What the operator calls its arguments, and by which name a function here has got them where that is another.
_NAMES_OF_GLA = {"g": "gk"}
_NAMES_OF_DECAY = {"g": "g_gamma"}
_NAMES_OF_SLOTS_WRITTEN = {"v": "s", "gv": "g"}
_NAMES_OF_SLOTS_READ = {"q": "the softmax over slots", "k": "s"}


def _by_names(problem: Exception, names: dict[str, str]) -> Exception:
    text = re.sub(r"(?<![\w'])(q|k|v|g|gv)(?![\w'])", lambda found: names.get(found[0], found[0]), str(problem))
    return type(problem)(text)


def _call(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, scale: float | None, h0: Tensor | None,
          z0: Tensor | None, final: bool | None, cu_seqlens: Tensor | None, reverse: bool | None = False,
          swap: bool = False, normalize: bool = False, cu_seqlens_cpu: Tensor | None = None,
          names: dict[str, str] | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(o, ht, zt) with FLA's extras: time reversed and states transposed. names: of arguments, for errors."""
    _check_covered(q, k, v)
    final = bool(final)
    g, gv = _gates(g, gv, q)
    h0, z0 = _swapped(_state(h0, q), swap), None if z0 is None else z0.to(_gate_dtype(q))
    max_seqlen = None
    if cu_seqlens is not None:
        _check("cu_seqlens", cu_seqlens, "[N+1]")
        max_seqlen = _longest(cu_seqlens, cu_seqlens_cpu, q.shape[1])
    if reverse:
        q, k, v, g, gv = _flipped(q, k, v, g, gv)
        if cu_seqlens is not None:  # the last sequence comes first
            cu_seqlens = q.shape[1] - cu_seqlens.flip(0)
            h0, z0 = (x if x is None else x.flip(0) for x in (h0, z0))
    arguments = (q, k, v, g, gv, scale, (h0, z0) if normalize else h0, final, cu_seqlens, ALGORITHM)
    if names is None:
        o, state = gated_linear_attention(*arguments, normalize=normalize, max_seqlen=max_seqlen)
    else:
        try:
            o, state = gated_linear_attention(*arguments, normalize=normalize, max_seqlen=max_seqlen)
        except (TypeError, ValueError) as problem:
            raise _by_names(problem, names) from None
    ht, zt = state if normalize and final else (state, None)
    if reverse:
        o = o.flip(1)
        if cu_seqlens is not None:
            ht, zt = (x if x is None else x.flip(0) for x in (ht, zt))
    return o, _swapped(ht, swap), zt


def _gate_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _simple_gate(g: Tensor | None, g_gamma: Tensor | None, q: Tensor) -> Tensor | None:
    if g is not None:
        _check("g", g, "[B,T,H]")
    if g_gamma is not None:
        _check("g_gamma", g_gamma, "[H]")
    if g is None or g_gamma is None:
        return g_gamma if g is None else g
    if g.shape[2] != g_gamma.shape[0]:
        raise ValueError(f"g_gamma has shape [{g_gamma.shape[0]}]; expected [{g.shape[2]}] (as g)")
    _check("q", q, "[B,T,H,K]")
    return g.to(_gate_dtype(q)) + g_gamma.to(_gate_dtype(q))


def _simple_names(g: Tensor | None, g_gamma: Tensor | None) -> dict[str, str] | None:
    return _NAMES_OF_DECAY if g is None and g_gamma is not None else None


def _retention_gate(q: Tensor) -> Tensor:
    """log(1 - 2^(-5-h)) of each head h."""
    _check("q", q, "[B,T,H,K]")
    heads = torch.arange(q.shape[2], dtype=_gate_dtype(q), device=q.device)
    return torch.log1p(-torch.exp2(-5.0 - heads))


def _lightning_gate(q: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    """-(8/H) (1 - layer / layers) h of each head h."""
    _check("q", q, "[B,T,H,K]")
    heads = torch.arange(q.shape[2], dtype=_gate_dtype(q), device=q.device)
    return heads * (-8.0 / q.shape[2] * (1.0 - layer_idx / num_layers))


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with as many heads as q, each of theirs for consecutive heads of q."""
    _check("k", k, "[B,T,H,K]")
    _check("v", v, "[B,T,H,V]")
    heads, groups = q.shape[2], k.shape[2]
    if heads == groups:
        return k, v
    if groups == 0 or heads % groups != 0:
        raise ValueError(f"k has {groups} heads; expected a number that divides q's {heads}")
    if v.shape[2] != groups:
        raise ValueError(f"v has {v.shape[2]} heads; expected {groups} (as k)")
    return k.repeat_interleave(heads // groups, 2), v.repeat_interleave(heads // groups, 2)


def _decayed(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, scale: float | None, h0: Tensor | None,
             final: bool | None, cu_seqlens: Tensor | None, reverse: bool = False,
             swap: bool = False) -> tuple[Tensor, Tensor | None]:
    """With a constant log decay of each query head."""
    k, v = _repeated(q, k, v)
    return _call(q, k, v, decay, None, scale, h0, None, final, cu_seqlens, reverse, swap)[:2]


# ---- GLA ----

def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None,
              initial_state: Tensor | None = None, output_final_state: bool = False, state_v_first: bool = False,
              cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
              **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention with a log gate over keys, g [B,T,H,K]. Beyond FLA, `chunk_size` is accepted, without
    effect, and `transpose_state_layout`, the old name of `state_v_first`."""
    state_v_first = _v_first("chunk_gla", state_v_first, kwargs)
    _check("g", g, "[B,T,H,K]")
    return _call(q, k, v, g, None, scale, initial_state, None, output_final_state, cu_seqlens, swap=state_v_first,
                 cu_seqlens_cpu=cu_seqlens_cpu)[:2]


def fused_recurrent_gla(q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None,
                        scale: float | None = None, initial_state: Tensor | None = None,
                        output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
                        cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention with log gates over keys, gk [B,T,H,K], and over values, gv [B,T,H,V]; either or none.
    `chunk_size` has no effect."""
    state_v_first = _v_first("fused_recurrent_gla", state_v_first, kwargs)
    if gk is not None:
        _check("gk", gk, "[B,T,H,K]")
    if gv is not None:
        _check("gv", gv, "[B,T,H,V]")
    return _call(q, k, v, gk, gv, scale, initial_state, None, output_final_state, cu_seqlens, reverse, state_v_first,
                 names=_NAMES_OF_GLA)[:2]


# ---- simple GLA ----

def chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
                     scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
                     state_v_first: bool = False, cu_seqlens: Tensor | None = None,
                     cu_seqlens_cpu: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """One log gate a token and head, g [B,T,H], or one a head, g_gamma [H], or their sum, or none. `chunk_size` has no
    effect."""
    _refuse("chunk_simple_gla", kwargs)
    return _call(q, k, v, _simple_gate(g, g_gamma, q), None, scale, initial_state, None, output_final_state, cu_seqlens,
                 swap=state_v_first, cu_seqlens_cpu=cu_seqlens_cpu, names=_simple_names(g, g_gamma))[:2]


def fused_chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
                           scale: float | None = None, initial_state: Tensor | None = None,
                           output_final_state: bool = False,
                           cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """As chunk_simple_gla, without further arguments."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
                               scale: float | None = None, initial_state: Tensor | None = None,
                               output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
                               cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """As chunk_simple_gla, in either direction. `chunk_size` has no effect."""
    state_v_first = _v_first("fused_recurrent_simple_gla", state_v_first, kwargs)
    return _call(q, k, v, _simple_gate(g, g_gamma, q), None, scale, initial_state, None, output_final_state, cu_seqlens,
                 reverse, state_v_first, names=_simple_names(g, g_gamma))[:2]


def parallel_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, scale: float | None = None,
                        output_attentions: bool = False, cu_seqlens: Tensor | None = None,
                        cu_seqlens_cpu: Tensor | None = None) -> tuple[Tensor, None]:
    """As chunk_simple_gla without states; the second result, attention scores, is None: they are not supported."""
    _refuse("parallel_simple_gla", {"output_attentions": output_attentions})
    return _call(q, k, v, _simple_gate(g, None, q), None, scale, None, None, False, cu_seqlens,
                 cu_seqlens_cpu=cu_seqlens_cpu)[0], None


# ---- retention ----

def chunk_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
                    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
                    **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """RetNet's retention: query head h decays by 1 - 2^(-5-h) a token. k and v with fewer heads are repeated; states
    have q's. `chunk_size` has no effect."""
    _refuse("chunk_retention", kwargs)
    return _decayed(q, k, v, _retention_gate(q), scale, initial_state, output_final_state, cu_seqlens)


def fused_chunk_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                          initial_state: Tensor | None = None, output_final_state: bool = False,
                          cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """As chunk_retention, without further arguments."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def parallel_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, output_attentions: bool = False,
                       cu_seqlens: Tensor | None = None) -> tuple[Tensor, None]:
    """As chunk_retention without states; the second result, attention scores, is None: they are not supported."""
    _refuse("parallel_retention", {"output_attentions": output_attentions})
    return _decayed(q, k, v, _retention_gate(q), scale, None, False, cu_seqlens)[0], None


def fused_recurrent_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                              initial_state: Tensor | None = None, output_final_state: bool = False,
                              reverse: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
                              **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """As chunk_retention, in either direction. `chunk_size` has no effect."""
    state_v_first = _v_first("fused_recurrent_retention", state_v_first, kwargs)
    return _decayed(q, k, v, _retention_gate(q), scale, initial_state, output_final_state, cu_seqlens, reverse,
                    state_v_first)


# ---- linear attention ----

def chunk_linear_attn(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                      initial_state: Tensor | tuple[Tensor, Tensor | None] | None = None,
                      output_final_state: bool = False, normalize: bool = True,
                      cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:
    """No gate. With `normalize` o is divided by q . z + 1e-10, z the sum of keys; the scale then cancels. A state is
    then a tuple (h, z), z [N,1,H,K], as is the second result whether or not the final state is asked for: without it
    h is None."""
    return fused_recurrent_linear_attn(q, k, v, scale, initial_state, output_final_state, False, normalize, cu_seqlens)


def fused_chunk_linear_attn(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                            initial_state: Tensor | tuple[Tensor, Tensor | None] | None = None,
                            output_final_state: bool = False, normalize: bool = True,
                            cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:
    """As chunk_linear_attn."""
    return fused_recurrent_linear_attn(q, k, v, scale, initial_state, output_final_state, False, normalize, cu_seqlens)


def fused_recurrent_linear_attn(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                                initial_state: Tensor | tuple[Tensor, Tensor | None] | None = None,
                                output_final_state: bool = False, reverse: bool = False, normalize: bool = False,
                                cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:
    """As chunk_linear_attn, in either direction."""
    h0, z0 = initial_state, None
    if normalize and isinstance(initial_state, tuple):
        h0, z0 = _pair_of_states(initial_state, "(h, z)")
    if z0 is not None:
        _check("initial_state's z", z0, "[N,1,H,K]")
        z0 = z0.squeeze(1)
    o, ht, zt = _call(q, k, v, None, None, scale, h0, z0, output_final_state or normalize, cu_seqlens, reverse,
                      normalize=normalize)
    if zt is None:
        return o, ht
    return o, (ht if output_final_state else None, zt.unsqueeze(1))


# ---- Lightning attention ----

def chunk_lightning_attn(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
                         initial_state: Tensor | None = None, output_final_state: bool = False,
                         cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Lightning attention: query head h of H, in layer l of L, has the log gate -(8/H) (1 - l/L) h. k and v with fewer
    heads are repeated; states have q's. `chunk_size` has no effect."""
    _refuse("chunk_lightning_attn", kwargs)
    return _decayed(q, k, v, _lightning_gate(q, layer_idx, num_layers), scale, initial_state, output_final_state,
                    cu_seqlens)


def fused_recurrent_lightning_attn(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int,
                                   scale: float | None = None, initial_state: Tensor | None = None,
                                   output_final_state: bool = False, reverse: bool = False,
                                   cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """As chunk_lightning_attn, in either direction."""
    return _decayed(q, k, v, _lightning_gate(q, layer_idx, num_layers), scale, initial_state, output_final_state,
                    cu_seqlens, reverse)


# ---- gated slot attention: two calls, a softmax over the slots between them ----

def fused_recurrent_gsa(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor | None = None, scale: float | None = None,
                        initial_state: tuple[Tensor, Tensor] | None = None, output_final_state: bool = False,
                        reverse: bool = False,
                        cu_seqlens: Tensor | None = None) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Gated slot attention: s [B,T,H,M] writes to M slots, g [B,T,H,M] their log gate; states [N,H,K,M], [N,H,M,V]."""
    return _gsa("fused_recurrent_gsa", q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens, reverse)


def chunk_gsa(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor | None = None, scale: float | None = None,
              initial_state: tuple[Tensor, Tensor] | None = None, output_final_state: bool = False,
              checkpoint_level: int = 2, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
              **kwargs: Any) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """As fused_recurrent_gsa. `checkpoint_level`, about FLA's memory, and `chunk_size` have no effect."""
    _refuse("chunk_gsa", kwargs)
    return _gsa("chunk_gsa", q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu)


def _gsa(function: str, q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor | None, scale: float | None,
         initial_state: tuple[Tensor, Tensor] | None, final: bool | None, cu_seqlens: Tensor | None,
         reverse: bool = False,
         cu_seqlens_cpu: Tensor | None = None) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    if g is None:
        raise NotCovered(f"{function}: g is None; a learned gate from s alone is not supported, give g")
    _check_covered(q, k, v)
    _check("s", s, "[B,T,H,M]")
    _check("g", g, "[B,T,H,M]")
    hk0, hv0 = (None, None) if initial_state is None else _pair_of_states(initial_state, "(hk, hv)")
    s = s.to(k.dtype)
    slots, hkt, _ = _call(q, k, s, None, g, scale, hk0, None, final, cu_seqlens, reverse, cu_seqlens_cpu=cu_seqlens_cpu,
                          names=_NAMES_OF_SLOTS_WRITTEN)
    attention = torch.softmax(slots, -1, dtype=_gate_dtype(q)).to(v.dtype)
    o, hvt, _ = _call(attention, s, v, g, None, 1.0, hv0, None, final, cu_seqlens, reverse,
                      cu_seqlens_cpu=cu_seqlens_cpu, names=_NAMES_OF_SLOTS_READ)
    return o, (hkt, hvt)
