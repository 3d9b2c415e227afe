"""What the PyTorch checks compare with: the recurrence token by token, in float64, differentiated by autograd."""

from __future__ import annotations

import torch

MAPS = {"identity": lambda x: x, "relu": torch.relu, "elu_plus_one": lambda x: torch.nn.functional.elu(x) + 1}


def recurrence(q, k, v, g=None, gv=None, scale=None, initial_state=None, cu_seqlens=None, feature_map="identity",
               normalize=False):
    """(o, h, z): arguments as flashgla.gated_linear_attention; o and states in float64."""
    if cu_seqlens is not None:
        states = []
        rows = []
        for n, (begin, end) in enumerate(zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:])):
            def part(x, n=n, begin=begin, end=end):
                return x if x is None or x.dim() == 1 else x[:, begin:end]

            pair = initial_state if normalize else (initial_state, None)
            state = tuple(x if x is None else x[n:n + 1] for x in pair or (None, None))
            o, h, z = recurrence(part(q), part(k), part(v), part(g), part(gv), scale, state if normalize else state[0],
                                 None, feature_map, normalize)
            rows.append(o)
            states.append((h, z))
        return torch.cat(rows, 1), torch.cat([h for h, _ in states]), torch.cat([z for _, z in states])
    q, k, v, g, gv = (x if x is None else x.double() for x in (q, k, v, g, gv))
    h0, z0 = initial_state if normalize and initial_state is not None else (initial_state, None)
    q, k = MAPS[feature_map](q), MAPS[feature_map](k)
    (batch, length, heads, key_dim), groups, value_dim = q.shape, k.shape[2], v.shape[3]
    h = q.new_zeros(batch, groups, key_dim, value_dim) if h0 is None else h0.double()
    z = q.new_zeros(batch, groups, key_dim) if z0 is None else z0.double()
    outputs = []
    for t in range(length):
        if g is not None:
            gate = g.exp()
            gate = gate[None, :, None] if g.dim() == 1 else gate[:, t] if g.dim() == 4 else gate[:, t, :, None]
            h = h * gate[..., None]
        if gv is not None:
            h = h * gv[:, t].exp()[:, :, None, :]
        h = h + k[:, t, :, :, None] * v[:, t, :, None, :]
        z = z + k[:, t]
        query = q[:, t].reshape(batch, groups, heads // groups, key_dim)
        o = torch.einsum("bgrk,bgkv->bgrv", query, h)
        if normalize:
            o = o / (torch.einsum("bgrk,bgk->bgr", query, z)[..., None] + 1e-10)
        else:
            o = o * (key_dim**-0.5 if scale is None else scale)
        outputs.append(o.reshape(batch, heads, value_dim))
    empty = q.new_empty(batch, 0, heads, value_dim)
    return torch.stack(outputs, 1) if outputs else empty, h, z


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over RMS of what is expected; infinite for other shapes."""
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
