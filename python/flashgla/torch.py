"""PyTorch operators: flashgla::forward, ::backward and ::step, with autograd, fake-tensor and autocast rules.

`gated_linear_attention` and `step` are the functions to call; they work eagerly, under torch.compile without a graph
break, in CUDA graphs, on the tensors' device and its current stream, and never wait for the device. Importing this
module registers the operators. The second derivative and the one in forward mode are not implemented and say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

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
    output_final_state = bool(output_final_state)
    tensors = (q, k, v, g, gv, h0, z0, cu_seqlens)
    options = (scale, algorithm, feature_map, normalize, float32_math, max_seqlen, gate_logit_normalizer,
               gate_clamp_min)
    way = _way(tensors)
    if way == _BY_DISPATCHER:
        _require_tensors(("q", "k", "v", "g", "gv", "initial_state", "initial_state", "cu_seqlens"), tensors)
        keep = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)
        o, ht, zt, _ = torch.ops.flashgla.forward(*tensors, *options, output_final_state, keep)
    else:
        device = "cuda" if q.is_cuda else "cpu"
        if torch.is_autocast_enabled(device):
            tensors = (*_cast(device, *tensors[:5]), *tensors[5:])
        if way == _PAST_DISPATCHER:
            o, ht, zt, _ = _calls.forward(tensors, options, output_final_state, False)
        elif output_final_state:
            o, ht, zt = _apply(*tensors, (options, True))
        else:
            return _apply(*tensors, (options, False)), None
    if not output_final_state:
        return o, None
    return o, ((ht, zt) if normalize else ht)


def step(q: Tensor, k: Tensor, v: Tensor, state: Tensor | tuple[Tensor, Tensor], g: Tensor | None = None,
         gv: Tensor | None = None, scale: float | None = None, *, feature_map: str = "identity",
         normalize: bool = False, gate_logit_normalizer: float | None = None,
         gate_clamp_min: float | None = None) -> Tensor:
    """flashgla.step on PyTorch tensors: returns o, updates `state` in place. Not differentiable."""
    h, z = _pair(state, normalize)
    tensors = (q, k, v, g, gv, h, z)
    options = (scale, feature_map, normalize, gate_logit_normalizer, gate_clamp_min)
    # With gradients wanted by the operator, which says that there are none.
    if h is None or _way(tensors) != _PAST_DISPATCHER:
        _require_tensors(("q", "k", "v", "g", "gv", "state", "state's z"), tensors)
        return torch.ops.flashgla.step(*tensors, *options)
    device = "cuda" if q.is_cuda else "cpu"
    if torch.is_autocast_enabled(device):
        tensors = (*_cast(device, *tensors[:5]), h, z)
    return _step(*tensors, *options)


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


# How a call goes: plain tensors on a CPU or GPU, which nothing compiles, traces, transforms or watches, past PyTorch's
# dispatcher, whose way through Python takes longer than all else that the host does for a call.
_BY_DISPATCHER, _PAST_DISPATCHER, _PAST_DISPATCHER_WITH_GRADIENTS = range(3)


def _way(tensors: tuple[Any, ...]) -> int:
    if torch.compiler.is_compiling():
        return _BY_DISPATCHER
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    return _calls.way(tensors)


def _refuse_tangents(tensors: tuple[Any, ...]) -> None:
    """PyTorch leaves them out of an operator that knows none, without a word."""
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("flashgla: the derivative in forward mode is not implemented")


def _require_tensors(names: tuple[str, ...], tensors: tuple[Any, ...]) -> None:
    """What PyTorch's dispatcher would refuse, by name; compiled graphs were checked when they were traced."""
    if torch.compiler.is_compiling():
        return
    for name, x in zip(names, tensors):
        if not isinstance(x, Tensor) and (x is not None or name in ("k", "v", "state")):
            raise TypeError(f"{name} is of type {type(x).__name__}; expected a torch.Tensor, as q is one")


# The operator on tensors where they lie: by DLPack's C exchange API, which PyTorch has from 2.10 on, or by capsules.
_calls = _flashgla.Torch(torch, getattr(Tensor, "__dlpack_c_exchange_api__", None))

_NORMALIZE = 3  # where the options have it

_NAMES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
          torch.int64: "i64", torch.int32: "i32"}


def _state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> Any:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _keeps_states(q: Tensor, cu_seqlens: Tensor | None) -> bool:
    """As Torch::forward in src/torch.cpp has it."""
    return bool(q.shape[0] * q.shape[1] >= _flashgla.Torch.KEEP_FROM * _sequences(q, cu_seqlens))


def _new_outputs(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, normalize: bool, final_state: bool,
                 states_bytes: Any) -> tuple[Tensor | None, ...]:
    groups, key_dim, value_dim = k.shape[2], q.shape[3], v.shape[3]
    o = q.new_empty((*q.shape[:3], value_dim))
    ht = zt = states = None
    if final_state:
        n, state_dtype = _sequences(q, cu_seqlens), _state_dtype(q)
        ht = q.new_empty((n, groups, key_dim, value_dim), dtype=state_dtype)
        zt = q.new_empty((n, groups, key_dim), dtype=state_dtype) if normalize else None
    if not isinstance(states_bytes, int) or states_bytes > 0:
        states = q.new_empty(states_bytes, dtype=torch.uint8)
    return o, ht, zt, states


def _new_gradients(tensors: tuple[Tensor | None, ...], wanted: list[bool]) -> list[Tensor | None]:
    """Of q, k, v, g, gv, h0 and z0, those that are wanted."""
    return [torch.empty_like(x, memory_format=torch.contiguous_format) if want and x is not None else None
            for x, want in zip(tensors, wanted)]


def _all_there(q: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Results as an operator of PyTorch gives them: an empty tensor stands for one that is not wanted."""
    return tuple(q.new_empty(0) if x is None else x for x in tensors)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, options, (final_state, keep) = arguments[:8], arguments[8:-2], arguments[-2:]
    return _all_there(tensors[0], *_calls.forward(tensors, options, final_state, keep))


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, options, others = arguments[:8], arguments[8:-6], arguments[-6:]
    return _all_there(tensors[0], *_calls.backward(tensors, options, *others))


def _step(*arguments: Any) -> Tensor:
    tensors, options = arguments[:7], arguments[7:]
    o = _calls.step(*tensors, options)
    for x in tensors[5:]:
        if x is not None and not x.is_inference():
            torch.autograd.graph.increment_version(x)
    return o


for _key in ("CPU", "CUDA"):
    _library.impl("forward", _forward, _key)
    _library.impl("backward", _backward, _key)
    _library.impl("step", _step, _key)


def _step_on_negated(*arguments: Any) -> Tensor:
    """Of tensors that PyTorch negates when they are read: its own rule is for operators that return what they write."""
    plain = [x.resolve_neg() if isinstance(x, Tensor) else x for x in arguments]
    o = torch.ops.flashgla.step(*plain)
    for x, written in zip(arguments[5:7], plain[5:7]):
        if x is not written:
            x.copy_(written)
    return o


_library.impl("step", _step_on_negated, "Negative")


# ---- fake tensors: shapes and dtypes only ----

def _without_memory(x: Tensor | None, shape: list[int] | None = None) -> Any:
    if x is None:
        return None
    sizes = [int(size) for size in x.shape] if shape is None else shape
    return Array.without_memory(sizes, _NAMES[x.dtype], str(x.device) if x.is_cuda else "cpu")


def _capability(device: torch.device) -> int:
    """Of a CUDA device, which need not be there: fake tensors are on a GPU without one. Then as of Hopper."""
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _states_bytes(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, cu_seqlens: Tensor | None,
                  *options: Any) -> Any:
    """Operands.states_bytes from shapes alone. With symbolic batch, length or sequences an expression in them."""
    capability = _capability(q.device)
    chunk = 64 if q.is_cuda else 128  # tokens from one state to the next, or to the one that is not kept

    def ask(batch: int, length: int, sequences: int, packed: bool) -> int:
        def at(x: Tensor | None) -> Any:
            return _without_memory(x, None if x is None or x.dim() == 1 else [batch, length, *map(int, x.shape[2:])])

        packing = _without_memory(cu_seqlens, [sequences + 1]) if packed else None
        operands = _flashgla.Operands(*map(at, (q, k, v, g, gv)), None, None, packing, *options)
        return operands.states_bytes(capability)

    batch, length = q.shape[:2]
    sequences, packed = _sequences(q, cu_seqlens), cu_seqlens is not None
    if not any(isinstance(size, torch.SymInt) for size in (batch, length, sequences)):
        return ask(batch, length, sequences, packed)
    return _states_size(ask, chunk, packed)(batch, length, sequences)


def _states_size(ask: Callable[[int, int, int, bool], int], chunk: int, packed: bool) -> Callable[[Any, Any, Any], Any]:
    """What ask(batch, length, sequences, packed) answers, as a function that takes symbols too.

    Bytes are kept of every chunk of so many tokens, of every second one's state (those of every one's count as the
    chunk's), and of every token; a debug build has a tag behind all of them. What features leave of all chunks and of
    all tokens is rounded up to 256 bytes.
    """
    def counts(batch: Any, length: Any, sequences: Any) -> tuple[Any, Any, Any]:
        chunks = length // chunk + sequences if packed else batch * ((length + chunk - 1) // chunk)
        return chunks, (chunks + sequences) // 2 + 1, batch * length

    def whole(sequences: int, chunks: int, packed: bool = packed) -> tuple[int, int, int, bool]:
        """So many sequences of whole chunks. Of 128 nothing has to be rounded up."""
        tokens = chunks * chunk
        return (1, sequences * tokens, sequences, True) if packed else (sequences, tokens, sequences, False)

    # A token and a state have as many bytes where sequences are not packed, and there are told apart from chunks.
    of_token = (ask(*whole(128, 1, False)) - ask(128, chunk - 1, 128, False)) // 128
    of_state = (ask(*whole(256, 1, False)) - ask(*whole(128, 2, False))) // 64
    few, many = whole(128, 1), whole(128, 2)
    chunks, states, tokens = (b - a for a, b in zip(counts(*few[:3]), counts(*many[:3])))
    of_chunk = (ask(*many) - ask(*few) - states * of_state - tokens * of_token) // chunks
    chunks, states, tokens = counts(*few[:3])
    tag = ask(*few) - chunks * of_chunk - states * of_state - tokens * of_token
    chunk_rounding = 0

    def size(batch: Any, length: Any, sequences: Any) -> Any:
        chunks, states, tokens = counts(batch, length, sequences)
        result = tag
        if of_chunk:
            result = result + chunks * of_chunk
        if of_state:
            result = result + states * of_state
        if chunk_rounding:
            result = result + chunks * chunk_rounding % 256
        if of_token:
            result = result + (tokens * of_token + 255) // 256 * 256
        return result

    one = (1, chunk - 1, 1)
    chunk_rounding = ask(*one, packed) - size(*one)
    for known in ((1, 1000, 5), (1, 4099, 2), (1, 193, 1)) if packed else ((3, 1000, 3), (2, 4099, 2), (1, 193, 1)):
        if size(*known) != ask(*known, packed):
            raise NotImplementedError("flashgla: states whose size is not known for symbolic lengths")
    return size


@torch.library.register_fake("flashgla::forward", lib=_library)
def _(q, k, v, g, gv, h0, z0, cu_seqlens, scale, algorithm, feature_map, normalize, float32_math, max_seqlen,
      gate_logit_normalizer, gate_clamp_min, final_state, keep):
    states_bytes = 0
    if keep and _keeps_states(q, cu_seqlens):
        # States have as many bytes whatever the longest sequence is.
        states_bytes = _states_bytes(q, k, v, g, gv, cu_seqlens, scale, algorithm, feature_map, normalize, float32_math,
                                     None, gate_logit_normalizer, gate_clamp_min)
    return _all_there(q, *_new_outputs(q, k, v, cu_seqlens, normalize, final_state, states_bytes))


@torch.library.register_fake("flashgla::backward", lib=_library)
def _(q, k, v, g, gv, h0, z0, cu_seqlens, scale, algorithm, feature_map, normalize, float32_math, max_seqlen,
      gate_logit_normalizer, gate_clamp_min, o, states, d_o, d_ht, d_zt, wanted):
    return _all_there(q, *_new_gradients((q, k, v, g, gv, h0, z0), wanted))


@torch.library.register_fake("flashgla::step", lib=_library)
def _(q, k, v, g, gv, h, z, scale, feature_map, normalize, gate_logit_normalizer, gate_clamp_min):
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


# ---- autograd ----

def _save(ctx: Any, tensors: tuple[Any, ...], call: tuple[tuple[Any, ...], bool], o: Tensor,
          states: Tensor | None) -> None:
    """For _differentiate. call: options and whether final states are wanted."""
    ctx.set_materialize_grads(False)
    ctx.call = call
    needs_o = call[0][_NORMALIZE] or tensors[4] is not None
    ctx.save_for_backward(*tensors, o if needs_o else None, states)


def _differentiate(ctx: Any, d_o: Tensor | None, d_ht: Tensor | None, d_zt: Tensor | None) -> tuple[Any, ...]:
    """Gradients of the first seven tensors."""
    options, final_state = ctx.call
    saved = ctx.saved_tensors  # once: activation checkpointing computes them anew at each access
    tensors, o, states = saved[:8], saved[8], saved[9]
    if d_o is None:
        q, v = tensors[0], tensors[2]
        d_o = q.new_zeros((*q.shape[:3], v.shape[3]))
    if not final_state:  # empty outputs have gradients in compiled graphs
        d_ht = d_zt = None
    elif not options[_NORMALIZE]:
        d_zt = None
    wanted = ctx.needs_input_grad
    # With gradients of the gradients to come, by the operator that refuses them.
    if _way((*tensors, d_o, d_ht, d_zt)) == _PAST_DISPATCHER:
        return _calls.backward(tensors, options, o, states, d_o, d_ht, d_zt, wanted)
    there = [x is not None and want for x, want in zip(tensors[:7], wanted)]
    gradients = torch.ops.flashgla.backward(*tensors, *options, o, states, d_o, d_ht, d_zt, there)
    return tuple(x if want else None for x, want in zip(gradients, there))


class _Differentiable(torch.autograd.Function):
    """(tensors, (options, final_state)) -> o, or (o, ht, zt) with final states, past the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        tensors, call = arguments[:8], arguments[8]
        o, ht, zt, states = _calls.forward(tensors, *call, True)
        _save(ctx, tensors, call, o, states)
        return (o, ht, zt) if call[1] else o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_ht: Tensor | None = None,
                 d_zt: Tensor | None = None) -> tuple[Any, ...]:
        return (*_differentiate(ctx, d_o, d_ht, d_zt), None, None)


# Function.apply without what it does in Python for transforms, of which a plain call has none.
_apply = super(torch.autograd.Function, _Differentiable).apply


def _save_of_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, options, (final_state, keep) = inputs[:8], inputs[8:-2], inputs[-2:]
    o, _, _, states = output
    kept = keep and _keeps_states(tensors[0], tensors[7]) and states.shape[0] > 0
    _save(ctx, tensors, (options, final_state), o, states if kept else None)


def _differentiate_operator(ctx: Any, d_o: Tensor | None, d_ht: Tensor | None, d_zt: Tensor | None,
                            _: None) -> tuple[Any, ...]:
    return (*_differentiate(ctx, d_o, d_ht, d_zt), *[None] * (3 + len(ctx.call[0])))


def _refuse(what: str) -> Any:
    def refuse(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(f"flashgla: {what}")

    return refuse


torch.library.register_autograd("flashgla::forward", _differentiate_operator, setup_context=_save_of_operator,
                                lib=_library)
torch.library.register_autograd("flashgla::backward", _refuse("the second derivative is not implemented"), lib=_library)


# ---- autocast ----

def _cast(device: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None,
          gv: Tensor | None) -> tuple[Tensor | None, ...]:
    if q.dtype == torch.float64:
        return q, k, v, g, gv
    dtype = torch.get_autocast_dtype(device)
    gates = (x if x is None or x.dtype in (dtype, torch.float32) else x.float() for x in (g, gv))
    return q.to(dtype), k.to(dtype), v.to(dtype), *gates


def _autocast_rule(device: str) -> None:
    key = "Autocast" + device.upper()
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def rule(operator: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return operator(*_cast(device, *arguments[:5]), *arguments[5:])

        return call

    _library.impl("forward", rule(torch.ops.flashgla.forward), key)
    _library.impl("step", rule(torch.ops.flashgla.step), key)


_autocast_rule("cpu")
_autocast_rule("cuda")
