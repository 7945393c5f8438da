"""The forms of experts give the same: by runs, as TPUs do, in blocks of one expert's tokens, and one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from flax import nnx

from kvjax.model.experts import ExpertMLP, Experts


@pytest.mark.parametrize("limit", [None, 0.4])
@pytest.mark.parametrize(("count", "active", "tokens"), [(5, 2, 37), (3, 3, 1), (16, 1, 300), (2, 1, 2)])
def test_every_form_gives_each_choice_its_experts_result(count, active, tokens, limit):
    experts = Experts(count, active, 16, biased=limit is not None, limit=limit, alpha=1.5)
    layer = ExpertMLP(toys.tiny_config(experts=experts), experts, rngs=nnx.Rngs(params=0), dtype=jnp.float32)
    rng = np.random.default_rng(count)
    x = jnp.asarray(rng.standard_normal((tokens, layer.router[...].shape[1])), jnp.float32)
    # One expert has none, another many: chosen apart from what the router says.
    chosen = jnp.asarray(rng.integers(0, max(1, count - 1), (tokens, active)))
    forms = [jax.jit(form)(x, chosen) for form in (layer._by_runs, layer._by_blocks, layer._one_by_one)]
    gate_up, down = np.asarray(layer.gate_up[...]), np.asarray(layer.down[...])
    for place, expert in enumerate(np.asarray(chosen).reshape(-1)):
        inner = np.asarray(x)[place // active] @ gate_up[expert]
        inner = inner if limit is None else inner + np.asarray(layer.gate_up_bias[...])[expert]
        gate, up = inner.reshape(-1, 2, layer.half).swapaxes(0, 1)
        if limit is not None:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
        gate = gate / (1 + np.exp(-gate * (1 if limit is None else 1.5)))
        want = (gate * up).reshape(-1) @ down[expert]
        for found in forms:
            np.testing.assert_allclose(found[place], want, atol=2e-5)
