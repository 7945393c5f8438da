"""Attention and what policies make of its scores, some rows at a time as on a TPU, and all at once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from kvjax.cache.groups import parts, with_parts
from kvjax.cache.layout import Layout
from kvjax.cache.quantisation import Storage
from kvjax.errors import UsageError
from kvjax.model.alibi import slopes
from kvjax.policies import H2O, TOVA, AdaptiveHeads, AhaKV, RazorAttention
from kvjax.policies.base import Policy, PromptChunk, Signals, Step
from kvjax.policies.page_capacities import page_capacities
from kvjax.policies.signals import Mass, PromptSignals
from kvjax.runtime import decode_attention

ROWS, HEADS, GROUP, DIM, TOKENS, STEPS = 4, 2, 3, 8, 40, 6
PLAIN = toys.tiny_config(num_heads=HEADS * GROUP, num_kv_heads=HEADS, head_dim=DIM, num_layers=1)
ALIBI = dataclasses.replace(PLAIN, positional="alibi")
EVICTING = (
    H2O(budget=12),
    TOVA(budget=12),
    AhaKV(budget=12, recent=3),
    AdaptiveHeads(budget=12, inner=AhaKV(recent=3)),
)
STACKED = Storage(layout=Layout("stacked", 16))


def decoded(policy, config, storage, pieces, monkeypatch):
    """The layer and every step's attention, after a prompt and some steps in which one row does not take part."""
    monkeypatch.setattr(decode_attention, "_pieces", lambda *_: pieces)
    rng = np.random.default_rng(2)

    def numbers(*shape):
        return jnp.asarray(rng.standard_normal(shape).astype(np.float32))

    pages = page_capacities(policy, config, TOKENS, STEPS, storage.layout.page_size if storage.layout else 32)[0]
    layer = policy.init_layer(config, 0, ROWS, pages, jnp.float32, storage)
    count = jnp.asarray([TOKENS, 7, 30, 21], jnp.int32)
    mass = Mass(None, jnp.abs(numbers(ROWS, HEADS, GROUP, TOKENS)))
    chunk = PromptChunk(0 * count, count, count, pages, config, True, PromptSignals(window=mass, columns=mass))
    layer = policy.compress(0, layer, numbers(ROWS, HEADS, TOKENS, DIM), numbers(ROWS, HEADS, TOKENS, DIM), chunk)
    active = jnp.asarray([True, True, False, True])

    @jax.jit
    def step(layer, seen, k, v, q):
        now = Step(seen, active, config=config)
        layer = policy.append(0, layer, k, v, now)
        bias = slopes(config) if config.positional == "alibi" else None
        out, layer = decode_attention.attend(policy, 0, layer, q, now, scale=DIM**-0.5, slopes=bias)
        return out, layer, seen + active

    outs, seen = [], count
    for _ in range(STEPS):
        k, v = numbers(2, ROWS, HEADS, DIM)
        out, layer, seen = step(layer, seen, k, v, numbers(ROWS, HEADS, GROUP, DIM))
        outs.append(out)
    return jnp.stack(outs), layer


@pytest.mark.parametrize("storage", [Storage(), STACKED, Storage("int8", layout=STACKED.layout)], ids=str)
@pytest.mark.parametrize(
    ("policy", "config"),
    [
        *((policy, config) for policy in EVICTING for config in (PLAIN, ALIBI)),
        (RazorAttention(heads=((0, 1),), inner=H2O(ratio=0.3)), PLAIN),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Policy) else x.positional,
)
def test_rows_in_turns_are_what_all_rows_are(policy, config, storage, monkeypatch):
    whole, layer = decoded(policy, config, storage, 1, monkeypatch)
    for pieces in (2, ROWS):
        parted, other = decoded(policy, config, storage, pieces, monkeypatch)
        np.testing.assert_allclose(np.asarray(parted), np.asarray(whole), atol=1e-5)
        for x, y in zip(jax.tree.leaves(other), jax.tree.leaves(layer), strict=True):
            np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=1e-5)


@pytest.mark.parametrize("policy", EVICTING, ids=str)
def test_an_accelerators_form_chooses_as_a_cpus(policy, monkeypatch):
    results = {}
    for page_size in (16, 32):
        for kind in ("columns", "stacked"):
            storage = Storage(layout=Layout(kind, page_size))
            results[kind, page_size] = decoded(policy, PLAIN, storage, 1, monkeypatch)
        (wanted, one), (got, other) = results["columns", page_size], results["stacked", page_size]
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), atol=1e-5)
        assert (one.next == other.next).all() and (one.length == other.length).all()
        for name, mark in one.marks.items():
            np.testing.assert_allclose(np.asarray(other.marks[name]), np.asarray(mark), atol=1e-5)


def test_only_a_tpu_takes_rows_in_turns_and_as_few_turns_as_fit(monkeypatch):
    policy = H2O(budget=1000)
    pages = page_capacities(policy, PLAIN, 2000, STEPS)[0]
    layer = policy.init_layer(PLAIN, 0, ROWS, pages, jnp.float32, Storage())
    q = jnp.zeros((ROWS, HEADS, GROUP, DIM))
    a_row = 4 * GROUP * sum(layer.slots)
    for platform, room, wanted in (
        ("cpu", a_row, 1),
        ("gpu", a_row, 1),
        ("tpu", 4 * a_row, 1),
        ("tpu", 3 * a_row, 2),
        ("tpu", 2 * a_row, 2),
        ("tpu", a_row, 4),
        ("tpu", a_row // 2, 4),
    ):
        monkeypatch.setattr(decode_attention.dispatch, "platform", lambda platform=platform: platform)
        monkeypatch.setattr(decode_attention, "PIECE", room)
        assert decode_attention._pieces(policy, layer, q) == wanted
    assert decode_attention._pieces(Policy(), layer, q) == 1


def test_a_policy_that_writes_keys_while_observing_is_refused(monkeypatch):
    class Writes(H2O):
        def observe(self, layer, cache, logits, step):
            seen = super().observe(layer, cache, logits, step)
            return with_parts(seen, [pool.replace(kv=jax.tree.map(jnp.negative, pool.kv)) for pool in parts(seen)])

    with pytest.raises(UsageError, match=r"Writes\.observe must leave keys and values as they are\."):
        decoded(Writes(budget=12), PLAIN, Storage(), 2, monkeypatch)
    assert Writes(budget=12).signals == Signals(columns=True, decode_logits=True)
