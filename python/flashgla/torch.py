"""PyTorch operators: flashgla::forward, ::backward and ::step, with autograd, fake-tensor and autocast rules.

`gated_linear_attention` and `step` are the functions to call; they work eagerly, under torch.compile without a graph
break, in CUDA graphs, on the tensors' device and its current stream, and never wait for the device. Importing this
module registers the operators. The second derivative is not implemented and says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from . import _flashgla, _pair
from ._flashgla import Array

__all__ = ["gated_linear_attention", "step"]


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gv: Tensor | None = None,
                           scale: float | None = None,
                           initial_state: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
                           output_final_state: bool = False, cu_seqlens: Tensor | None = None,
                           algorithm: str = "automatic", *, feature_map: str = "identity", normalize: bool = False,
                           float32_math: str = "ieee", max_seqlen: int | None = None,
                           gate_logit_normalizer: float | None = None,
                           gate_clamp_min: float | None = None) -> tuple[Tensor, Any]:
    """flashgla.gated_linear_attention on PyTorch tensors, differentiable in q, k, v, g, gv and the initial state.

    cu_seqlens lies on q's device. Under autocast q, k and v are cast to its dtype, and gates that are neither of that
    dtype nor float32 to float32; float64 stays. Tensors that are not contiguous in their last dimension, and states
    that are not contiguous, are copied.
    """
    h0, z0 = _pair(initial_state, normalize)
    inputs = (q, k, v, g, gv, h0, z0)
    keep = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs)
    o, ht, zt, _ = torch.ops.flashgla.forward(*inputs, cu_seqlens, scale, algorithm, feature_map, normalize,
                                              float32_math, max_seqlen, gate_logit_normalizer, gate_clamp_min,
                                              output_final_state, keep)
    if not output_final_state:
        return o, None
    return o, ((ht, zt) if normalize else ht)


def step(q: Tensor, k: Tensor, v: Tensor, state: Tensor | tuple[Tensor, Tensor], g: Tensor | None = None,
         gv: Tensor | None = None, scale: float | None = None, *, feature_map: str = "identity",
         normalize: bool = False, gate_logit_normalizer: float | None = None,
         gate_clamp_min: float | None = None) -> Tensor:
    """flashgla.step on PyTorch tensors: returns o, updates `state` in place. Not differentiable."""
    h, z = _pair(state, normalize)
    return torch.ops.flashgla.step(q, k, v, g, gv, h, z, scale, feature_map, normalize, gate_logit_normalizer,
                                   gate_clamp_min)


# ---- operators ----

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, Tensor? h0, Tensor? z0, Tensor? cu_seqlens"
_OPTIONS = ("float? scale, str algorithm, str feature_map, bool normalize, str float32_math, int? max_seqlen, "
            "float? gate_logit_normalizer, float? gate_clamp_min")
_library = torch.library.Library("flashgla", "DEF")
# (o, ht, zt, states); what is not wanted is an empty tensor. keep: states are for a backward.
_library.define(f"forward({_INPUTS}, {_OPTIONS}, bool final_state, bool keep) -> (Tensor, Tensor, Tensor, Tensor)",
                tags=(torch.Tag.pt2_compliant_tag,))
# (dq, dk, dv, dg, dgv, dh0, dz0); those not in `wanted` are empty tensors.
_library.define(f"backward({_INPUTS}, {_OPTIONS}, Tensor? o, Tensor? states, Tensor d_o, Tensor? d_ht, "
                "Tensor? d_zt, bool[7] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
                tags=(torch.Tag.pt2_compliant_tag,))
_library.define("step(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, Tensor(a!) h, Tensor(b!)? z, float? scale, "
                "str feature_map, bool normalize, float? gate_logit_normalizer, float? gate_clamp_min) -> Tensor",
                tags=(torch.Tag.pt2_compliant_tag,))

# Sequences shorter than this on average keep no states: there are hardly any, and backward makes them.
_KEEP_FROM = 64
_NAMES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
          torch.int64: "i64", torch.int32: "i32"}


def _state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> Any:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _keeps_states(q: Tensor, cu_seqlens: Tensor | None) -> bool:
    return bool(q.shape[0] * q.shape[1] >= _KEEP_FROM * _sequences(q, cu_seqlens))


def _new_outputs(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, normalize: bool, final_state: bool,
                 states_bytes: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = _sequences(q, cu_seqlens)
    groups, key_dim, value_dim = k.shape[2], q.shape[3], v.shape[3]
    state_dtype = _state_dtype(q)
    o = q.new_empty((*q.shape[:3], value_dim))
    ht = q.new_empty((n, groups, key_dim, value_dim) if final_state else 0, dtype=state_dtype)
    zt = q.new_empty((n, groups, key_dim) if final_state and normalize else 0, dtype=state_dtype)
    return o, ht, zt, q.new_empty(states_bytes, dtype=torch.uint8)


def _new_gradients(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, wanted: list[bool]) -> tuple[Tensor, ...]:
    gradients = []
    for i, (x, want) in enumerate(zip((q, k, v, *others), wanted)):
        if x is None:
            gradients.append(q.new_empty(0))
            continue
        constant_gate = i == 3 and x.dim() == 1
        gradients.append(q.new_empty(x.shape if want else 0, dtype=_state_dtype(q) if constant_gate else x.dtype))
    return tuple(gradients)


def _view(x: Tensor | None, writable: bool = False) -> Any:
    return None if x is None else Array(to_dlpack(x), writable)


def _rows(x: Tensor | None) -> Tensor | None:
    """x with a contiguous last dimension."""
    return x if x is None or x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def _written(x: Tensor) -> Any:
    """View of an output; None for the empty tensor that stands for one not wanted."""
    return Array(to_dlpack(x), True) if x.numel() else None


def _place(q: Tensor) -> tuple[int, int, Any]:
    """Stream, threads and allocator of a call on q's device."""
    if not q.is_cuda:
        return 0, torch.get_num_threads(), None

    def allocate(bytes: int) -> Array:
        return Array(to_dlpack(torch.empty(bytes, dtype=torch.uint8, device=q.device)), True)

    return torch.cuda.current_stream(q.device).cuda_stream, 0, allocate


def _on_device(q: Tensor) -> contextlib.AbstractContextManager[Any]:
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        return torch.cuda.device(q.device)
    return contextlib.nullcontext()


def _check_dtypes(*arguments: tuple[str, Tensor | None]) -> None:
    for name, x in arguments:
        if x is not None and x.dtype not in _NAMES:
            raise ValueError(f"{name} is of {x.dtype}; expected float64, float32, bfloat16 or float16")


def _operands(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, h0: Tensor | None,
              z0: Tensor | None, cu_seqlens: Tensor | None, *options: Any) -> _flashgla.Operands:
    _check_dtypes(("q", q), ("k", k), ("v", v), ("g", g), ("gv", gv), ("initial_state", h0), ("initial_state", z0))
    states = (None if x is None else x.detach().contiguous() for x in (h0, z0, cu_seqlens))
    return _flashgla.Operands(*(_view(_rows(x)) for x in (q, k, v, g, gv)), *(_view(x) for x in states), *options)


def _forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, h0: Tensor | None,
             z0: Tensor | None, cu_seqlens: Tensor | None, scale: float | None, algorithm: str, feature_map: str,
             normalize: bool, float32_math: str, max_seqlen: int | None, gate_logit_normalizer: float | None,
             gate_clamp_min: float | None, final_state: bool,
             keep: bool) -> tuple[Tensor, ...]:
    with _on_device(q):
        operands = _operands(q, k, v, g, gv, h0, z0, cu_seqlens, scale, algorithm, feature_map, normalize, float32_math,
                             max_seqlen, gate_logit_normalizer, gate_clamp_min)
        states_bytes = operands.states_bytes() if keep and _keeps_states(q, cu_seqlens) else 0
        outputs = _new_outputs(q, k, v, cu_seqlens, normalize, final_state, states_bytes)
        operands.forward(*(_written(x) for x in outputs), *_place(q))
    return outputs


def _backward(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, h0: Tensor | None,
              z0: Tensor | None, cu_seqlens: Tensor | None, scale: float | None, algorithm: str, feature_map: str,
              normalize: bool, float32_math: str, max_seqlen: int | None, gate_logit_normalizer: float | None,
              gate_clamp_min: float | None, o: Tensor | None, states: Tensor | None, d_o: Tensor,
              d_ht: Tensor | None, d_zt: Tensor | None, wanted: list[bool]) -> tuple[Tensor, ...]:
    with _on_device(q):
        operands = _operands(q, k, v, g, gv, h0, z0, cu_seqlens, scale, algorithm, feature_map, normalize, float32_math,
                             max_seqlen, gate_logit_normalizer, gate_clamp_min)
        gradients = _new_gradients(q, k, v, g, gv, h0, z0, wanted=wanted)
        d_states = (None if x is None else x.contiguous() for x in (d_ht, d_zt))
        operands.backward(_view(o), _view(states), _view(_rows(d_o)), *(_view(x) for x in d_states),
                          *(_written(x) for x in gradients), *_place(q))
    return gradients


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, h: Tensor, z: Tensor | None,
          scale: float | None, feature_map: str, normalize: bool, gate_logit_normalizer: float | None,
          gate_clamp_min: float | None) -> Tensor:
    _check_dtypes(("q", q), ("k", k), ("v", v), ("g", g), ("gv", gv), ("state", h), ("state", z))
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    with _on_device(q):
        _flashgla.step(*(_view(_rows(x)) for x in (q, k, v, g, gv)), _view(h, True), _view(z, True), _view(o, True),
                       scale, feature_map, normalize, gate_logit_normalizer, gate_clamp_min, *_place(q))
    return o


for _key in ("CPU", "CUDA"):
    _library.impl("forward", _forward, _key)
    _library.impl("backward", _backward, _key)
    _library.impl("step", _step, _key)


# ---- fake tensors: shapes and dtypes only ----

def _without_memory(x: Tensor | None, shape: list[int] | None = None) -> Any:
    if x is None:
        return None
    sizes = [int(size) for size in x.shape] if shape is None else shape
    return Array.without_memory(sizes, _NAMES[x.dtype], str(x.device) if x.is_cuda else "cpu")


def _states_bytes(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, cu_seqlens: Tensor | None,
                  *options: Any) -> Any:
    """Operands.states_bytes from shapes alone. With symbolic batch, length or sequences an expression in them."""
    def ask(batch: int, length: int, sequences: int) -> int:
        def at(x: Tensor | None) -> Any:
            return _without_memory(x, None if x is None or x.dim() == 1 else [batch, length, *map(int, x.shape[2:])])

        packing = _without_memory(cu_seqlens, [sequences + 1])
        return _flashgla.Operands(*map(at, (q, k, v, g, gv)), None, None, packing, *options).states_bytes()

    batch, length = q.shape[:2]
    sequences = _sequences(q, cu_seqlens)
    if not any(isinstance(size, torch.SymInt) for size in (batch, length, sequences)):
        return ask(batch, length, sequences)
    return _states_size(ask, batch, length, sequences, cu_seqlens is not None)


def _states_size(ask: Callable[[int, int, int], int], batch: Any, length: Any, sequences: Any, packed: bool) -> Any:
    """What ask(batch, length, sequences) answers, as an expression in them."""
    # One state for every `tokens` tokens that a sequence has or begins; packing counts one more a sequence. A debug
    # build has a tag behind all of them.
    base = ask(1, 1024, 1)
    of_1024_tokens = ask(1, 2048, 1) - base
    of_one = ask(1, 1024, 2) - base if packed else ask(1, 1025, 1) - base
    if of_1024_tokens == 0 and base == 0:
        return 0

    def chunks(tokens: int, batch: Any, length: Any, sequences: Any) -> Any:
        return length // tokens + sequences if packed else batch * ((length + tokens - 1) // tokens)

    tag = base - of_1024_tokens - packed * of_one
    if tag in (0, 16) and of_1024_tokens % of_one == 0:
        tokens = 1024 * of_one // of_1024_tokens
        return chunks(tokens, batch, length, sequences) * of_one + tag

    # Or a state for every second chunk of 64 tokens, and something for each chunk.
    one, two, three = (ask(1, tokens, 1) for tokens in ((63, 64, 128) if packed else (64, 128, 192)))
    of_chunk = two - one
    of_state = three - two - of_chunk
    rest = one - of_chunk - 2 * of_state

    def size(batch: Any, length: Any, sequences: Any) -> Any:
        count = chunks(64, batch, length, sequences)
        states = (count + (sequences if packed else batch)) // 2 + 1
        return states * of_state + count * of_chunk + rest

    for known in ((1, 1000, 5), (1, 4099, 2)) if packed else ((3, 1000, 3), (2, 4099, 2)):
        if size(*known) != ask(*known):
            raise NotImplementedError("flashgla: states whose size is not known for symbolic lengths")
    return size(batch, length, sequences)


@torch.library.register_fake("flashgla::forward", lib=_library)
def _(q, k, v, g, gv, h0, z0, cu_seqlens, scale, algorithm, feature_map, normalize, float32_math, max_seqlen,
      gate_logit_normalizer, gate_clamp_min, final_state, keep):
    states_bytes = 0
    if keep and _keeps_states(q, cu_seqlens):
        # States have as many bytes whatever the longest sequence is.
        states_bytes = _states_bytes(q, k, v, g, gv, cu_seqlens, scale, algorithm, feature_map, normalize, float32_math,
                                     None, gate_logit_normalizer, gate_clamp_min)
    return _new_outputs(q, k, v, cu_seqlens, normalize, final_state, states_bytes)


@torch.library.register_fake("flashgla::backward", lib=_library)
def _(q, k, v, g, gv, h0, z0, cu_seqlens, scale, algorithm, feature_map, normalize, float32_math, max_seqlen,
      gate_logit_normalizer, gate_clamp_min, o, states, d_o, d_ht, d_zt, wanted):
    return _new_gradients(q, k, v, g, gv, h0, z0, wanted=wanted)


@torch.library.register_fake("flashgla::step", lib=_library)
def _(q, k, v, g, gv, h, z, scale, feature_map, normalize, gate_logit_normalizer, gate_clamp_min):
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


# ---- autograd ----

def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, options, (final_state, keep) = inputs[:8], inputs[8:-2], inputs[-2:]
    normalize = options[3]
    o, _, _, states = output
    needs_o = normalize or tensors[4] is not None
    ctx.set_materialize_grads(False)
    ctx.options = options
    ctx.final_state = final_state
    ctx.kept = (needs_o, keep and _keeps_states(tensors[0], tensors[7]))
    ctx.save_for_backward(*tensors, *(x for x, kept in zip((o, states), ctx.kept) if kept))


def _differentiate(ctx: Any, d_o: Tensor | None, d_ht: Tensor | None, d_zt: Tensor | None, _: None) -> tuple[Any, ...]:
    everything = ctx.saved_tensors  # once: activation checkpointing computes them anew at each access
    tensors, saved = everything[:8], iter(everything[8:])
    o, states = (next(saved) if kept else None for kept in ctx.kept)
    if states is not None and states.shape[0] == 0:
        states = None
    wanted = [x is not None and needed for x, needed in zip(tensors[:7], ctx.needs_input_grad)]
    if d_o is None:
        q, v = tensors[0], tensors[2]
        d_o = q.new_zeros((*q.shape[:3], v.shape[3]))
    final_state, normalize = ctx.final_state, ctx.options[3]
    if not final_state:  # empty outputs have gradients in compiled graphs
        d_ht = None
    if not (final_state and normalize):
        d_zt = None
    gradients = torch.ops.flashgla.backward(*tensors, *ctx.options, o, states, d_o, d_ht, d_zt, wanted)
    d_g = gradients[3]
    if wanted[3] and d_g.dtype != tensors[3].dtype:
        d_g = d_g.to(tensors[3].dtype)
    gradients = (*gradients[:3], d_g, *gradients[4:])
    return (*(x if want else None for x, want in zip(gradients, wanted)), *[None] * (3 + len(ctx.options)))


def _refuse(what: str) -> Any:
    def refuse(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(f"flashgla: {what}")

    return refuse


torch.library.register_autograd("flashgla::forward", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("flashgla::backward", _refuse("the second derivative is not implemented"), lib=_library)


# ---- autocast ----

def _autocast_rule(device: str) -> None:
    key = "Autocast" + device.upper()
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None) -> tuple[Tensor | None, ...]:
        if q.dtype == torch.float64:
            return q, k, v, g, gv
        dtype = torch.get_autocast_dtype(device)
        gates = (x if x is None or x.dtype in (dtype, torch.float32) else x.float() for x in (g, gv))
        return q.to(dtype), k.to(dtype), v.to(dtype), *gates

    def rule(operator: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return operator(*cast(*arguments[:5]), *arguments[5:])

        return call

    _library.impl("forward", rule(torch.ops.flashgla.forward), key)
    _library.impl("step", rule(torch.ops.flashgla.step), key)


_autocast_rule("cpu")
_autocast_rule("cuda")
