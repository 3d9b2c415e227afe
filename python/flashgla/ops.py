"""Functions named and shaped as in flash-linear-attention (FLA 0.6), on flashgla's operator.

q, k [B,T,H,K], v [B,T,H,V], o [B,T,H,V]; states float32 [N,H,K,V] ([N,H,V,K] with `state_v_first`); gates are natural
logarithms; `scale` None is K^-1/2; `reverse` runs from the last token to the first; `cu_seqlens` [N+1] packs sequences
(B = 1). Each returns (o, final state), the state None unless asked for. Beyond FLA: k, v and gates may have fewer heads
than q, gates may be -inf, and every function runs on the CPU, in float64 too, and compiles without a graph break.

The prefix (chunk, fused_chunk, fused_recurrent, parallel) names FLA's way to the result; the operator picks its own.
`cu_seqlens_cpu` spares FLA a copy; here it tells the longest sequence (max_seqlen). An initial state of another dtype
is converted. `chunk_size` is a hint about FLA's kernels: accepted where FLA's functions take further arguments, without
effect; so is `transpose_state_layout`, the old name of `state_v_first`, with FLA's warning. An argument, a dtype or a
width that is not supported raises NotCovered, by name.
ALGORITHM is what all of them ask for: "chunk_recomputed" keeps no states for the backward and spares their memory.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

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


def _refuse(function: str, arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in _HINTS and value is not None and value is not False:
            raise NotCovered(f"{function}: {name} is {value!r}; it is not supported, leave it out")


def _v_first(function: str, state_v_first: bool, arguments: dict[str, Any]) -> bool:
    """state_v_first, by its old name too; refuses the other further arguments."""
    if "transpose_state_layout" in arguments:
        if state_v_first:
            raise ValueError(f"{function}: transpose_state_layout is given beside state_v_first, its new name")
        warnings.warn("`transpose_state_layout` is deprecated and renamed to `state_v_first`.", DeprecationWarning,
                      stacklevel=3)
        state_v_first = arguments.pop("transpose_state_layout")
    _refuse(function, arguments)
    return state_v_first


_WIDEST = 512  # channels of a head that the CUDA kernels take
_DTYPES = {"cuda": (torch.float32, torch.bfloat16, torch.float16),
           "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def _check_covered(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What FLA may take and flashgla does not; what nobody takes is left to the operator."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in _DTYPES.get(x.device.type, ()):
            raise NotCovered(f"{name} is of {x.dtype} on {x.device}; it is not supported")
        if x.dtype != q.dtype:
            raise NotCovered(f"{name} is of {x.dtype}, q of {q.dtype}; different dtypes are not supported")
        if x.is_cuda and x.dim() == 4 and x.shape[3] > _WIDEST:
            raise NotCovered(f"{name} has {x.shape[3]} channels a head; on CUDA up to {_WIDEST} are supported")


def _state(state: Tensor | None, q: Tensor) -> Tensor | None:
    """In the dtype of states."""
    return state if state is None or not state.is_floating_point() else state.to(_gate_dtype(q))


def _gate(gate: Tensor | None, q: Tensor) -> Tensor | None:
    """In q's dtype or that of states."""
    return gate if gate is None or not gate.is_floating_point() or gate.dtype == q.dtype else gate.to(_gate_dtype(q))


def _swapped(state: Tensor | None, swap: bool) -> Tensor | None:
    return state.transpose(-1, -2) if swap and state is not None else state


def _flipped(*tensors: Tensor | None) -> list[Any]:
    return [x.flip(1) if x is not None and x.dim() > 1 else x for x in tensors]


def _longest(cu_seqlens_cpu: Tensor | None) -> int | None:
    """Tokens of the longest packed sequence, None where they are not known."""
    if cu_seqlens_cpu is None or torch.compiler.is_compiling():  # a graph holds for other lengths too
        return None
    return max(1, int(cu_seqlens_cpu.diff().max()))


def _call(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, scale: float | None, h0: Tensor | None,
          z0: Tensor | None, final: bool, cu_seqlens: Tensor | None, reverse: bool = False, swap: bool = False,
          normalize: bool = False,
          cu_seqlens_cpu: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(o, ht, zt) with FLA's extras: time reversed and states transposed."""
    _check_covered(q, k, v)
    g, gv = _gate(g, q), _gate(gv, q)
    h0, z0 = _swapped(_state(h0, q), swap), _state(z0, q)
    if reverse:
        q, k, v, g, gv = _flipped(q, k, v, g, gv)
        if cu_seqlens is not None:  # the last sequence comes first
            cu_seqlens = q.shape[1] - cu_seqlens.flip(0)
            h0, z0 = (x if x is None else x.flip(0) for x in (h0, z0))
    max_seqlen = None if cu_seqlens is None else _longest(cu_seqlens_cpu)
    o, state = gated_linear_attention(q, k, v, g, gv, scale, (h0, z0) if normalize else h0, final, cu_seqlens,
                                      ALGORITHM, normalize=normalize, max_seqlen=max_seqlen)
    ht, zt = state if normalize and final else (state, None)
    if reverse:
        o = o.flip(1)
        if cu_seqlens is not None:
            ht, zt = (x if x is None else x.flip(0) for x in (ht, zt))
    return o, _swapped(ht, swap), zt


def _gate_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _simple_gate(g: Tensor | None, g_gamma: Tensor | None) -> Tensor | None:
    if g is None or g_gamma is None:
        return g_gamma if g is None else g
    return g.to(g_gamma.dtype) + g_gamma


def _retention_gate(q: Tensor) -> Tensor:
    """log(1 - 2^(-5-h)) of each head h."""
    heads = torch.arange(q.shape[2], dtype=_gate_dtype(q), device=q.device)
    return torch.log1p(-torch.exp2(-5.0 - heads))


def _lightning_gate(q: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    """-(8/H) (1 - layer / layers) h of each head h."""
    heads = torch.arange(q.shape[2], dtype=_gate_dtype(q), device=q.device)
    return heads * (-8.0 / q.shape[2] * (1.0 - layer_idx / num_layers))


# ---- GLA ----

def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None,
              initial_state: Tensor | None = None, output_final_state: bool = False, state_v_first: bool = False,
              cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
              **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention with a log gate over keys, g [B,T,H,K]. `chunk_size` has no effect."""
    state_v_first = _v_first("chunk_gla", state_v_first, kwargs)
    return _call(q, k, v, g, None, scale, initial_state, None, output_final_state, cu_seqlens, swap=state_v_first,
                 cu_seqlens_cpu=cu_seqlens_cpu)[:2]


def fused_recurrent_gla(q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None,
                        scale: float | None = None, initial_state: Tensor | None = None,
                        output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
                        cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention with log gates over keys, gk [B,T,H,K], and over values, gv [B,T,H,V]; either or none."""
    state_v_first = _v_first("fused_recurrent_gla", state_v_first, kwargs)
    return _call(q, k, v, gk, gv, scale, initial_state, None, output_final_state, cu_seqlens, reverse,
                 state_v_first)[:2]


# ---- simple GLA ----

def chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
                     scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
                     state_v_first: bool = False, cu_seqlens: Tensor | None = None,
                     cu_seqlens_cpu: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """One log gate a token and head, g [B,T,H], or one a head, g_gamma [H], or their sum, or none. `chunk_size` has no
    effect."""
    state_v_first = _v_first("chunk_simple_gla", state_v_first, kwargs)
    return _call(q, k, v, _simple_gate(g, g_gamma), None, scale, initial_state, None, output_final_state, cu_seqlens,
                 swap=state_v_first, cu_seqlens_cpu=cu_seqlens_cpu)[:2]


def fused_chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
                           scale: float | None = None, initial_state: Tensor | None = None,
                           output_final_state: bool = False,
                           cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """As chunk_simple_gla."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
                               scale: float | None = None, initial_state: Tensor | None = None,
                               output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
                               cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """As chunk_simple_gla, in either direction."""
    state_v_first = _v_first("fused_recurrent_simple_gla", state_v_first, kwargs)
    return _call(q, k, v, _simple_gate(g, g_gamma), None, scale, initial_state, None, output_final_state, cu_seqlens,
                 reverse, state_v_first)[:2]


def parallel_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, scale: float | None = None,
                        output_attentions: bool = False, cu_seqlens: Tensor | None = None,
                        cu_seqlens_cpu: Tensor | None = None) -> tuple[Tensor, None]:
    """As chunk_simple_gla without states; the second result, attention scores, is None: they are not supported."""
    _refuse("parallel_simple_gla", {"output_attentions": output_attentions})
    return _call(q, k, v, g, None, scale, None, None, False, cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)[0], None


# ---- retention ----

def chunk_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
                    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
                    **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """RetNet's retention: head h decays by 1 - 2^(-5-h) a token. `chunk_size` has no effect."""
    _refuse("chunk_retention", kwargs)
    return _call(q, k, v, _retention_gate(q), None, scale, initial_state, None, output_final_state, cu_seqlens)[:2]


def fused_chunk_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                          initial_state: Tensor | None = None, output_final_state: bool = False,
                          cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """As chunk_retention."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def parallel_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, output_attentions: bool = False,
                       cu_seqlens: Tensor | None = None) -> tuple[Tensor, None]:
    """As chunk_retention without states; the second result, attention scores, is None: they are not supported."""
    _refuse("parallel_retention", {"output_attentions": output_attentions})
    return _call(q, k, v, _retention_gate(q), None, scale, None, None, False, cu_seqlens)[0], None


def fused_recurrent_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                              initial_state: Tensor | None = None, output_final_state: bool = False,
                              reverse: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
                              **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """As chunk_retention, in either direction."""
    state_v_first = _v_first("fused_recurrent_retention", state_v_first, kwargs)
    return _call(q, k, v, _retention_gate(q), None, scale, initial_state, None, output_final_state, cu_seqlens, reverse,
                 state_v_first)[:2]


# ---- linear attention ----

def chunk_linear_attn(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                      initial_state: Tensor | tuple[Tensor, Tensor | None] | None = None,
                      output_final_state: bool = False, normalize: bool = True,
                      cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:
    """No gate. With `normalize` o is divided by q . z + 1e-10, z the sum of keys, and a state is a pair (h, z), z
    [N,1,H,K]; the scale then cancels."""
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
    h0: Any
    h0, z0 = initial_state if normalize and isinstance(initial_state, tuple) else (initial_state, None)
    if z0 is not None:
        z0 = z0.squeeze(1)
    o, ht, zt = _call(q, k, v, None, None, scale, h0, z0, output_final_state, cu_seqlens, reverse, normalize=normalize)
    return o, ((ht, zt.unsqueeze(1)) if zt is not None else ht)


# ---- Lightning attention ----

def chunk_lightning_attn(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
                         initial_state: Tensor | None = None, output_final_state: bool = False,
                         cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Lightning attention: head h of layer l of L has the log gate -(8/H) (1 - l/L) h."""
    _refuse("chunk_lightning_attn", kwargs)
    return _call(q, k, v, _lightning_gate(q, layer_idx, num_layers), None, scale, initial_state, None,
                 output_final_state, cu_seqlens)[:2]


def fused_recurrent_lightning_attn(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int,
                                   scale: float | None = None, initial_state: Tensor | None = None,
                                   output_final_state: bool = False, reverse: bool = False,
                                   cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """As chunk_lightning_attn, in either direction."""
    return _call(q, k, v, _lightning_gate(q, layer_idx, num_layers), None, scale, initial_state, None,
                 output_final_state, cu_seqlens, reverse)[:2]


# ---- gated slot attention: two calls, a softmax over the slots between them ----

def fused_recurrent_gsa(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor | None = None, scale: float | None = None,
                        initial_state: tuple[Tensor, Tensor] | None = None, output_final_state: bool = False,
                        reverse: bool = False,
                        cu_seqlens: Tensor | None = None) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Gated slot attention: s [B,T,H,M] writes to M slots, g [B,T,H,M] their log gate; states [N,H,K,M], [N,H,M,V]."""
    if g is None:
        raise NotCovered("fused_recurrent_gsa: g is None; a learned gate from s alone is not supported, give g")
    hk0, hv0 = initial_state if initial_state is not None else (None, None)
    s = s.to(k.dtype)
    slots, hkt, _ = _call(q, k, s, None, g, scale, hk0, None, output_final_state, cu_seqlens, reverse)
    attention = torch.softmax(slots, -1, dtype=_gate_dtype(q)).to(v.dtype)
    o, hvt, _ = _call(attention, s, v, g, None, 1.0, hv0, None, output_final_state, cu_seqlens, reverse)
    return o, (hkt, hvt)


def chunk_gsa(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor | None = None, scale: float | None = None,
              initial_state: tuple[Tensor, Tensor] | None = None, output_final_state: bool = False,
              checkpoint_level: int = 2, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
              **kwargs: Any) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """As fused_recurrent_gsa. `checkpoint_level` is about FLA's memory and has no effect."""
    _refuse("chunk_gsa", kwargs)
    return fused_recurrent_gsa(q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)
