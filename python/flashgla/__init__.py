"""Gated linear attention (Yang et al. 2024) on arrays of NumPy, PyTorch, CuPy and JAX, without a copy.

For each sequence n, and each key-value head with its query heads:

    h_t = (exp(g_t) exp(gv_t)^T) * h_{t-1} + phi(k_t) v_t^T          h in R^{K x V}
    o_t = scale * phi(q_t)^T h_t

Gates are natural logarithms in [-inf, 0]; -inf forgets everything. With `normalize` (no gate) z_t = z_{t-1} + phi(k_t)
and o_t = phi(q_t)^T h_t / (phi(q_t) . z_t + 1e-10); the scale would cancel and is not applied.

B batch, T length, H query heads, G key-value heads (G divides H), K and V key and value channels per head, N sequences
(B, or those that cu_seqlens packs). dtypes: q, k, v one of float64, float32, bfloat16, float16; gates that or float32;
states float32 (float64 with float64). Any strides, but the last dimension is contiguous, and states wholly.

`flashgla.LanguageModel` loads, scores and runs whole models (flashgla.models), `flashgla.Tokenizer` their tokenizers.

Modules: `flashgla.torch` (PyTorch operators), `flashgla.ops` (functions named as in flash-linear-attention),
`flashgla.fla` (puts them behind flash-linear-attention's models). An argument that is not what it must be is a
ValueError that names it, what it is and what it must be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from . import _flashgla
from ._arrays import is_torch, library_of

__all__ = ["Gradients", "LanguageModel", "Tokenizer", "gated_linear_attention", "gated_linear_attention_backward",
           "step", "with_cuda"]
__version__: str = _flashgla.version

#: Whether this build of the package holds the CUDA kernels.
with_cuda: bool = _flashgla.with_cuda


if TYPE_CHECKING:
    from .models import LanguageModel, Tokenizer


def __getattr__(name: str) -> Any:
    """Models and tokenizers, with the libraries behind them, are loaded when they are first asked for."""
    if name in ("LanguageModel", "Tokenizer"):
        from . import models

        return getattr(models, name)
    raise AttributeError(f"module 'flashgla' has no attribute {name!r}")


class Gradients(NamedTuple):
    """Gradients of a loss with respect to the inputs, in their shapes and dtypes; None where there was no input.

    `dg` of a constant gate [G] is float32 (float64 with float64). `d_initial_state` is a pair with `normalize`.
    """

    dq: Any
    dk: Any
    dv: Any
    dg: Any
    dgv: Any
    d_initial_state: Any


def _pair(state: Any, normalize: bool) -> tuple[Any, Any]:
    """(h, z) of a state argument: with normalize a pair, else h alone."""
    if state is None:
        return None, None
    if not normalize:
        return state, None
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        raise ValueError(f"gated_linear_attention: a state is of type {type(state).__name__}; expected a pair (h, z), "
                         "as normalize is set")
    return state[0], state[1]


def gated_linear_attention(q: Any, k: Any, v: Any, g: Any = None, gv: Any = None, scale: float | None = None,
                           initial_state: Any = None, output_final_state: bool = False, cu_seqlens: Any = None,
                           algorithm: str = "automatic", *, feature_map: str = "identity", normalize: bool = False,
                           float32_math: str = "ieee", max_seqlen: int | None = None,
                           gate_logit_normalizer: float | None = None,
                           gate_clamp_min: float | None = None) -> tuple[Any, Any]:
    """The operator, for whole sequences. Returns (o, final state or None), arrays of q's library on q's device.

    Args:
        q: queries [B,T,H,K].
        k: keys [B,T,G,K]; H / G consecutive query heads share a key-value head.
        v: values [B,T,G,V].
        g: log gate over keys: [G] constant, [B,T,G] one a token and head, [B,T,G,K] a vector over keys, None no gate.
        gv: log gate over values [B,T,G,V]; then g is [B,T,G,K], in gv's dtype, or None.
        scale: factor on q^T h; None is K^-1/2.
        initial_state: h before the first token [N,G,K,V]; with `normalize` a pair (h, z), z [N,G,K]. None is zeros.
        output_final_state: whether the second result is the state after the last token, shaped as initial_state.
        cu_seqlens: int32 or int64 [N+1], 0 = c_0 <= ... <= c_N = T: N sequences packed into one row (B = 1). Values
            that lie on a GPU are not checked.
        algorithm: automatic, recurrent, parallel, chunk_materialized (states kept for backward) or chunk_recomputed.
        feature_map: phi: identity, elu_plus_one or relu.
        normalize: divide by the sum of keys (linear attention; no gate).
        float32_math: what float32 products on CUDA may be rounded to: ieee or tf32.
        max_seqlen: with cu_seqlens, tokens of the longest sequence, where it is known. On CUDA, where cu_seqlens lies
            on the device, it tells what is fastest, for which else the device is asked: calls take up to 1.6 times as
            long without it.
        gate_logit_normalizer: g and gv are logits x, whose log gates are log(sigmoid(x)) / gate_logit_normalizer (16 in
            GLA's layer); their gradients are by x. None: they are the log gates. Not with a constant gate.
        gate_clamp_min: with it, what those log gates are at least.

    With PyTorch tensors the result has gradients (flashgla.torch). Raises ValueError naming the argument, TypeError
    for what is no array.
    """
    if is_torch(q):
        from . import torch as adapter

        return adapter.gated_linear_attention(
            q, k, v, g, gv, scale, initial_state, output_final_state, cu_seqlens, algorithm, feature_map=feature_map,
            normalize=normalize, float32_math=float32_math, max_seqlen=max_seqlen,
            gate_logit_normalizer=gate_logit_normalizer, gate_clamp_min=gate_clamp_min)
    library = library_of(q)
    h0, z0 = _pair(initial_state, normalize)
    inputs = _views(library, q=q, k=k, v=v, g=g, gv=gv, initial_state=h0, z=z0, cu_seqlens=cu_seqlens)
    operands = _flashgla.Operands(*inputs, scale, algorithm, feature_map, normalize, float32_math, max_seqlen,
                                  gate_logit_normalizer, gate_clamp_min)
    o_shape, h_shape, z_shape = operands.output_shapes()
    o = library.empty(o_shape, operands.dtype)
    ht = library.empty(h_shape, operands.state_dtype) if output_final_state else None
    zt = library.empty(z_shape, operands.state_dtype) if output_final_state and normalize else None
    outputs = _views(library, True, o=o, ht=ht, zt=zt)
    operands.forward(*outputs, None, library.stream, 0, library.allocate)
    o, ht, zt = (library.finish(x) for x in (o, ht, zt))
    return o, ((ht, zt) if output_final_state and normalize else ht)


def gated_linear_attention_backward(d_o: Any, q: Any, k: Any, v: Any, g: Any = None, gv: Any = None,
                                    scale: float | None = None, initial_state: Any = None, cu_seqlens: Any = None,
                                    algorithm: str = "automatic", *, feature_map: str = "identity",
                                    normalize: bool = False, float32_math: str = "ieee",
                                    max_seqlen: int | None = None, gate_logit_normalizer: float | None = None,
                                    gate_clamp_min: float | None = None, o: Any = None,
                                    d_final_state: Any = None) -> Gradients:
    """Gradients of a loss whose gradients with respect to o and the final state are `d_o` and `d_final_state`.

    Args:
        d_o: [B,T,H,V], o's dtype.
        o: what gated_linear_attention returned: needed with `normalize` or `gv`.
        d_final_state: as the final state that it returned; None is zero.

    The rest as in gated_linear_attention. The states between chunks are computed anew. With PyTorch use autograd.
    """
    if is_torch(q):
        raise TypeError("gated_linear_attention_backward: q is a torch.Tensor; expected arrays of another library: "
                        "PyTorch's autograd calls the gradient itself")
    library = library_of(q)
    h0, z0 = _pair(initial_state, normalize)
    d_ht, d_zt = _pair(d_final_state, normalize)
    inputs = _views(library, q=q, k=k, v=v, g=g, gv=gv, initial_state=h0, z=z0, cu_seqlens=cu_seqlens)
    given = _views(library, o=o, states=None, d_o=d_o, d_final_state=d_ht, d_z=d_zt)
    operands = _flashgla.Operands(*inputs, scale, algorithm, feature_map, normalize, float32_math, max_seqlen,
                                  gate_logit_normalizer, gate_clamp_min)

    gradients = [None if x is None else library.empty(x.shape, x.dtype) for x in inputs[:7]]
    if g is not None and len(inputs[3].shape) == 1:
        gradients[3] = library.empty(inputs[3].shape, operands.state_dtype)
    written = _views(library, True, **dict(zip(("dq", "dk", "dv", "dg", "dgv", "dh0", "dz0"), gradients)))
    operands.backward(*given, *written, library.stream, 0, library.allocate)
    dq, dk, dv, dg, dgv, dh0, dz0 = (library.finish(x) for x in gradients)
    return Gradients(dq, dk, dv, dg, dgv, (dh0, dz0) if normalize and initial_state is not None else dh0)


def step(q: Any, k: Any, v: Any, state: Any, g: Any = None, gv: Any = None, scale: float | None = None, *,
         feature_map: str = "identity", normalize: bool = False, gate_logit_normalizer: float | None = None,
         gate_clamp_min: float | None = None) -> Any:
    """One token for each of B sequences: returns o [B,H,V] and updates `state` in place.

    q [B,H,K], k [B,G,K], v [B,G,V]; g [G], [B,G] or [B,G,K]; gv [B,G,V]. `state`: h [B,G,K,V], float32, or bfloat16 on
    request (float64 with float64); with `normalize` a pair (h, z), z [B,G,K]. Contiguous and writable, so never a JAX
    array. The rest as in gated_linear_attention.
    """
    if is_torch(q):
        from . import torch as adapter

        return adapter.step(q, k, v, state, g, gv, scale, feature_map=feature_map, normalize=normalize,
                            gate_logit_normalizer=gate_logit_normalizer, gate_clamp_min=gate_clamp_min)
    library = library_of(q)
    h, z = _pair(state, normalize)
    views = _views(library, q=q, k=k, v=v, g=g, gv=gv)
    o = library.empty((*views[0].shape[:-1], *views[2].shape[-1:]), views[0].dtype)
    written = _views(library, True, state=h, z=z, o=o)
    _flashgla.step(*views, *written, scale, feature_map, normalize, gate_logit_normalizer, gate_clamp_min,
                   library.stream, 0, library.allocate)
    return library.finish(o)


def _views(library: Any, writable: bool = False, /, **arrays: Any) -> list[Any]:
    """Views of the arrays that are there; an error names the argument."""
    views = []
    for name, array in arrays.items():
        try:
            views.append(None if array is None else library.view(array, writable))
        except (TypeError, ValueError) as problem:
            raise type(problem)(f"{name}: {problem}") from None
    return views
