"""What plans count for prefill on a TPU, against the peaks that its compiler found (libtpu 0.0.50, v5e)."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from toys import tiny_config

from kvjax.chips import chip
from kvjax.policies import parse
from kvjax.runtime.prefill_peak import prefill_peak_bytes

#: An 8B model's channels, with the KV heads that one device of a mesh of 2 x 8 has of it: all where they share slots.
CHANNELS = {"hidden_size": 4096, "head_dim": 128, "intermediate_size": 14336, "max_position": 65536}


@pytest.mark.parametrize(
    ("policy", "layers", "heads", "found"),
    [
        ("adaptive:ratio=0.25,inner=snapkv", 16, 8, 5.683 - 1.057 - 0.625),  # peak, less weights and cache
        ("keydiff:ratio=0.25", 16, 1, 4.200 - 1.057 - 0.516),
        ("kvzip:ratio=0.25", 4, 1, 3.599 - 0.448 - 0.130),
        ("kvzip:ratio=0.25", 16, 1, 6.099 - 1.057 - 0.520),
        ("kvzip:ratio=0.25", 32, 1, 9.432 - 1.870 - 1.039),
    ],
)
def test_plans_are_what_the_compiler_found(policy, layers, heads, found):
    """8 rows of 32,768 tokens on each device; GiB."""
    config = tiny_config(num_layers=layers, num_heads=4 * heads, num_kv_heads=heads, **CHANNELS)
    with chip("v5e").compiled_for():
        planned = prefill_peak_bytes(config, parse(policy), 8, 32768, jnp.dtype("bfloat16"), 1792)
    assert planned / 2**30 == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize(
    ("rows", "tokens", "found"),
    [(1, 4096, 0.247), (1, 32768, 0.824), (4, 4096, 0.480), (8, 2048, 0.512), (8, 8192, 1.704), (8, 32768, 5.849)],
)
def test_plans_of_prompts_that_are_repeated_layer_by_layer_are_near_what_it_found(rows, tokens, found):
    """One layer of an 8B model on one device (libtpu 0.0.42): its peak less weights and cache, GiB."""
    config = tiny_config(num_layers=32, num_heads=32, num_kv_heads=8, **CHANNELS)
    given = config, parse("kvzip:ratio=0.25"), rows, tokens, jnp.dtype("bfloat16"), 14336
    with chip("v5e").compiled_for():
        layer, all_layers = (prefill_peak_bytes(*given, by_layers=by_layers) for by_layers in (True, False))
    assert 0.85 * found <= layer / 2**30 <= 1.5 * found
    assert all_layers > 3 * layer
