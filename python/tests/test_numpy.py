"""The package on NumPy arrays, against the recurrence written out in float64. Needs numpy and pytest."""

import pathlib
import sys
import threading
import types

import numpy as np
import pytest

import flashgla
from flashgla import _arrays, _flashgla

ALGORITHMS = ["automatic", "recurrent", "parallel", "chunk_materialized", "chunk_recomputed"]
TOLERANCE = {np.float64: 5e-12, np.float32: 1e-5, np.float16: 6.4e-4}
MAPS = {"identity": lambda x: x, "relu": lambda x: np.maximum(x, 0),
        "elu_plus_one": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))}


def recurrence(q, k, v, g=None, gv=None, scale=None, h0=None, z0=None, feature_map="identity", normalize=False):
    """o, h, z of one sequence a batch element: the equations of the package's docstring, token by token."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (batch, length, heads, key_dim), groups, value_dim = q.shape, k.shape[2], v.shape[3]
    q, k = MAPS[feature_map](q), MAPS[feature_map](k)
    h = np.zeros((batch, groups, key_dim, value_dim)) if h0 is None else np.array(h0, np.float64)
    z = np.zeros((batch, groups, key_dim)) if z0 is None else np.array(z0, np.float64)
    o = np.empty((batch, length, heads, value_dim))
    for t in range(length):
        if g is not None:
            gate = np.exp(np.asarray(g, np.float64))
            gate = gate[None, :, None] if g.ndim == 1 else gate[:, t] if g.ndim == 4 else gate[:, t, :, None]
            h = h * gate[..., None]
        if gv is not None:
            h = h * np.exp(np.asarray(gv, np.float64))[:, t, :, None, :]
        h = h + k[:, t, :, :, None] * v[:, t, :, None, :]
        z = z + k[:, t]
        query = q[:, t].reshape(batch, groups, heads // groups, key_dim)
        o_t = np.einsum("bgrk,bgkv->bgrv", query, h)
        if normalize:
            o_t = o_t / (np.einsum("bgrk,bgk->bgr", query, z)[..., None] + 1e-10)
        else:
            o_t = o_t * (key_dim**-0.5 if scale is None else scale)
        o[:, t] = o_t.reshape(batch, heads, value_dim)
    return o, h, z


def error(actual, expected):
    """RMS of the difference over RMS of what is expected."""
    assert actual.shape == expected.shape
    return np.linalg.norm(np.asarray(actual, np.float64) - expected) / max(np.linalg.norm(expected), 1e-30)


def inputs(gate="key", dtype=np.float32, batch=2, length=37, heads=4, groups=2, key_dim=24, value_dim=40, seed=0):
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.standard_normal(shape).astype(dtype)

    q, k, v = normal(batch, length, heads, key_dim), normal(batch, length, groups, key_dim), normal(
        batch, length, groups, value_dim)
    shapes = {"constant": (groups,), "scalar": (batch, length, groups), "key": k.shape, "key_value": k.shape}
    g = (-np.abs(normal(*shapes[gate])) / 4).astype(dtype) if gate in shapes else None
    gv = (-np.abs(normal(*v.shape)) / 4).astype(dtype) if gate in ("value", "key_value") else None
    return q, k, v, g, gv


GATES = ["none", "constant", "scalar", "key", "value", "key_value"]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("gate", GATES)
def test_forward_is_the_recurrence(gate, dtype):
    q, k, v, g, gv = inputs(gate, dtype)
    state_dtype = np.float64 if dtype == np.float64 else np.float32
    h0 = np.random.default_rng(1).standard_normal((2, 2, 24, 40)).astype(state_dtype)
    o, ht = flashgla.gated_linear_attention(q, k, v, g, gv, initial_state=h0, output_final_state=True)
    expected_o, expected_h, _ = recurrence(q, k, v, g, gv, h0=h0)
    assert o.dtype == dtype and ht.dtype == state_dtype
    assert error(o, expected_o) < TOLERANCE[dtype]
    assert error(ht, expected_h) < TOLERANCE[dtype]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_and_option_reaches_the_operator(algorithm):
    q, k, v, g, _ = inputs(length=130)
    o, state = flashgla.gated_linear_attention(q, k, v, g, scale=0.7, algorithm=algorithm, feature_map="relu")
    assert state is None
    assert error(o, recurrence(q, k, v, g, scale=0.7, feature_map="relu")[0]) < 1e-5
    assert error(o, recurrence(q, k, v, g, feature_map="relu")[0]) > 0.1  # the scale counts


def test_normalize_carries_a_pair():
    q, k, v, _, _ = inputs("none")
    options = {"feature_map": "elu_plus_one", "normalize": True}
    o, (h, z) = flashgla.gated_linear_attention(q, k, v, output_final_state=True, **options)
    expected_o, expected_h, expected_z = recurrence(q, k, v, **options)
    assert max(error(o, expected_o), error(h, expected_h), error(z, expected_z)) < 1e-5
    o2, (h2, z2) = flashgla.gated_linear_attention(q, k, v, initial_state=(h, z), output_final_state=True, **options)
    expected_o, expected_h, expected_z = recurrence(q, k, v, h0=h, z0=z, **options)
    assert max(error(o2, expected_o), error(h2, expected_h), error(z2, expected_z)) < 1e-5


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_packed_sequences_are_separate_ones(dtype):
    q, k, v, g, _ = inputs(batch=1, length=50)
    cu_seqlens = np.array([0, 17, 17, 50], dtype)
    o, ht = flashgla.gated_linear_attention(q, k, v, g, output_final_state=True, cu_seqlens=cu_seqlens)
    assert ht.shape == (3, 2, 24, 40) and not ht[1].any()
    for n, (begin, end) in enumerate([(0, 17), (17, 17), (17, 50)]):
        if begin == end:
            continue
        part = np.s_[:, begin:end]
        expected_o, expected_h, _ = recurrence(q[part], k[part], v[part], g[part])
        assert error(o[part], expected_o) < 1e-5 and error(ht[n:n + 1], expected_h) < 1e-5


def test_max_seqlen():
    q, k, v, g, _ = inputs(batch=1, length=50)
    cu_seqlens = np.array([0, 17, 17, 50])
    o, _ = flashgla.gated_linear_attention(q, k, v, g, cu_seqlens=cu_seqlens)
    known, _ = flashgla.gated_linear_attention(q, k, v, g, cu_seqlens=cu_seqlens, max_seqlen=33)
    assert error(known, o) < 1e-5
    for wrong, packing, message in [(0, cu_seqlens, "max_seqlen is 0; expected a positive number"),
                                    (32, cu_seqlens, "max_seqlen is 32; expected at least 33"),
                                    (50, None, "max_seqlen is 50; expected 0 without cu_seqlens")]:
        with pytest.raises(ValueError, match=message):
            flashgla.gated_linear_attention(q, k, v, g, cu_seqlens=packing, max_seqlen=wrong)
    with pytest.raises(TypeError, match="max_seqlen is of type str"):
        flashgla.gated_linear_attention(q, k, v, g, cu_seqlens=cu_seqlens, max_seqlen="33")


@pytest.mark.parametrize("gate", GATES)
def test_backward_is_the_derivative(gate):
    """In float64, along a random direction in all inputs at once, against the central difference of the forward."""
    q, k, v, g, gv = inputs(gate, np.float64, length=19)
    random = np.random.default_rng(2)
    h0 = random.standard_normal((2, 2, 24, 40))
    d_o, d_ht = random.standard_normal((2, 19, 4, 40)), random.standard_normal(h0.shape)

    def loss(values):
        o, ht = flashgla.gated_linear_attention(*values[:5], initial_state=values[5], output_final_state=True)
        return np.sum(o * d_o) + np.sum(ht * d_ht)

    o, _ = flashgla.gated_linear_attention(q, k, v, g, gv, initial_state=h0, output_final_state=True)
    gradients = flashgla.gated_linear_attention_backward(d_o, q, k, v, g, gv, initial_state=h0, o=o, d_final_state=d_ht)
    values = [q, k, v, g, gv, h0]
    for i, (value, gradient) in enumerate(zip(values, gradients)):
        assert (value is None) == (gradient is None)
        if value is None:
            continue
        assert gradient.shape == value.shape and gradient.dtype == value.dtype
        direction = random.standard_normal(value.shape)
        step = 1e-6
        plus, minus = ([x if j != i else x + sign * step * direction for j, x in enumerate(values)] for sign in (1, -1))
        difference = (loss(plus) - loss(minus)) / (2 * step)
        assert np.sum(gradient * direction) == pytest.approx(difference, rel=1e-6), gradients._fields[i]


def test_backward_with_normalize():
    q, k, v, _, _ = (x if x is None else np.abs(x) for x in inputs("none", np.float64, length=11))
    random = np.random.default_rng(3)
    state = (np.abs(random.standard_normal((2, 2, 24, 40))), np.abs(random.standard_normal((2, 2, 24))))
    d_o, d_state = random.standard_normal((2, 11, 4, 40)), tuple(random.standard_normal(x.shape) for x in state)
    o, _ = flashgla.gated_linear_attention(q, k, v, initial_state=state, output_final_state=True, normalize=True)
    gradients = flashgla.gated_linear_attention_backward(d_o, q, k, v, initial_state=state, normalize=True, o=o,
                                                         d_final_state=d_state)

    def loss(q, k, v, h0, z0):
        o, (ht, zt) = flashgla.gated_linear_attention(q, k, v, initial_state=(h0, z0), output_final_state=True,
                                                      normalize=True)
        return np.sum(o * d_o) + np.sum(ht * d_state[0]) + np.sum(zt * d_state[1])

    values = [q, k, v, *state]
    for i, gradient in enumerate([*gradients[:3], *gradients.d_initial_state]):
        direction = random.standard_normal(gradient.shape)
        plus, minus = ([x if j != i else x + s * 1e-6 * direction for j, x in enumerate(values)] for s in (1, -1))
        assert np.sum(gradient * direction) == pytest.approx((loss(*plus) - loss(*minus)) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
def test_steps_equal_the_forward(normalize):
    q, k, v, g, _ = inputs("none" if normalize else "key", length=5)
    options = {"normalize": normalize, "feature_map": "elu_plus_one"}
    o, final = flashgla.gated_linear_attention(q, k, v, g, output_final_state=True, **options)
    state = np.zeros((2, 2, 24, 40), np.float32)
    if normalize:
        state = (state, np.zeros((2, 2, 24), np.float32))
    for t in range(5):
        o_t = flashgla.step(q[:, t], k[:, t], v[:, t], state, None if g is None else g[:, t], **options)
        assert error(o_t, o[:, t].astype(np.float64)) < 1e-5
    for mine, theirs in zip(state if normalize else [state], final if normalize else [final]):
        assert error(mine, theirs.astype(np.float64)) < 1e-5


def test_no_copy_of_strided_inputs():
    """One buffer holds q, k and v of each token, as a fused projection leaves them."""
    fused = np.random.default_rng(4).standard_normal((2, 9, 4, 72)).astype(np.float32)
    q, k, v = fused[..., :24], fused[..., 24:48], fused[..., 48:]
    o, _ = flashgla.gated_linear_attention(q, k, v)
    assert error(o, recurrence(q, k, v)[0]) < 1e-5
    with pytest.raises(ValueError, match="q has stride 2 in its last dimension"):
        flashgla.gated_linear_attention(fused[..., :48:2], k, v)  # a copy would have hidden it


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v, g, _ = (x if x is None else x.astype(ml_dtypes.bfloat16) for x in inputs())
    o, ht = flashgla.gated_linear_attention(q, k, v, g, output_final_state=True)
    assert o.dtype == ml_dtypes.bfloat16 and ht.dtype == np.float32
    assert error(o, recurrence(q, k, v, g)[0]) < 5e-3


def test_jax():
    """Runs where JAX is installed."""
    jax = pytest.importorskip("jax")
    q, k, v, g, _ = inputs()
    o, ht = flashgla.gated_linear_attention(*map(jax.numpy.asarray, (q, k, v, g)), output_final_state=True)
    assert isinstance(o, jax.Array) and isinstance(ht, jax.Array)
    assert error(np.asarray(o), recurrence(q, k, v, g)[0]) < 1e-5
    gradients = flashgla.gated_linear_attention_backward(*map(jax.numpy.asarray, (np.ones_like(o), q, k, v, g)))
    expected = flashgla.gated_linear_attention_backward(np.ones_like(o), q, k, v, g)
    assert all(error(np.asarray(a), b) < 2e-5 for a, b in zip(gradients[:4], expected[:4]))
    with pytest.raises(ValueError, match="read-only"):
        flashgla.step(*(jax.numpy.asarray(x[:, 0]) for x in (q, k, v)), ht)


def test_cupy():
    """Runs where CuPy and a GPU are; on a stream of CuPy's own."""
    cupy = pytest.importorskip("cupy")
    if not flashgla.with_cuda or cupy.cuda.runtime.getDeviceCount() == 0:
        pytest.skip("no CUDA")
    q, k, v, g, _ = inputs()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        on_gpu = [cupy.asarray(x) for x in (q, k, v, g)]
        o, ht = flashgla.gated_linear_attention(*on_gpu, output_final_state=True)
        gradients = flashgla.gated_linear_attention_backward(cupy.ones_like(o), *on_gpu)
        o_next = flashgla.step(*(cupy.ascontiguousarray(x[:, 0]) for x in on_gpu[:3]), ht)
        stream.synchronize()
    assert isinstance(o, cupy.ndarray) and o_next.shape == (2, 4, 40)
    assert error(o.get(), recurrence(q, k, v, g)[0]) < 1e-5
    expected = flashgla.gated_linear_attention_backward(np.ones_like(o.get()), q, k, v, g)
    assert all(error(a.get(), b) < 2e-5 for a, b in zip(gradients[:4], expected[:4]))


def test_cupy_on_another_device():
    """Runs where CuPy and two GPUs are: on the second, while the first is current and stays so."""
    cupy = pytest.importorskip("cupy")
    if not flashgla.with_cuda or cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("no two GPUs")
    q, k, v, g, _ = inputs()
    with cupy.cuda.Device(1):
        on_gpu = [cupy.asarray(x) for x in (q, k, v, g)]
        ones = cupy.ones((*q.shape[:3], v.shape[3]), "float32")
    o, ht = flashgla.gated_linear_attention(*on_gpu, output_final_state=True)
    gradients = flashgla.gated_linear_attention_backward(ones, *on_gpu)
    assert cupy.cuda.Device().id == 0 and all(x.device.id == 1 for x in (o, ht, *gradients[:4]))
    assert error(o.get(), recurrence(q, k, v, g)[0]) < 1e-5
    with pytest.raises(ValueError, match="k is on cuda:0; expected cuda:1"):
        flashgla.gated_linear_attention(on_gpu[0], cupy.asarray(k), *on_gpu[2:])


def test_arrays_of_a_device_that_is_not_current(monkeypatch):
    """What stands for CuPy here takes memory and streams from whichever device is current, as CuPy does."""
    current = [0]

    class Device:
        def __init__(self, number):
            self.number = number

        def __enter__(self):
            current.append(self.number)

        def __exit__(self, *_):
            current.pop()

    def empty(shape, dtype):
        assert current[-1] == 1
        return np.empty(shape, dtype)

    cuda = types.SimpleNamespace(Device=Device, get_current_stream=lambda: types.SimpleNamespace(ptr=10 + current[-1]))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(empty=empty, cuda=cuda))
    library = _arrays.CuPy(1)
    assert library.empty([2, 3], "f32").shape == (2, 3) and library.allocate(8).shape == [8] and library.stream == 11
    assert current == [0]


def test_read_only_inputs_and_states():
    q, k, v, g, _ = inputs(length=3)
    for x in (q, k, v, g):
        x.flags.writeable = False
    o, ht = flashgla.gated_linear_attention(q, k, v, g, output_final_state=True)
    assert error(o, recurrence(q, k, v, g)[0]) < 1e-5
    ht.flags.writeable = False
    before = ht.copy()
    with pytest.raises(ValueError, match="state: .*read-only"):
        flashgla.step(q[:, 0], k[:, 0], v[:, 0], ht, g[:, 0])
    assert np.array_equal(ht, before)


def test_arguments_are_refused_by_name():
    q, k, v, g, gv = inputs("key_value")
    call = flashgla.gated_linear_attention
    with pytest.raises(ValueError, match=r"gated_linear_attention: k has shape \[2,36,2,24\]; expected \[2,37,2,24\]"):
        call(q, k[:, 1:], v)
    with pytest.raises(ValueError, match="v has dtype f64; expected f32"):
        call(q, k, v.astype(np.float64))
    with pytest.raises(ValueError, match="initial_state has shape"):
        call(q, k, v, initial_state=np.zeros((2, 2, 40, 24), np.float32))
    with pytest.raises(ValueError, match="algorithm is 'fastest'; expected one of automatic"):
        call(q, k, v, algorithm="fastest")
    with pytest.raises(ValueError, match="feature_map is 'tanh'"):
        call(q, k, v, feature_map="tanh")
    with pytest.raises(ValueError, match="float32_math is 'fp8'"):
        call(q, k, v, float32_math="fp8")
    with pytest.raises(ValueError, match="normalize is set with a key gate"):
        call(q, k, v, g, normalize=True)
    with pytest.raises(ValueError, match="scale is 0"):
        call(q, k, v, scale=0.0)
    with pytest.raises(ValueError, match="scale is not finite"):
        call(q, k, v, scale=float("nan"))
    with pytest.raises(ValueError, match="cu_seqlens ends at 36; expected 37"):
        call(q[:1], k[:1], v[:1], cu_seqlens=np.array([0, 36]))
    with pytest.raises(ValueError, match=r"g has shape \[0,37,2,24\]"):
        call(q, k, v, g[:0])
    with pytest.raises(ValueError, match="q: .*6 dimensions"):
        call(q[None, None], k, v)
    with pytest.raises(ValueError, match="a state is of type ndarray; expected a pair"):
        call(q, k, v, initial_state=np.zeros((2, 2, 24, 40), np.float32), normalize=True)
    with pytest.raises(ValueError, match="o is absent"):
        flashgla.gated_linear_attention_backward(np.ones_like(q), q, k, v[..., :24].copy(), gv=gv[..., :24].copy())
    with pytest.raises(ValueError, match="q: .*type code 5"):
        call(q.astype(np.complex64), k, v)
    with pytest.raises(ValueError, match="k: an array is not handed over: .*native byte order"):
        call(q, k.astype(">f4"), v)
    with pytest.raises(TypeError, match="^normalize is of type NoneType; expected True or False"):
        call(q, k, v, normalize=None)
    with pytest.raises(TypeError, match="^algorithm is of type NoneType; expected a string"):
        call(q, k, v, algorithm=None)
    with pytest.raises(TypeError, match="^feature_map is of type int; expected a string"):
        flashgla.step(q[:, 0], k[:, 0], v[:, 0], np.zeros((2, 2, 24, 40), np.float32), feature_map=1)
    with pytest.raises(TypeError, match="q is of type list"):
        call(q.tolist(), k, v)
    with pytest.raises(TypeError, match="^k: .*got list"):
        call(q, k.tolist(), v)
    with pytest.raises(TypeError, match="^scale is of type str; expected a number or None"):
        call(q, k, v, scale="1")
    assert np.array_equal(call(q, k, v, scale=1)[0], call(q, k, v, scale=np.float32(1))[0])
    with pytest.raises(ValueError, match="state has dtype f64; expected f32"):
        flashgla.step(q[:, 0], k[:, 0], v[:, 0], np.zeros((2, 2, 24, 40)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_workspace_of_the_callers_allocator(algorithm, monkeypatch):
    """As on CUDA, where PyTorch's and CuPy's allocators give a call exactly what its dry run planned."""
    inputs_ = inputs(length=300)[:4]
    d_o = np.ones((2, 300, 4, 40), np.float32)
    expected = (*flashgla.gated_linear_attention(*inputs_, algorithm=algorithm, output_final_state=True),
                *flashgla.gated_linear_attention_backward(d_o, *inputs_, algorithm=algorithm)[:4])
    asked = []

    def allocate(self, bytes):
        asked.append(np.full(bytes, 255, np.uint8))
        return _flashgla.Array(asked[-1], True)

    monkeypatch.setattr(_arrays.NumPy, "allocate", allocate)
    for _ in range(2):
        actual = (*flashgla.gated_linear_attention(*inputs_, algorithm=algorithm, output_final_state=True),
                  *flashgla.gated_linear_attention_backward(d_o, *inputs_, algorithm=algorithm)[:4])
        assert all(np.array_equal(a, b) for a, b in zip(actual, expected))
    assert asked and any((memory != 255).any() for memory in asked)  # it was used
    monkeypatch.setattr(_arrays.NumPy, "allocate", lambda self, bytes: _flashgla.Array(np.empty(8, np.uint8), True))
    with pytest.raises(ValueError, match="allocate returned 8 bytes on cpu; expected [0-9]+ on cpu"):
        flashgla.gated_linear_attention_backward(d_o, *inputs_, algorithm=algorithm)
    monkeypatch.undo()
    assert np.array_equal(flashgla.gated_linear_attention(*inputs_, algorithm=algorithm)[0], expected[0])


def test_threads_do_not_share_memory():
    """Calls of several Python threads at once give the bits that one thread gives: the lock is released in a call."""
    cases = [inputs(length=200, seed=seed) for seed in range(4)]
    expected = [flashgla.gated_linear_attention(*case)[0] for case in cases]
    wrong = []

    def work(case, o):
        for _ in range(20):
            if not np.array_equal(flashgla.gated_linear_attention(*case)[0], o):
                wrong.append(case)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_package():
    assert isinstance(flashgla.with_cuda, bool)
    assert all(getattr(flashgla, name).__doc__ for name in flashgla.__all__ if callable(getattr(flashgla, name)))


def test_readme_example():
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    example = text.split("## NumPy")[1].split("```python")[1].split("```")[0]
    names = {}
    exec(example, names)
    assert names["o"].shape == (2, 100, 4, 128) and names["o_next"].shape == (2, 4, 128)
