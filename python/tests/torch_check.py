"""Checks flashgla's PyTorch operators: python torch_check.py [--device cpu|cuda]. Needs PyTorch and an installed
flashgla (or PYTHONPATH). Prints a line a check; exit code 1 when one fails."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import ctypes
import itertools
import pathlib
import sys
import types
import warnings

import flashgla.fla
import flashgla.torch
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
import torch_inputs
from recurrence import error, recurrence
from torch_inputs import GATES, TOLERANCE, close, cu_seqlens, gradients_close, inputs, normal, run_checks

import flashgla
import flashgla.ops as ops

device = "cpu"


# ---- checks: functions named check_... ----

def check_outputs_and_gradients():
    dtypes = [torch.float32, torch.float16, torch.bfloat16] + ([torch.float64] if device == "cpu" else [])
    for dtype, gate in itertools.product(dtypes, GATES):
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        leaves = [*inputs(gate, dtype, gradients=True), normal(2, 2, 16, 32, dtype=state_dtype).requires_grad_()]
        o, ht = flashgla.gated_linear_attention(*leaves[:5], initial_state=leaves[5], output_final_state=True)
        assert o.dtype == dtype and ht.dtype == state_dtype and o.device == leaves[0].device
        expected = recurrence(*leaves[:5], initial_state=leaves[5])[:2]
        gradients_close((o, ht), expected, [x for x in leaves if x is not None], TOLERANCE[dtype])


def check_options():
    for feature_map in ("relu", "elu_plus_one"):
        leaves = inputs("none", gradients=True)[:3]
        leaves += [normal(2, 2, 16, 32).requires_grad_(), normal(2, 2, 16).abs().requires_grad_()]
        state = (leaves[3], leaves[4])
        o, (ht, zt) = flashgla.gated_linear_attention(*leaves[:3], initial_state=state, output_final_state=True,
                                                      feature_map="elu_plus_one", normalize=True)
        expected = recurrence(*leaves[:3], initial_state=state, feature_map="elu_plus_one", normalize=True)
        gradients_close((o, ht, zt), expected, leaves, 1e-5)
        leaves = inputs(gradients=True)[:4]
        o, _ = flashgla.gated_linear_attention(*leaves, scale=0.3, feature_map=feature_map)
        gradients_close((o,), recurrence(*leaves, scale=0.3, feature_map=feature_map)[:1], leaves, 1e-5)


def check_packed_sequences():
    for dtype in (torch.int32, torch.int64):
        leaves = [*inputs(batch=1, gradients=True)[:4], normal(4, 2, 16, 32).requires_grad_()]
        packing = cu_seqlens(17, 17, 50, 70, dtype=dtype)
        o, ht = flashgla.gated_linear_attention(*leaves[:4], initial_state=leaves[4], output_final_state=True,
                                                cu_seqlens=packing)
        expected = recurrence(*leaves[:4], initial_state=leaves[4], cu_seqlens=packing)[:2]
        gradients_close((o, ht), expected, leaves, 1e-5)
        (o, _), (known, _) = (flashgla.gated_linear_attention(*leaves[:4], cu_seqlens=packing, max_seqlen=longest)
                              for longest in (None, 33))
        close(known, o, 1e-5)


def check_strides():
    """q, k, v from one projection; a gradient that is one number expanded."""
    fused = normal(2, 70, 4, 64).requires_grad_()
    q, k, v = fused[..., :16], fused[..., 16:32], fused[..., 32:]
    (mine,) = torch.autograd.grad(flashgla.gated_linear_attention(q, k, v)[0].sum(), fused)
    (theirs,) = torch.autograd.grad(recurrence(q, k, v)[0].sum(), fused)
    close(mine, theirs, 2e-5)
    turned = normal(2, 4, 16, 70).transpose(1, 3).transpose(2, 3)  # last dimension strided: copied
    close(flashgla.gated_linear_attention(turned, turned, turned)[0], recurrence(turned, turned, turned)[0], 1e-5)


def check_gradcheck():
    for gate, normalize in [*((gate, False) for gate in GATES), ("none", True)]:
        leaves = inputs(gate, torch.float64, length=7, key_dim=3, value_dim=5, gradients=True)
        if normalize:
            leaves = [x if x is None else x.detach().abs().requires_grad_() for x in leaves]
        h0 = normal(2, 2, 3, 5, dtype=torch.float64).requires_grad_()
        z0 = normal(2, 2, 3, dtype=torch.float64).abs().requires_grad_()
        present = [i for i, x in enumerate(leaves) if x is not None]

        def function(h0, z0, *given, present=present, normalize=normalize):
            arguments = [None] * 5
            for i, x in zip(present, given):
                arguments[i] = x
            o, state = flashgla.gated_linear_attention(*arguments, initial_state=(h0, z0) if normalize else h0,
                                                       output_final_state=True, normalize=normalize)
            return (o, *state) if normalize else (o, state)

        z = z0 if normalize else None
        assert torch.autograd.gradcheck(function, (h0, z, *(leaves[i] for i in present)))


def check_registration():
    """torch.library.opcheck: schema, autograd, fake tensors, and compiled graphs with symbolic shapes."""
    options = (None, "automatic", "identity", False, "ieee", None, None, None)
    packing = cu_seqlens(100, 150, 400)
    for gate, batch in itertools.product(GATES, (1, 2)):
        leaves = inputs(gate, length=400, batch=batch, gradients=True)
        packed = packing if batch == 1 else None
        h0 = normal(3 if batch == 1 else 2, 2, 16, 32).requires_grad_()
        # Packed sequences leave some of the states' bytes unwritten, which opcheck would compare.
        torch.library.opcheck(torch.ops.flashgla.forward.default,
                              (*leaves, h0, None, packed, *options, True, packed is None), rtol=1e-4, atol=1e-4)
        plain = [x if x is None else x.detach() for x in leaves]
        outputs = torch.ops.flashgla.forward(*plain, h0.detach(), None, packed, *options, True, True)
        wanted = [x is not None for x in plain] + [True, False]
        states = outputs[3] if outputs[3].numel() else None
        torch.library.opcheck(
            torch.ops.flashgla.backward.default,
            (*plain, h0.detach(), None, packed, *options, outputs[0], states, outputs[0], None, None, wanted))
    plain = [x[:, 0].contiguous() for x in inputs()[:4]]
    torch.library.opcheck(torch.ops.flashgla.step.default,
                          (*plain, None, normal(2, 2, 16, 32), None, None, "identity", False, None, None))


def check_compile():
    """No graph break, the same bits as without, and one graph for all lengths."""
    def function(q, k, v, g, h0, packing=None):
        o, ht = flashgla.gated_linear_attention(q * 1, k, v, g, initial_state=h0, output_final_state=True,
                                                cu_seqlens=packing)
        return o * 2, ht

    # Of heads wider than 64 in bf16 CUDA keeps a state at every second chunk, and other things beside them.
    narrow, wide = {"key_dim": 16, "value_dim": 32}, {"key_dim": 128, "value_dim": 64, "dtype": torch.bfloat16}
    for name, dynamic, kind in (("static", False, narrow), ("dynamic", True, narrow), ("packed", True, narrow),
                                ("dynamic", True, wide), ("packed", True, wide)):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)
        for length in (200,) if name == "static" else (200, 333, 500, 129):
            batch, packing = (1, cu_seqlens(60, length)) if name == "packed" else (2, None)
            leaves = [*inputs(length=length, batch=batch, gradients=True, **kind)[:4],
                      normal(2, 2, kind["key_dim"], kind["value_dim"]).requires_grad_()]
            results = []
            for f in (function, compiled):
                o, ht = f(*leaves, packing)
                results.append((o, ht, *torch.autograd.grad(o.sum() + (ht * ht).sum(), leaves)))
            assert all(torch.equal(a, b) for a, b in zip(*results)), (name, length)
        assert counter.frame_count == 1, f"{counter.frame_count} graphs"
    torch._dynamo.reset()
    leaves = [*inputs(length=200, gradients=True)[:4], normal(2, 2, 16, 32).requires_grad_()]
    compiled = torch.compile(function, fullgraph=True)  # inductor
    gradients = [torch.autograd.grad(f(*leaves)[0].sum(), leaves) for f in (function, compiled)]
    for mine, theirs in zip(*gradients):
        close(mine, theirs, 1e-6)
    torch._dynamo.reset()
    torch.compile(lambda q, k, v: ops.chunk_retention(q, k, v)[0], fullgraph=True, backend="aot_eager")(
        *inputs(groups=4)[:3])


def check_autocast():
    q, k, v, g, _ = inputs(length=100, gradients=True)
    dtype = torch.bfloat16
    with torch.autocast(device, dtype):
        o, ht = flashgla.gated_linear_attention(q, k.to(dtype), v, g, output_final_state=True)
        twice = torch.compile(lambda *x: flashgla.gated_linear_attention(*x)[0], fullgraph=True, backend="aot_eager")(
            q, k.to(dtype), v, g)
    assert o.dtype == dtype and ht.dtype == torch.float32 and torch.equal(o, twice)
    expected = recurrence(q.to(dtype), k.to(dtype), v.to(dtype), g)[0]  # the gate keeps its float32
    leaves = [q, k, v, g]
    gradients_close((o,), (expected,), leaves, 1e-2)
    with torch.autocast(device, dtype):
        o_t = flashgla.torch.step(*(x[:, 0].detach() for x in (q, k, v)), torch.zeros_like(ht), g[:, 0].detach())
    assert o_t.dtype == dtype and error(o_t, expected[:, 0]) < 1e-2
    if device == "cpu":
        q, k, v, g, _ = inputs(dtype=torch.float64)
        with torch.autocast(device, dtype):
            assert flashgla.gated_linear_attention(q, k, v, g)[0].dtype == torch.float64


def check_saved_tensors():
    leaves = inputs(length=300, gradients=True)[:4]
    o, ht = flashgla.gated_linear_attention(*leaves, output_final_state=True)
    loss = (o * o).sum() + (ht * ht).sum()
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    only_state = torch.autograd.grad((ht * ht).sum(), leaves, retain_graph=True, allow_unused=True)
    assert only_state[1] is not None and only_state[0].abs().sum() == 0
    only_q = torch.autograd.grad(o.sum(), leaves[:1], retain_graph=True)
    assert torch.isfinite(only_q[0]).all()
    with torch.no_grad():
        leaves[0].mul_(2)
    try:
        loss.backward()
        raise AssertionError("a changed input was not noticed")
    except RuntimeError as problem:
        assert "modified by an inplace operation" in str(problem)
    leaves = inputs(length=300, gradients=True)[:4]
    again = [torch.autograd.grad(function(*leaves)[0].square().sum(), leaves) for function in (
        flashgla.gated_linear_attention,
        lambda *x: torch.utils.checkpoint.checkpoint(flashgla.gated_linear_attention, *x, use_reentrant=False))]
    assert all(torch.equal(a, b) for a, b in zip(*again))  # activation checkpointing
    (gradient,) = torch.autograd.grad(flashgla.gated_linear_attention(*leaves)[0].square().sum(), leaves[:1],
                                      create_graph=True)
    try:
        gradient.sum().backward()
        raise AssertionError("a second derivative was given")
    except NotImplementedError as problem:
        assert "second derivative" in str(problem)


def check_algorithm():
    def run(algorithm):
        ops.ALGORITHM = algorithm
        leaves, saved = inputs(length=300, gradients=True)[:4], []

        def save(x):
            saved.append(x.nbytes)
            return x

        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            o = ops.chunk_gla(*leaves)[0]
        return sum(saved), torch.autograd.grad(o.square().sum(), leaves)

    try:
        (kept, expected), (recomputed, gradients) = run("automatic"), run("chunk_recomputed")
    finally:
        ops.ALGORITHM = "automatic"
    assert recomputed < kept
    for gradient, x in zip(gradients, expected):
        assert (gradient - x).norm() <= 2e-5 * x.norm()


def check_steps():
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, g, _ = inputs(dtype=dtype, length=4)
        h = torch.zeros(2, 2, 16, 32, device=device)
        expected, ht, _ = recurrence(q, k, v, g)
        for t in range(4):
            close(flashgla.step(q[:, t], k[:, t], v[:, t], h, g[:, t]), expected[:, t], TOLERANCE[dtype])
        close(h, ht, TOLERANCE[dtype])
    torch._dynamo.reset()
    h, same = torch.zeros(2, 2, 16, 32, device=device), torch.zeros(2, 2, 16, 32, device=device)
    token = [x[:, 0].contiguous() for x in (q, k, v)]
    mine = torch.compile(lambda *x: flashgla.step(*x), fullgraph=True, backend="aot_eager")(*token, h)
    assert torch.equal(mine, flashgla.step(*token, same)) and torch.equal(h, same)


def check_dispatcher():
    """Calls go past PyTorch's dispatcher, and through it where a mode, a subclass or a transform asks for it: with the
    same bits, and a state whose version tells that it was written."""
    seen = []

    class Notes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def run():
        q, k, v, g, gv = inputs("key_value", length=100, gradients=True)
        h0 = normal(2, 2, 16, 32).requires_grad_()
        o, ht = flashgla.gated_linear_attention(q, k, v, g, gv, initial_state=h0, output_final_state=True)
        gradients = torch.autograd.grad((o * o).sum() + ht.sum(), (q, k, v, g, gv, h0))
        o, _ = flashgla.gated_linear_attention(q, k, v, g, algorithm="chunk_recomputed")  # keeps no states
        gradients += torch.autograd.grad((o * o).sum(), (q, k, v, g))
        state = normal(2, 2, 16, 32)
        version = state._version
        token = flashgla.step(*(x[:, 0].detach() for x in (q, k, v)), state, g[:, 0].detach())
        assert state._version == version + 1
        return o, ht, *gradients, token, state

    past = run()
    with Notes():
        through = run()
    assert all(torch.equal(a, b) for a, b in zip(past, through))
    for name in ("forward", "backward", "step"):
        assert f"flashgla.{name}.default" in seen, name

    class Sub(torch.Tensor):
        pass

    q, k, v, g, _ = inputs(length=100)
    expected = flashgla.gated_linear_attention(q, k, v, g)[0]
    assert torch.equal(flashgla.gated_linear_attention(q.as_subclass(Sub), k, v, g)[0], expected)
    with torch.inference_mode():
        state = normal(2, 2, 16, 32)
        flashgla.step(*(x[:, 0] for x in (q, k, v)), state, g[:, 0])
    meta = flashgla.gated_linear_attention(*(x.to("meta") for x in (q, k, v, g)))[0]
    assert meta.is_meta and meta.shape == expected.shape


def exchange_api(major, previous=None):
    """A capsule as torch.Tensor.__dlpack_c_exchange_api__, of that major version, with an older one behind it."""
    fields = (ctypes.c_uint32 * 14)(major, 0)
    if previous is not None:
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        ctypes.c_void_p.from_buffer(fields, 8).value = pointer(previous, b"dlpack_exchange_api")
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return fields, new(fields, b"dlpack_exchange_api", None)


def check_ways_to_read_tensors():
    """The same bits by DLPack's C exchange API and, as before PyTorch 2.10, by capsules, however tensors lie, and by
    whatever results are made."""
    own = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    calls = flashgla.torch._calls
    assert calls.has_exchange_api == (own is not None)
    unknown = exchange_api(2)
    assert not flashgla._flashgla.Torch(torch, unknown[1]).has_exchange_api
    if own is not None:
        newer = exchange_api(2, own)
        assert flashgla._flashgla.Torch(torch, newer[1]).has_exchange_api

    class Sub(torch.Tensor):
        pass

    def lying():
        """(q, k, v, g) that lie in memory in several ways, and their names."""
        q, k, v, g, _ = inputs(length=100)
        fused = torch.cat([q, q, q], -1)
        yield "slices", [fused[..., 16:32], k[:, :, :, :], torch.cat([v, v], 2)[:, :, 1:3], g]
        yield "offsets", [torch.cat([x, x])[1:3] for x in (q, k, v, g)]
        yield "turned", [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v, g)]
        yield "heads first", [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, g)]
        yield "expanded", [q, k[:1].expand(2, -1, -1, -1), v, g[:, :, :1].expand(-1, -1, 2, -1)]
        yield "one number", [q, k, v, g[:1, :1, :1, :1].expand(2, 100, 2, 16)]
        yield "one token", [x[:, 3:4] for x in (q, k, v, g)]
        yield "one channel", [q[..., 5:6], k[..., 5:6], v[..., 5:6], g[..., 5:6]]
        yield "constant", [q, k, v, g[0, 0, :, 0]]
        yield "constant, strided", [q.half(), k.half(), v.half(), g[0, :4:2, 0, 0].half()]
        yield "parameters", [torch.nn.Parameter(x) for x in (q, k, v, g)]
        yield "a subclass", [q.as_subclass(Sub), k, v, g]

    def run():
        for name, tensors in lying():
            with torch.no_grad():
                plain = flashgla.gated_linear_attention(*tensors)[0]
            leaves = [x.detach().requires_grad_() for x in tensors]
            h0 = normal(2, 2, leaves[2].shape[3], leaves[0].shape[3]).transpose(2, 3).requires_grad_()
            o, ht = flashgla.gated_linear_attention(*leaves, initial_state=h0, output_final_state=True)
            gradients = torch.autograd.grad(o.float().sum() + (ht * ht).sum(), (*leaves, h0))
            for x, leaf in zip(gradients, (*leaves, h0)):
                assert x.dtype == leaf.dtype and x.is_contiguous(), name
            state = h0.detach().clone(memory_format=torch.contiguous_format)
            token = flashgla.step(*(x[:, 0].detach() if x.dim() > 1 else x.detach() for x in leaves[:3]), state)
            for x in (plain, o, ht, token):
                assert x.is_contiguous() and x.storage_offset() == 0 and x.untyped_storage().resizable(), name
            expected = recurrence(*(x.detach() for x in leaves), initial_state=h0.detach())[:2]
            for x, wanted in zip((o, ht), expected):
                close(x.detach(), wanted, TOLERANCE[x.dtype if name != "constant, strided" else torch.float16], name)
            yield from (plain, o, ht, *gradients, token, state)

    first = list(run())
    hidden = types.SimpleNamespace(**{name: x for name, x in vars(torch._C).items() if name != "_dynamo"})
    older = types.SimpleNamespace(**{**vars(torch), "_C": hidden})
    flashgla.torch._calls = flashgla._flashgla.Torch(older, None)
    try:
        assert not flashgla.torch._calls.has_exchange_api and not flashgla.torch._calls.has_quick_empty
        second = list(run())
        check_refusals()
    finally:
        flashgla.torch._calls = calls
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def check_refusals():
    q, k, v, g, _ = inputs()
    for call, text in [
        (lambda: flashgla.gated_linear_attention(q, k[:, 1:], v), "k has shape [2,69,2,16]"),
        (lambda: flashgla.gated_linear_attention(q, k, v, g[:0]), "no elements"),
        (lambda: flashgla.gated_linear_attention(q[..., :0], k, v), "no elements"),
        (lambda: flashgla.gated_linear_attention(q[0], k, v), "q has shape"),
        (lambda: flashgla.gated_linear_attention(q, k, v.to(torch.complex64)), "v is of torch.complex64"),
        (lambda: flashgla.gated_linear_attention(q, k, v, initial_state=k[0, :1].bool()),
         "initial_state is of torch.bool"),
        (lambda: ops.chunk_retention(q, k, v, head_first=True), "head_first is True"),
        (lambda: ops.parallel_retention(q, k, v, output_attentions=True), "output_attentions is True"),
        (lambda: ops.parallel_simple_gla(q, k, v, output_attentions=True), "output_attentions is True"),
        (lambda: ops.chunk_retention(q, k, v, transpose_state_layout=True), "transpose_state_layout is True"),
        (lambda: ops.fused_recurrent_gla(q, k, v, state_v_first=True, transpose_state_layout=True),
         "transpose_state_layout is given beside state_v_first"),
        (lambda: ops.chunk_gla(q, k, v.half(), g), "v is of torch.float16, q of torch.float32"),
        (lambda: flashgla.gated_linear_attention(q, k, v, g, gate_logit_normalizer=0.0), "gate_logit_normalizer is 0"),
        (lambda: flashgla.gated_linear_attention(q, k, v, g, gate_clamp_min=-1.0), "gate_clamp_min is given"),
        (lambda: flashgla.gated_linear_attention(q, k, v, gate_logit_normalizer=16.0), "no gate"),
        (lambda: ops.chunk_gsa(q, k, v, k), "g is None"),
        (lambda: flashgla.gated_linear_attention(q[:, :0], k[:, :0], v[:, :0]), "q has no elements"),
        (lambda: flashgla.gated_linear_attention(q, k.cpu().numpy(), v), "k is of type ndarray; expected a torch"),
        (lambda: flashgla.gated_linear_attention(q, k, None), "v is of type NoneType"),
        (lambda: flashgla.gated_linear_attention(q[:1], k[:1], v[:1], cu_seqlens=[0, 70]), "cu_seqlens is of type"),
        (lambda: flashgla.step(q[:, 0], k[:, 0], v[:, 0], None), "state is of type NoneType"),
    ]:
        try:
            call()
            raise AssertionError(f"not refused: {text}")
        except (TypeError, ValueError) as problem:
            assert text in str(problem), problem


def check_logits():
    """Gates as logits are the gates they stand for, in gradients, steps and compiled graphs too."""
    for gate, normalizer, clamp in (("key", 16.0, None), ("scalar", 1.0, -0.4), ("key_value", 2.0, None)):
        q, k, v, g, gv = inputs(gate, groups=4, gradients=True)
        x, y = (None if gate is None else gate.detach().exp().logit().requires_grad_() for gate in (g, gv))
        options = {"gate_logit_normalizer": normalizer, "gate_clamp_min": clamp}

        def as_gate(x, normalizer=normalizer, clamp=clamp):
            gate = None if x is None else torch.nn.functional.logsigmoid(x) / normalizer
            return gate if clamp is None or gate is None else gate.clamp(min=clamp)

        leaves = [leaf for leaf in (q, k, v, x, y) if leaf is not None]
        o, ht = flashgla.gated_linear_attention(q, k, v, x, y, output_final_state=True, **options)
        expected, expected_ht, _ = recurrence(q, k, v, as_gate(x), as_gate(y))
        gradients_close((o, ht), (expected, expected_ht), leaves, 2e-5)
        state = torch.zeros_like(ht)
        tokens = [None if z is None else z.detach()[:, 0] for z in (q, k, v, x, y)]
        first = flashgla.step(*tokens[:3], state, *tokens[3:], **options)
        close(first, expected[:, 0], 1e-5)
        compiled = torch.compile(flashgla.gated_linear_attention, fullgraph=True, backend="aot_eager")
        close(compiled(q, k, v, x, y, **options)[0], o, 1e-6)


def check_callers_of_fla():
    """What FLA's functions accept besides: states of other dtypes, a chunk size, the layout's old name."""
    q, k, v, g, _ = inputs(groups=4)
    h0 = normal(2, 4, 16, 32)
    for function in (ops.chunk_gla, ops.fused_recurrent_gla):
        expected = function(q, k, v, g, initial_state=h0.bfloat16().float(), output_final_state=True)
        actual = function(q, k, v, g, initial_state=h0.bfloat16(), output_final_state=True, chunk_size=32)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            o, ht = function(q, k, v, g, initial_state=h0.transpose(-1, -2), output_final_state=True,
                             transpose_state_layout=True)
        assert [w.category for w in caught] == [DeprecationWarning]
        wanted = function(q, k, v, g, initial_state=h0, output_final_state=True)
        assert torch.equal(o, wanted[0]) and torch.equal(ht.transpose(-1, -2), wanted[1])
    assert torch.equal(ops.chunk_retention(q, k, v, chunk_size=128)[0], ops.chunk_retention(q, k, v)[0])
    leaf = normal(2, 4, 16, 32).half().requires_grad_()
    ops.chunk_gla(q, k, v, g.double(), initial_state=leaf)[0].sum().backward()
    assert leaf.grad.dtype == torch.float16


def check_names():
    """Functions named as in FLA, with all that is FLA's own: reversed time, transposed states, packing."""
    q, k, v, g, gv = inputs("key_value", groups=4, gradients=True)
    one, gamma = inputs("scalar", groups=4)[3], inputs("constant", groups=4)[3]
    heads = torch.arange(4, device=device, dtype=torch.float64)
    retention = torch.log1p(-torch.exp2(-5 - heads))
    lightning = -(8 / 4) * (1 - 2 / 5) * heads
    functions = [
        (ops.chunk_gla, {"g": g}, {"g": g}), (ops.fused_recurrent_gla, {"gk": g, "gv": gv}, {"g": g, "gv": gv}),
        (ops.fused_recurrent_gla, {"gv": gv}, {"gv": gv}), (ops.chunk_simple_gla, {"g": one}, {"g": one}),
        (ops.chunk_simple_gla, {"g_gamma": gamma}, {"g": gamma}),
        (ops.fused_chunk_simple_gla, {"g": one, "g_gamma": gamma}, {"g": one + gamma}),
        (ops.fused_recurrent_simple_gla, {"g": one}, {"g": one}), (ops.parallel_simple_gla, {"g": one}, {"g": one}),
        (ops.chunk_retention, {}, {"g": retention}), (ops.fused_chunk_retention, {}, {"g": retention}),
        (ops.parallel_retention, {}, {"g": retention}), (ops.fused_recurrent_retention, {}, {"g": retention}),
        (ops.chunk_linear_attn, {"normalize": False}, {}), (ops.fused_chunk_linear_attn, {"normalize": False}, {}),
        (ops.fused_recurrent_linear_attn, {}, {}),
        (ops.chunk_lightning_attn, {"layer_idx": 2, "num_layers": 5}, {"g": lightning}),
        (ops.fused_recurrent_lightning_attn, {"layer_idx": 2, "num_layers": 5}, {"g": lightning})]
    for function, mine, theirs in functions:
        accepted = function.__code__.co_varnames[:function.__code__.co_argcount]
        states = "initial_state" in accepted
        for packed, reverse, v_first in itertools.product((False, True), repeat=3):
            if (reverse and "reverse" not in accepted) or (v_first and "state_v_first" not in accepted):
                continue
            def row(x, packed=packed):
                return x if x is None or x.dim() == 1 or not packed else x[:1]

            packing = cu_seqlens(20, 70) if packed else None
            h0 = normal(2, 4, 16, 32) if states else None
            extra = {"scale": 0.5, "cu_seqlens": packing}
            if states:
                extra["initial_state"] = h0.transpose(-1, -2).contiguous() if v_first else h0
                extra["output_final_state"] = True
            extra |= {"reverse": True} if reverse else {}
            extra |= {"state_v_first": True} if v_first else {}
            own = {n: row(x) if torch.is_tensor(x) else x for n, x in mine.items()}
            o, ht = function(row(q), row(k), row(v), **own, **extra)
            arguments = {"q": q, "k": k, "v": v, **theirs}
            arguments = {name: row(x) for name, x in arguments.items()}
            if reverse:  # token by token backwards, sequence by sequence
                ends = [0, 20, 70] if packed else [0, 70]
                turn = torch.cat([torch.arange(b - 1, a - 1, -1) for a, b in zip(ends, ends[1:])]).to(device)
                arguments = {name: x if x.dim() == 1 else x[:, turn] for name, x in arguments.items()}
            expected, expected_ht, _ = recurrence(**arguments, scale=0.5, initial_state=h0, cu_seqlens=packing)
            if reverse:
                expected = expected[:, turn]
            what = f"{function.__name__} packed={packed} reverse={reverse} state_v_first={v_first}"
            assert (ht is not None) == states, what
            outputs, wanted = ((o,), (expected,)) if ht is None else ((o, ht.transpose(-1, -2) if v_first else ht),
                                                                      (expected, expected_ht))
            gradients_close(outputs, wanted, [q, k, v], 1e-5)
    for function in (ops.chunk_linear_attn, ops.fused_chunk_linear_attn, ops.fused_recurrent_linear_attn):
        q, k, v = (x.detach().abs().requires_grad_() for x in inputs(groups=4)[:3])
        o, (ht, zt) = function(q, k, v, normalize=True, output_final_state=True)
        assert zt.shape == (2, 1, 4, 16)
        gradients_close((o,), recurrence(q, k, v, normalize=True)[:1], [q, k, v], 1e-5)
        o, (_, zt) = function(q, k, v, normalize=True, initial_state=(ht, zt), output_final_state=True)
        expected = recurrence(*(torch.cat([x, x], 1) for x in (q, k, v)), normalize=True)
        gradients_close((o,), (expected[0][:, 70:],), [q, k, v], 1e-5)
        close(zt.squeeze(1), expected[2], 1e-5)
    for function in (ops.chunk_gsa, ops.fused_recurrent_gsa):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)] + [normal(2, 70, 4, 8).requires_grad_(),
                                                                     (-normal(2, 70, 4, 8).abs()).requires_grad_()]
        o, (hk, hv) = function(*leaves, output_final_state=True)
        q_, k_, v_, s, g = leaves
        slots, expected_hk, _ = recurrence(q_, k_, s, gv=g)
        expected, expected_hv, _ = recurrence(slots.softmax(-1), s, v_, g, scale=1.0)
        gradients_close((o, hk, hv), (expected, expected_hk, expected_hv), leaves, 2e-5)


def refused(call, text, kinds=(TypeError, ValueError)):
    try:
        call()
    except kinds as problem:
        assert text in str(problem), f"{problem!r}; expected: {text}"
    else:
        raise AssertionError(f"not refused: {text}")


def check_refusals_by_names_of_fla():
    q, k, v, g, gv = inputs("key_value", groups=4, batch=1)
    s, gs, packing = normal(1, 70, 4, 8), -normal(1, 70, 4, 8).abs(), cu_seqlens(20, 70)

    def packed(*ends):
        return ops.chunk_gla(q, k, v, g, cu_seqlens=packing, cu_seqlens_cpu=torch.tensor(ends))

    for call, text in [
        (lambda: ops.fused_recurrent_gla(q, k, v, g[:, 1:], gv), "gk has shape"),
        (lambda: ops.fused_recurrent_gla(q, k, v, gk=g[..., 0]), "gk has shape [1,70,4]; expected [B,T,H,K]"),
        (lambda: ops.chunk_gla(q, k, v, [g]), "g is of type list"),
        (lambda: ops.chunk_gla(q, None, v, g), "k is of type NoneType"),
        (lambda: ops.chunk_gla(q, k, v, g, initial_state=[s]), "initial_state is of type list"),
        (lambda: ops.chunk_simple_gla(q, k, v, g_gamma=g[0, 0, :3, 0]), "g_gamma has shape [3]"),
        (lambda: ops.chunk_simple_gla(q, k, v, g), "g has shape [1,70,4,16]; expected [B,T,H]"),
        (lambda: ops.chunk_simple_gla(q, k, v, transpose_state_layout=True), "transpose_state_layout is True"),
        (lambda: ops.chunk_retention(q[0, 0], k, v), "q has shape [4,16]"),
        (lambda: ops.chunk_lightning_attn(q[0, 0], k, v, 0, 2), "q has shape [4,16]"),
        (lambda: ops.chunk_retention(q, k[:, :, :3], v[:, :, :3]), "k has 3 heads"),
        (lambda: ops.fused_recurrent_gla(q, k, v, cu_seqlens=[0, 70], reverse=True), "cu_seqlens is of type list"),
        (lambda: ops.chunk_gsa(q, k, v, s[:, 1:], gs), "s has shape"),
        (lambda: ops.chunk_gsa(q, k, v, s, gs[:, 1:]), "g has shape"),
        (lambda: ops.chunk_gsa(q, k, v, s, gs, initial_state=s), "initial_state is of type Tensor; expected a pair"),
        (lambda: ops.chunk_gsa(q, k, v, s, gs, initial_state=(s,)), "initial_state has 1 elements"),
        (lambda: packed(0), "cu_seqlens_cpu has 1 elements"),
        (lambda: packed(0, 20, 30, 70), "cu_seqlens_cpu has 4 elements"),
        (lambda: packed(1, 20, 70), "cu_seqlens_cpu goes from 1 to 70"),
        (lambda: packed(0, 20, 71), "cu_seqlens_cpu goes from 0 to 71"),
        (lambda: packed(0, 80, 70), "cu_seqlens_cpu falls by 10"),
        (lambda: ops.chunk_gsa(q, k, v, s, gs, cu_seqlens=packing, cu_seqlens_cpu=torch.tensor([0, 80, 70])),
         "cu_seqlens_cpu falls by 10"),
    ]:
        refused(call, text)


def check_what_fla_takes():
    """Arguments that FLA's functions take, and the results they give back for them."""
    q, k, v, g, gv = inputs("key_value", groups=4)
    half = torch.bfloat16
    h0 = normal(2, 4, 32, 16)
    for state_wanted in (None, True):
        ht = ops.chunk_gla(q, k, v, g, initial_state=h0, output_final_state=state_wanted, state_v_first=True)[1]
        assert (ht is None) == (state_wanted is None) and (ht is None or ht.is_contiguous())
    few = [x.to(half) for x in (q, k, v)]
    mixed = ops.fused_recurrent_gla(*few, g.to(half), gv)[0]
    assert torch.equal(mixed, ops.fused_recurrent_gla(*few, g.to(half).float(), gv)[0])
    with torch.autocast(device, half):
        assert ops.chunk_gla(q, k, v.to(half), g)[0].dtype == half
    one, gamma = inputs("scalar", groups=4)[3], inputs("constant", groups=4)[3]
    close(ops.chunk_simple_gla(q, k, v, one, gamma.to(half))[0],
          recurrence(q, k, v, one + gamma.to(half).float())[0], 1e-5)
    _, (ht, zt) = ops.chunk_linear_attn(q, k.abs(), v, normalize=True)
    assert ht is None
    close(zt, k.abs().sum(1, keepdim=True), 1e-5)
    for function in (ops.chunk_retention, lambda *x, **y: ops.chunk_lightning_attn(*x, 1, 4, **y)):
        q, k, v = inputs(groups=2)[:3]
        mine = function(q, k, v, output_final_state=True)
        theirs = function(q, *(x.repeat_interleave(2, 2) for x in (k, v)), output_final_state=True)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs)) and mine[1].shape == (2, 4, 16, 32)


@contextlib.contextmanager
def stub_of_fla(calls):
    """Modules named as FLA's in sys.modules, without fla.layers and Lightning attention as in older and smaller
    installations; their functions note their name and arguments in `calls`."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "fla"}
    sys.modules |= {"fla": types.ModuleType("fla"), "fla.ops": types.ModuleType("fla.ops")}
    for name in ("fla", "fla.ops"):
        sys.modules[name].__path__ = []
    for family, names in flashgla.fla._FAMILIES.items():
        if family == "lightning_attn":
            continue
        module = sys.modules[f"fla.ops.{family}"] = types.ModuleType(f"fla.ops.{family}")
        for name in names:
            setattr(module, name, lambda *args, name=name, **kwargs: calls.append((name, args, kwargs)))
    try:
        yield
    finally:
        flashgla.fla.disable()
        for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
            del sys.modules[name]
        sys.modules |= hidden


def check_enable():
    """What enable() puts in, gives back, leaves to FLA and refuses, with a stub for FLA."""
    calls = []
    with stub_of_fla(calls):
        holder = sys.modules["fla.ops.gla"]
        theirs = holder.chunk_gla, holder.fused_recurrent_gla
        retention = sys.modules.pop("fla.ops.retention")
        sys.modules["fla.ops.retention"] = None  # its import fails
        ops.ALGORITHM = "recurrent"
        try:
            flashgla.fla.enable()
            assert "chunk_gla" in flashgla.fla.table() and "retention" not in flashgla.fla.table()
            flashgla.fla.disable()
            assert ops.ALGORITHM == "recurrent"
        finally:
            ops.ALGORITHM = "automatic"
        sys.modules["fla.ops.retention"] = retention
        broken = sys.modules["fla.ops.gsa"]
        del sys.modules["fla.ops.gsa"]

        class Broken:
            def find_spec(self, name, path=None, target=None):
                if name == "fla.ops.gsa":
                    raise RuntimeError("broken")

        finder = Broken()
        sys.meta_path.insert(0, finder)
        try:
            refused(flashgla.fla.enable, "broken", RuntimeError)
        finally:
            sys.meta_path.remove(finder)
            sys.modules["fla.ops.gsa"] = broken
        assert (holder.chunk_gla, holder.fused_recurrent_gla) == theirs and not flashgla.fla._replaced
        assert ops.ALGORITHM == "automatic"

        def turn():
            for _ in range(20):
                flashgla.fla.enable()
                flashgla.fla.table()
                flashgla.fla.disable()

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(turn) for _ in range(8)]:
                done.result()
        assert (holder.chunk_gla, holder.fused_recurrent_gla) == theirs and ops.ALGORITHM == "automatic"

        flashgla.fla.enable()
        assert ops.ALGORITHM == "chunk_recomputed" and holder.chunk_gla is not theirs[0]
        q, k, v, g, _ = inputs(groups=4)
        assert torch.equal(holder.chunk_gla(q, k, v, g)[0], ops.chunk_gla(q, k, v, g)[0]) and not calls
        refused(lambda: holder.chunk_gla(q, k[:, 1:], v, g), "k has shape")
        if device == "cpu":
            refused(lambda: holder.chunk_gla(q, k, v.half(), g), "v is of torch.float16")
        assert not calls
        # Of devices on which the operator does not run. Beside CUDA that is under way PyTorch makes none for XPU.
        with torch._subclasses.FakeTensorMode():
            for place in ("cuda", "xpu") if device == "cpu" else ("cuda",):
                fake = [torch.empty(2, 70, 4, 16, device=place, dtype=torch.bfloat16) for _ in range(4)]
                flashgla.ops._missing[fake[0].device.index] = "this is a check"
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    holder.fused_recurrent_gla(*fake, transpose_state_layout=True)
                flashgla.ops._missing.clear()
                name, args, kwargs = calls.pop()
                assert name == "fused_recurrent_gla" and args[0] is fake[0] and kwargs == {"state_v_first": True}
                assert [w.filename for w in caught if w.category is DeprecationWarning] == [__file__]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            holder.chunk_gla(q, k, v, g, transpose_state_layout=True)
        assert [w.filename for w in caught] == [__file__]
        flashgla.fla.disable()
        assert (holder.chunk_gla, holder.fused_recurrent_gla) == theirs and ops.ALGORITHM == "automatic"


def check_readme():
    """The PyTorch example of README.md runs as it stands there."""
    torch._dynamo.reset()
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    exec(text.split("## A PyTorch module")[1].split("```python\n")[1].split("```")[0], {})


def check_cuda_graph():
    leaves = [x.detach().requires_grad_() for x in inputs(dtype=torch.bfloat16, length=300)[:4]]
    packing = cu_seqlens(0, 100, 600)
    packed = [x.detach().reshape(1, 600, *x.shape[2:]).requires_grad_() for x in leaves]

    def work():
        o, ht = flashgla.gated_linear_attention(*leaves, output_final_state=True)
        p, _ = flashgla.gated_linear_attention(*packed, cu_seqlens=packing)
        return (o, ht, p, *torch.autograd.grad(o.float().sum() + ht.sum(), leaves),
                *torch.autograd.grad(p.float().sum(), packed))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    with torch.no_grad():
        for i, x in enumerate((*leaves, *packed)):
            x.copy_(-normal(*x.shape, seed=30 + i).abs())
    graph.replay()
    eager = work()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, eager))


def check_no_synchronisation():
    leaves = inputs(dtype=torch.bfloat16, length=300, batch=1, gradients=True)[:4]
    packing = cu_seqlens(100, 300)
    state = normal(1, 2, 16, 32)

    def work():
        o, _ = flashgla.gated_linear_attention(*leaves, cu_seqlens=packing)
        o.sum().backward()
        flashgla.step(*(x[:, 0].detach() for x in leaves[:3]), state, leaves[3][:, 0].detach())

    for _ in range(2):
        work()  # loads the kernels, also those that add to gradients: loading waits for the device
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)  # about 0.1 s; a call that waits would return after it
        work()
        done = torch.cuda.Event()
        done.record()
        assert not done.query(), "the calls waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_streams():
    """Work on a side stream waits for nothing but its own stream."""
    plain = inputs(dtype=torch.bfloat16, length=300)[:4]
    expected = flashgla.gated_linear_attention(*plain)[0]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        copies = [x * 1 for x in plain]  # ready only when the side stream gets there
        o = flashgla.gated_linear_attention(*copies)[0]
    torch.cuda.synchronize()
    assert torch.equal(o, expected)


ONLY_ON = {check_gradcheck: "cpu", check_cuda_graph: "cuda", check_no_synchronisation: "cuda", check_streams: "cuda"}


def main() -> int:
    global device
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="checks whose names hold this")
    arguments = parser.parse_args()
    device = torch_inputs.device = arguments.device
    torch._dynamo.config.recompile_limit = 4
    return run_checks(globals(), arguments.only, ONLY_ON)


if __name__ == "__main__":
    sys.exit(main())
