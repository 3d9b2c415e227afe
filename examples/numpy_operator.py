"""The operator from NumPy: a sequence in, outputs and the state after it out; then one token more; then gradients."""

import numpy as np

import flashgla

random = np.random.default_rng(0)
q, k, v = (random.standard_normal((1, 100, 2, width), dtype=np.float32) for width in (32, 32, 64))
g = -np.abs(random.standard_normal(k.shape, dtype=np.float32)) / 16  # log gates, natural, at most 0

o, state = flashgla.gated_linear_attention(q, k, v, g, output_final_state=True)
print("outputs", o.shape, "state", state.shape)

o_next = flashgla.step(q[:, 0], k[:, 0], v[:, 0], state, g[:, 0])  # one token; the state is updated in place
print("one more token", o_next.shape)

gradients = flashgla.gated_linear_attention_backward(np.ones_like(o), q, k, v, g)
print("gradients", gradients.dq.shape, gradients.dk.shape, gradients.dv.shape, gradients.dg.shape)

same, _ = flashgla.gated_linear_attention(*(np.concatenate([x, x[:, :1]], axis=1) for x in (q, k, v, g)))
np.testing.assert_allclose(same[:, -1], o_next, rtol=1e-4, atol=1e-5)
