"""Logits of small GLA, RetNet, Transformer, HGRN2, GSA, Hyena and linear attention models from their published
formulas, token by token in float64 NumPy, for the golden numbers of flashgla/model/tests/peer_logits_test.cpp: python3
mixer_goldens.py. Weights are the formula of transformers_goldens.py. The formulas are those of
flash-linear-attention's layers (gla.py, multiscale_retention.py, attn.py, hgrn2.py, gsa.py, linear_attn.py with
feature_map.py), whose kernels need a GPU, and of zoology's hyena.py. fla_logits.py runs flash-linear-attention's code
beside them."""

import math

import numpy

TOKENS = [3, 14, 15, 9, 26, 5, 0, 28, 8, 17, 9, 3, 2, 3, 8, 4]
HIDDEN, LAYERS, MLP, WORDS, EPSILON = 24, 3, 40, 29, 1e-6
INNER_EPSILON = 1e-5  # of the norm behind the recurrence, whatever the config says: their fused function's own


class Weights:
    """Parameters in flashgla's order, each asked for once."""

    def __init__(self):
        self.taken = []

    def __call__(self, *shape, norm=False):
        count, values = len(self.taken) + 1, []
        for j in range(math.prod(shape)):
            x = math.sin((j + 1) * 12.9898 + count * 78.233) * 43758.5453
            values.append(x - math.floor(x) - 0.5)
        values = numpy.array(values).reshape(shape) * (0.4 if norm else 0.8) + (1.0 if norm else 0.0)
        self.taken.append(values.astype(numpy.float32).astype(numpy.float64))
        return self.taken[-1]


def sigmoid(x):
    return 1.0 / (1.0 + numpy.exp(-x))


def swish(x):
    return x * sigmoid(x)


def softmax(x):
    power = numpy.exp(x - x.max(axis=-1, keepdims=True))
    return power / power.sum(axis=-1, keepdims=True)


def rms(x, weight, epsilon=None):
    return x / numpy.sqrt((x * x).mean(axis=-1, keepdims=True) + (epsilon or EPSILON)) * weight


def convolution(x, weight):
    """Causal and depthwise: x [T,C], weight [C,1,W]."""
    width = weight.shape[-1]
    padded = numpy.concatenate([numpy.zeros((width - 1, x.shape[1])), x])
    return sum(padded[i:i + len(x)] * weight[:, 0, i] for i in range(width))


def heads(x, count):
    return x.reshape(len(x), count, -1)


def rotated(x):
    """Rotary positions on [T,H,K], halves against each other."""
    half = x.shape[-1] // 2
    angle = numpy.arange(len(x))[:, None] * 1e4 ** (-numpy.arange(half) / half)
    cosine, sine = numpy.cos(angle)[:, None], numpy.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return numpy.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


def recurrence(q, k, v, gate):
    """o [T,H,V] of q, k [T,H,K], v [T,H,V] and factors [T,H,K] or, for all tokens, [1,H,1]."""
    gate = numpy.broadcast_to(gate, k.shape)
    state, rows = numpy.zeros((k.shape[1], k.shape[2], v.shape[2])), []
    for t in range(len(q)):
        state = gate[t][:, :, None] * state + k[t][:, :, None] * v[t][:, None, :]
        rows.append(numpy.einsum("hk,hkv->hv", q[t] * q.shape[-1] ** -0.5, state))
    return numpy.array(rows)


class Gla:
    """A gate of each channel of the keys; `scalar`: of each head."""

    heads, rank, expand_k, scalar = 2, 16, 0.5, False

    def __init__(self, take, _, convolutions):
        keys = int(HIDDEN * self.expand_k)
        sizes = (keys, keys, HIDDEN)
        q, k, v = (take(size, HIDDEN) for size in sizes)
        down = None if self.scalar else take(self.rank, HIDDEN)
        self.projections, self.gate = (q, k, v), take(HIDDEN, HIDDEN)
        self.decay = (down, take(self.heads, HIDDEN) if self.scalar else take(keys, self.rank),
                      take(self.heads if self.scalar else keys))
        self.convolutions = [take(size, 1, 4) for size in sizes] if convolutions else []
        self.norm, self.out = take(HIDDEN // self.heads, norm=True), take(HIDDEN, HIDDEN)

    def __call__(self, x, _):
        q, k, v = (x @ w.T for w in self.projections)
        if self.convolutions:
            q, k, v = (swish(convolution(each, w)) for each, w in zip((q, k, v), self.convolutions))
        down, up, bias = self.decay
        decay = heads(sigmoid((x if self.scalar else x @ down.T) @ up.T + bias) ** (1.0 / 16.0), self.heads)
        o = recurrence(*(heads(each, self.heads) for each in (q, k, v)), decay)
        return (rms(o, self.norm).reshape(len(x), -1) * swish(x @ self.gate.T)) @ self.out.T


class Retention:
    heads = 2

    def __init__(self, take, *_):
        self.projections = [take(size, HIDDEN) for size in (HIDDEN, HIDDEN, 2 * HIDDEN)]
        self.gate = take(2 * HIDDEN, HIDDEN)
        self.norm, self.out = take(2 * HIDDEN // self.heads, norm=True), take(HIDDEN, 2 * HIDDEN)

    def __call__(self, x, _):
        q, k, v = (heads(x @ w.T, self.heads) for w in self.projections)
        decay = 1.0 - 2.0 ** (-5.0 - numpy.arange(self.heads))
        o = recurrence(rotated(q), rotated(k), v, decay[None, :, None])
        return (rms(o, self.norm).reshape(len(x), -1) * swish(x @ self.gate.T)) @ self.out.T


class Attention:
    """With biases of q, k and v, norms of q and k (whose epsilon is the norm's own) and a window."""

    heads, kv_heads, window = 4, 2, 5

    def __init__(self, take, *_):
        head = HIDDEN // self.heads
        sizes = (HIDDEN, self.kv_heads * head, self.kv_heads * head)
        self.projections, self.biases = [take(size, HIDDEN) for size in sizes], [take(size) for size in sizes]
        self.norms, self.out = [take(head, norm=True) for _ in "qk"], take(HIDDEN, HIDDEN)

    def __call__(self, x, _):
        q, k, v = (x @ w.T + b for w, b in zip(self.projections, self.biases))
        q, k, v = heads(q, self.heads), heads(k, self.kv_heads), heads(v, self.kv_heads)
        q, k = (rotated(rms(each, w, INNER_EPSILON)) for each, w in zip((q, k), self.norms))
        k, v = (numpy.repeat(each, self.heads // self.kv_heads, axis=1) for each in (k, v))
        rows = []
        for t in range(len(x)):
            seen = slice(max(0, t + 1 - self.window), t + 1)
            weights = softmax(numpy.einsum("hk,jhk->hj", q[t], k[seen]) * q.shape[-1] ** -0.5)
            rows.append(numpy.einsum("hj,jhv->hv", weights, v[seen]).reshape(-1))
        return numpy.array(rows) @ self.out.T


class Hgrn2:
    ratio = 8

    def __init__(self, take, layer, convolutions):
        self.layer = layer
        self.projections = [take(HIDDEN, HIDDEN) for _ in "qfi"]
        self.convolutions = [take(HIDDEN, 1, 4) for _ in "qfi"] if convolutions else []
        self.norm = take(HIDDEN, norm=True)
        self.out = take(HIDDEN, HIDDEN)

    def __call__(self, x, bounds):
        q, f, i = (x @ w.T for w in self.projections)
        if self.convolutions:
            q, f, i = (convolution(each, w) for each, w in zip((q, f, i), self.convolutions))
        q = swish(q)
        bound = numpy.cumsum(softmax(bounds.T).T, axis=0)[self.layer] - softmax(bounds.T).T[0]
        gate = bound + (1.0 - bound) * sigmoid(f)
        count = HIDDEN // self.ratio
        q, k, v, gate = (heads(each, count) for each in (q, 1.0 - gate, i, gate))
        return rms(recurrence(q, k, v, gate).reshape(len(x), -1), self.norm, INNER_EPSILON) @ self.out.T


class Gsa:
    heads, kv_heads, slots = 4, 2, 5

    def __init__(self, take, _, convolutions):
        head = HIDDEN // self.heads
        sizes = (HIDDEN, self.kv_heads * head, self.kv_heads * head)
        self.projections = [take(size, HIDDEN) for size in (*sizes, self.kv_heads * self.slots)]
        self.convolutions = [take(size, 1, 4) for size in sizes] if convolutions else []
        self.norm = take(HIDDEN, norm=True)
        self.out = take(HIDDEN, HIDDEN)

    def __call__(self, x, _):
        q, k, v, f = (x @ w.T for w in self.projections)
        if self.convolutions:
            q, k, v = (swish(convolution(each, w)) for each, w in zip((q, k, v), self.convolutions))
        q = heads(swish(q), self.heads)
        k, v, f = (heads(each, self.kv_heads) for each in (swish(k), swish(v), f))
        gate = sigmoid(f) ** (1.0 / 8.0)
        s = 1.0 - gate
        group, head = self.heads // self.kv_heads, HIDDEN // self.heads
        k, v, s, gate = (numpy.repeat(each, group, axis=1) for each in (k, v, s, gate))
        keys, values = numpy.zeros((self.heads, self.slots, head)), numpy.zeros((self.heads, self.slots, head))
        rows = []
        for t in range(len(x)):
            keys = gate[t][:, :, None] * keys + s[t][:, :, None] * k[t][:, None, :]
            values = gate[t][:, :, None] * values + s[t][:, :, None] * v[t][:, None, :]
            read = softmax(numpy.einsum("hk,hmk->hm", q[t], keys))
            rows.append(numpy.einsum("hm,hmv->hv", read, values).reshape(-1))
        return rms(swish(numpy.array(rows)), self.norm, INNER_EPSILON) @ self.out.T


class LinearAttention:
    heads, map, tied, divided, normalised = 3, "identity", False, (False, False), False

    def __init__(self, take, *_):
        size = HIDDEN // self.heads
        shapes = {"elementwise_product": [(size, size), (size, size), (size,), (size,)],
                  "hedgehog": [(size, size), (size,)], "t2r": [(size, size)]}.get(self.map, [])
        self.projections = [take(HIDDEN, HIDDEN) for _ in "qkv"]
        q_map = [take(*shape) for shape in shapes]
        self.maps = [q_map, q_map if self.tied else [take(*shape) for shape in shapes]]
        self.norm, self.out = take(size, norm=True), take(HIDDEN, HIDDEN)

    def features(self, x, weights, divided):
        if self.map == "elementwise_product":
            y = (x @ weights[0].T + weights[2]) * (x @ weights[1].T + weights[3])
        elif self.map == "hedgehog":
            u = x @ weights[0].T + weights[1]
            y = softmax(numpy.concatenate([2.0 * u, -2.0 * u], axis=-1))
        elif self.map == "t2r":
            y = numpy.maximum(x @ weights[0].T, 0.0)
        else:  # dpfp
            r = numpy.maximum(numpy.concatenate([x, -x], axis=-1), 0.0)
            y = numpy.concatenate([r * numpy.roll(r, j, axis=-1) for j in (1, 2, 3, 4)], axis=-1)
        return y / (y.sum(axis=-1, keepdims=True) + 1e-4) if divided else y

    def __call__(self, x, _):
        q, k, v = (heads(x @ w.T, self.heads) for w in self.projections)
        q, k = (self.features(each, *of) for each, of in zip((q, k), zip(self.maps, self.divided)))
        state, z, rows = numpy.zeros((self.heads, k.shape[-1], v.shape[-1])), numpy.zeros(k.shape[1:]), []
        for t in range(len(x)):
            state, z = state + k[t][:, :, None] * v[t][:, None, :], z + k[t]
            o = numpy.einsum("hk,hkv->hv", q[t], state) * q.shape[-1] ** -0.5
            if self.normalised:
                o = o * q.shape[-1] ** 0.5 / ((q[t] * z).sum(axis=-1, keepdims=True) + 1e-10)
            rows.append(rms(o, self.norm).reshape(-1))
        return numpy.array(rows) @ self.out.T


def linear_attention(**settings):
    return type("Map", (LinearAttention,), settings)


class Hyena:
    order, emb, length, shift = 6, 5, 20, 0.1

    def __init__(self, take, *_):
        self.input, self.input_bias = take(3 * HIDDEN, HIDDEN), take(3 * HIDDEN)
        self.short, self.short_bias = take(3 * HIDDEN, 1, 3), take(3 * HIDDEN)
        self.skip, self.positions = take(HIDDEN), take(self.length, self.emb)
        self.inner = [(take(self.order, width), take(self.order)) for width in (self.emb, self.order, self.order)]
        self.last, self.frequency = take(HIDDEN, self.order), take(self.order)
        self.out, self.out_bias = take(HIDDEN, HIDDEN), take(HIDDEN)

    def __call__(self, x, _):
        hidden = self.positions
        for weight, bias in self.inner:
            hidden = numpy.sin(self.frequency * (hidden @ weight.T + bias))
        deltas = numpy.linspace(-math.log(1e-2) / 1.5, -math.log(1e-2) / 0.3, HIDDEN)
        t = numpy.linspace(0.0, 1.0, self.length)[:, None]
        kernel = (hidden @ self.last.T) * (numpy.exp(-t * deltas) + self.shift)
        mixed = convolution(x @ self.input.T + self.input_bias, self.short) + self.short_bias
        first, second, v = (mixed[:, i * HIDDEN:(i + 1) * HIDDEN] for i in range(3))
        c = first * v
        s = numpy.array([sum(kernel[t - j] * c[j] for j in range(t + 1)) for t in range(len(c))]) + self.skip * c
        return (second * s) @ self.out.T + self.out_bias


def model(mixer, bounded, convolutions, tokens):
    """Logits [T,WORDS], and the parameters in flashgla's order."""
    take = Weights()
    words = take(WORDS, HIDDEN)
    bounds = take(LAYERS, HIDDEN) if bounded else None
    layers = []
    for layer in range(LAYERS):
        norm = take(HIDDEN, norm=True)
        attention = mixer(take, layer, convolutions)
        layers.append((norm, attention, take(HIDDEN, norm=True), take(MLP, HIDDEN), take(MLP, HIDDEN),
                       take(HIDDEN, MLP)))
    final, head = take(HIDDEN, norm=True), take(WORDS, HIDDEN)
    x = words[tokens]
    for norm, attention, mlp_norm, gate, up, down in layers:
        x = x + attention(rms(x, norm), bounds)
        y = rms(x, mlp_norm)
        x = x + (swish(y @ gate.T) * (y @ up.T)) @ down.T
    return rms(x, final) @ head.T, take.taken


def show(name, mixer, bounded, convolutions):
    logits, _ = model(mixer, bounded, convolutions, TOKENS)
    print(name)
    for t in (0, len(TOKENS) // 2, len(TOKENS) - 1):
        print(f"  {{{t}, {{" + ", ".join(f"{value:.8g}" for value in logits[t, :6]) + "}},")


if __name__ == "__main__":
    show("gla", Gla, False, False)
    show("gla, convolutions", Gla, False, True)
    show("gla_variant, scalar", type("Scalar", (Gla,), {"scalar": True}), False, False)
    show("retnet", Retention, False, False)
    show("transformer: biases, norms, window", Attention, False, False)
    show("hgrn2", Hgrn2, True, False)
    show("hgrn2, convolutions", Hgrn2, True, True)
    show("gsa", Gsa, False, False)
    show("gsa, convolutions", Gsa, False, True)
    show("hyena", Hyena, False, False)
    show("elementwise_product", linear_attention(map="elementwise_product"), False, False)
    show("hedgehog, tied, normalised", linear_attention(map="hedgehog", tied=True, normalised=True), False, False)
    show("t2r, q and k divided", linear_attention(map="t2r", divided=(True, True)), False, False)
    show("dpfp, k divided", linear_attention(map="dpfp", divided=(False, True)), False, False)
