"""Checks what flashgla.torch tells PyTorch's compiler, of CUDA too, and what it makes of odd arguments, without a GPU:
python torch_compile_check.py. Needs PyTorch and an installed flashgla (or PYTHONPATH). Prints a line a check; exit
code 1 when one fails."""

from __future__ import annotations

import itertools
import random
import sys

import flashgla.torch
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch_inputs import run_checks

import flashgla

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GATES = ("none", "constant", "scalar", "key", "value", "key_value")
FEATURES = [("identity", False), ("identity", True), ("relu", False), ("elu_plus_one", True)]
# query heads, key-value heads, K, V: of few bytes a token and many, narrow and wide, of parts that end between pieces.
WIDTHS = [(1, 1, 8, 8), (2, 1, 16, 32), (3, 3, 9, 20), (4, 2, 64, 64), (2, 2, 64, 128), (5, 5, 30, 72),
          (4, 1, 128, 256), (2, 2, 256, 512)]


def sizes(packed: bool):
    """(batch, length, sequences), of 64 tokens a sequence and more."""
    draw = random.Random(1)
    for sequences in (1, 2, 3, 5, 16, 127):
        for tokens in (64, 65, 127, 128, 129, 191, 192, 193, 2048, *(draw.randrange(64, 9000) for _ in range(4))):
            if packed:
                yield 1, tokens * sequences + draw.randrange(tokens), sequences
            else:
                yield sequences, tokens, sequences


def shapes(gate: str, batch: int, length: int, widths: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    """Of q, k, v, g, gv."""
    heads, groups, keys, values = widths
    k, v = (batch, length, groups, keys), (batch, length, groups, values)
    g = {"constant": (groups,), "scalar": k[:3], "key": k, "key_value": k}.get(gate)
    return [(batch, length, heads, keys), k, v, g, v if gate in ("value", "key_value") else None]


def combinations():
    for gate, dtype, (feature_map, normalize), widths in itertools.product(GATES, DTYPES, FEATURES, WIDTHS):
        if gate == "none" or not normalize:
            yield gate, dtype, feature_map, normalize, widths


def check_sizes_of_states():
    """An expression in symbolic lengths gives what the library answers: on CUDA of every capability, and on CPUs."""
    compared = 0
    plain = [(combination, "automatic", "ieee", None) for combination in combinations()]
    others = []
    for combination in combinations():
        gate, dtype, *_, widths = combination
        if widths in WIDTHS[2:4]:
            others += [(combination, "chunk_recomputed", "ieee", None), (combination, "recurrent", "ieee", None),
                       (combination, "automatic", "tf32", None)]
            if gate not in GATES[:2] and dtype != torch.float16:
                others.append((combination, "automatic", "ieee", 16.0))  # gates as logits
    for capability, packed, each in itertools.product((90, 80, None), (False, True), plain + others):
        combination, algorithm, float32_math, normalizer = each
        gate, dtype, feature_map, normalize, widths = combination
        device = "cpu" if capability is None else "cuda"
        options = (None, algorithm, feature_map, normalize, float32_math, None, normalizer, None)

        def array(shape, dtype=flashgla.torch._NAMES[dtype], device=device):
            if shape is None:
                return None
            return flashgla._flashgla.Array.without_memory(shape, "f32" if len(shape) == 1 else dtype, device)

        def ask(batch, length, sequences, packed, gate=gate, widths=widths, options=options, array=array,
                capability=capability, device=device):
            packing = flashgla._flashgla.Array.without_memory([sequences + 1], "i32", device) if packed else None
            operands = flashgla._flashgla.Operands(*map(array, shapes(gate, batch, length, widths)), None, None,
                                                   packing, *options)
            return operands.states_bytes(capability or 0)

        size = flashgla.torch._states_size(ask, 128 if capability is None else 64, packed)
        for counts in sizes(packed):
            actual, expected = size(*counts), ask(*counts, packed)
            assert actual == expected, (capability, packed, each, counts, actual, expected)
            compared += 1
    print(f"        {compared} sizes")


def check_training_is_traced_without_a_gpu():
    """The operators on fake tensors that are on a GPU, of fixed and of symbolic lengths."""
    for combination, packed, symbolic in itertools.product(combinations(), (False, True), (False, True)):
        gate, dtype, feature_map, normalize, widths = combination
        if gate not in ("none", "key") or widths not in WIDTHS[1:4]:
            continue
        options = (None, "automatic", feature_map, normalize, "ieee", None, None, None)

        def train(q, k, v, g, packing, options=options, normalize=normalize):
            tensors = (q, k, v, g, None, None, None, packing)
            o, h, z, states = torch.ops.flashgla.forward(*tensors, *options, True, True)
            wanted = [x is not None for x in tensors[:7]]
            d_z = z if normalize else None
            gradients = torch.ops.flashgla.backward(*tensors, *options, o, states, o, h, d_z, wanted)
            return o, h, states, *gradients

        batch = 1 if packed else 3
        made = [None if shape is None else torch.zeros(shape, dtype=dtype)
                for shape in shapes(gate, batch, 1000, widths)[:4]]
        made.append(torch.zeros(4, dtype=torch.int32) if packed else None)

        def on_gpu(*given, made=made, train=train):
            rest = iter(given)
            return train(*(None if x is None else next(rest).to("cuda:0") for x in made))

        given = [x for x in made if x is not None]
        if symbolic:
            graph = make_fx(on_gpu, tracing_mode="symbolic")(*given).graph
            results = [x.meta["val"] for x in graph.find_nodes(op="output")[0].args[0]]
            assert isinstance(results[0].shape[1], torch.SymInt) and isinstance(results[2].shape[0], torch.SymInt)
        else:
            with FakeTensorMode() as mode:
                results = on_gpu(*map(mode.from_tensor, given))
        o, h, states, *gradients = results
        q, k, v = made[:3]
        assert all(x.is_cuda for x in (o, h, states)) and o.shape == (*q.shape[:3], v.shape[3]) and o.dtype == dtype
        assert h.shape == (3, *k.shape[2:], v.shape[3]) and states.dtype == torch.uint8 and states.shape[0] > 0
        for x, gradient in zip(made[:4], gradients):
            assert x is None or gradient.shape == x.shape


def check_many_sequences():
    """Compiled for all lengths, a call of many sequences keeps on the CPU what the graph has room for."""
    compiled = torch.compile(flashgla.gated_linear_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((3, 300), (40, 300), (150, 70)):
        leaves = [torch.randn(batch, length, 1, 8).requires_grad_() for _ in range(3)]
        gradients = [torch.autograd.grad(f(*leaves)[0].sum(), leaves)
                     for f in (flashgla.gated_linear_attention, compiled)]
        assert all(torch.equal(a, b) for a, b in zip(*gradients)), (batch, length)


def check_flags():
    """What Python takes for true or false, with gradients and without."""
    for gradients in (False, True):
        q, k, v = (torch.randn(2, 70, 2, 8, requires_grad=gradients) for _ in range(3))
        for flag in (None, 0, "", 1, "yes", [1]):
            _, state = flashgla.gated_linear_attention(q, k, v, output_final_state=flag)
            assert (state is not None) == bool(flag), flag


def check_refusals():
    """An argument's own dtypes, and its name where PyTorch does not hand a tensor over."""
    q, k, v = (torch.randn(1, 70, 2, 8) for _ in range(3))
    packing, state, token = torch.tensor([0, 30, 70]), torch.zeros(1, 2, 8, 8), [x[:, 0] for x in (q, k, v)]
    for call, text in [
        (lambda: flashgla.gated_linear_attention(q, k, v, cu_seqlens=packing.short()),
         "cu_seqlens is of torch.int16; expected int32 or int64"),
        (lambda: flashgla.gated_linear_attention(q, k, v, cu_seqlens=packing.bool()),
         "cu_seqlens is of torch.bool; expected int32 or int64"),
        (lambda: flashgla.gated_linear_attention(q, k, v, cu_seqlens=packing.float()), "cu_seqlens has dtype f32"),
        (lambda: flashgla.gated_linear_attention(q, k.bool(), v), "k is of torch.bool; expected float64, float32"),
        (lambda: flashgla.gated_linear_attention(q[None, None], k, v), "q has 6 dimensions; expected at most 5"),
        (lambda: flashgla.gated_linear_attention(q, k, v, initial_state=torch.zeros(2, 2, 8, 8, 1, 1)),
         "initial_state has 6 dimensions"),
        (lambda: flashgla.gated_linear_attention(q, k.to_sparse(), v), "k: "),
        (lambda: flashgla.step(*token, state.to_sparse()), "state: "),
        (lambda: flashgla.step(*token, state, normalize=None), "normalize is of type NoneType"),
        (lambda: flashgla.step(*token, state, feature_map=None), "feature_map is of type NoneType"),
        (lambda: flashgla.gated_linear_attention(q, k, v, normalize=None), "normalize is of type NoneType"),
    ]:
        try:
            call()
            raise AssertionError(f"not refused: {text}")
        except (TypeError, ValueError, RuntimeError) as problem:
            assert text in str(problem), (text, problem)


def check_negated_views():
    """Tensors that PyTorch negates when they are read: z.conj().imag is one."""
    z = torch.randn(2, 100, 2, 8, dtype=torch.complex64)
    state = torch.randn(2, 2, 8, 8)
    leaves = [z.conj().imag, *(torch._neg_view(torch.randn(2, 100, 2, 8)) for _ in range(2)),
              torch._neg_view(torch.rand(2, 100, 2, 8)), torch._neg_view(state)]
    assert all(x.is_neg() for x in leaves)
    plain = [x.resolve_neg().clone() for x in leaves]
    weights = torch.randn(2, 100, 2, 8)
    results = []
    for tensors, weight in ((leaves, torch._neg_view(-weights)), (plain, weights)):
        for gradients in (False, True):
            given = [x.detach().requires_grad_(gradients) for x in tensors]
            assert given[0].is_neg() == (tensors is leaves)
            o, ht = flashgla.gated_linear_attention(*given[:4], initial_state=given[4], output_final_state=True)
            results.append([o, ht, *(torch.autograd.grad(o, given, weight) if gradients else ())])
        h = given[4].detach().clone()
        h = torch._neg_view(-h) if tensors is leaves else h
        o = flashgla.step(*(x.detach()[:, 0] for x in given[:3]), h, given[3].detach()[:, 0])
        results.append([o, h.resolve_neg()])
    for mine, expected in zip(results[:3], results[3:]):
        assert all(torch.equal(a, b) for a, b in zip(mine, expected))


def check_forward_mode():
    """A derivative in forward mode is refused, by dual numbers and by jvp; without tangents nothing is."""
    q, k, v = (torch.randn(2, 70, 2, 8) for _ in range(3))
    state = torch.zeros(2, 2, 8, 8)

    def dual(call):
        with forward_ad.dual_level():
            return call(forward_ad.make_dual(q, torch.ones_like(q)))

    for call in (lambda: dual(lambda x: flashgla.gated_linear_attention(x, k, v)),
                 lambda: dual(lambda x: flashgla.gated_linear_attention(x, k.requires_grad_(), v)),
                 lambda: dual(lambda x: flashgla.step(x[:, 0], k[:, 0].detach(), v[:, 0], state)),
                 lambda: torch.func.jvp(lambda x: flashgla.gated_linear_attention(x, k, v)[0], (q,), (q,))):
        try:
            call()
            raise AssertionError("not refused")
        except NotImplementedError as problem:
            assert "forward mode" in str(problem)
    expected = flashgla.gated_linear_attention(q, k, v)[0]
    with forward_ad.dual_level():
        assert torch.equal(flashgla.gated_linear_attention(q, k, v)[0], expected)


if __name__ == "__main__":
    sys.exit(run_checks(globals()))
