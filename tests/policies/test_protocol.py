"""A policy from elsewhere: what the protocol must carry, shown by policies written here against its text alone.

Per-step eviction by attention, merging into a slot that stands for many tokens, and capacities that differ by layer
and by head: none of it needs a change in kvjax.
"""

from __future__ import annotations

import dataclasses
import fractions
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import kvjax
from kvjax.cache.packing import pack
from kvjax.cache.pool import LayerCache, append_token, write
from kvjax.errors import UsageError
from kvjax.policies import Policy, PromptChunk, Signals, Step
from kvjax.policies.base import floor_fraction, gather_candidates, keep_all, keep_where
from kvjax.runtime.compilation import compile_clock


@dataclasses.dataclass(frozen=True)
class HeavyHitters(Policy):
    """Evict, at every step, the slot with the least attention so far, the new token's own row counted (H2O's rule)."""

    budget: int = 24

    grows: ClassVar[bool] = False

    @property
    def signals(self) -> Signals:
        return Signals(decode_logits=True)

    def capacities(self, config, prompt, new):
        return ((self.budget + 1,) * config.num_kv_heads,) * config.num_layers

    def init_state(self, config, layer, batch, slots):
        return jnp.zeros((batch, config.num_kv_heads, -(-max(slots) // 32) * 32), jnp.float32)

    def compress(self, layer: int, cache: LayerCache, k, v, chunk: PromptChunk) -> LayerCache:
        candidates = gather_candidates(cache, k, v, chunk)
        place = jnp.arange(candidates.k.shape[2])
        recent = place >= candidates.length[..., None] - self.budget
        kept = keep_where(cache, candidates, recent & (place < candidates.length[..., None]), chunk)
        return kept.replace(state=jnp.zeros_like(cache.state))

    def observe(self, layer: int, cache: LayerCache, logits, step: Step) -> LayerCache:
        batch, heads = cache.length.shape
        by_slot = logits.reshape(batch, heads, -1, *logits.shape[2:]).swapaxes(2, 3)
        by_slot = by_slot.reshape(batch, heads, by_slot.shape[2], -1)
        mass = jnp.where(step.active[:, None, None], jax.nn.softmax(by_slot, axis=-1).sum(axis=2), 0.0)
        score = cache.state + mass
        slot = jnp.arange(score.shape[-1])
        candidates = jnp.where(slot < cache.length[..., None], score, jnp.inf)
        worst = candidates.argmin(axis=-1).astype(jnp.int32)
        full = cache.length > self.budget
        # The slot written next is the loser's; its score starts anew.
        following = jnp.where(full, worst, cache.length)
        score = jnp.where(slot == following[..., None], 0.0, score)
        return cache.replace(state=score, next=following)


@dataclasses.dataclass(frozen=True)
class MergeOldest(Policy):
    """Sink-less ring whose leaving token joins a running mean in slot 0, weighted by how many it stands for."""

    window: int = 8

    grows: ClassVar[bool] = False
    merges: ClassVar[bool] = True

    def capacities(self, config, prompt, new):
        return ((self.window + 1,) * config.num_kv_heads,) * config.num_layers

    def init_state(self, config, layer, batch, slots) -> Any:
        zeros = jnp.zeros((batch, config.num_kv_heads, config.head_dim), jnp.float32)
        return {"k": zeros, "v": zeros, "count": jnp.zeros((batch,), jnp.float32), "at": jnp.zeros((batch,), jnp.int32)}

    def compress(self, layer, cache, k, v, chunk):
        # Token by token: slow and plain, as an independent reading of the decode rule.
        cache = cache.replace(length=jnp.maximum(cache.length, 1), log_mass=jnp.full_like(cache.log_mass, -1e9))

        def body(t, cache):
            step = Step(chunk.seen + t, t < chunk.count, config=chunk.config)
            return self.append(layer, cache, k[:, :, t], v[:, :, t], step)

        return jax.lax.fori_loop(0, k.shape[2], body, cache)

    def append(self, layer, cache, k, v, step):
        state, active = cache.state, step.active
        slot = jnp.broadcast_to((1 + state["at"] % self.window)[:, None], cache.length.shape)
        leaving = active & (state["at"] >= self.window)
        page, column = slot // 32, slot % 32
        pages = jnp.asarray(cache.starts)[None] + page
        rows = jnp.arange(k.shape[0])[:, None]
        old_k, old_v = cache.kv.k[rows, pages, :, column], cache.kv.v[rows, pages, column]
        count = state["count"] + leaving
        weight = jnp.where(leaving, 1 / jnp.maximum(count, 1), 0.0)[:, None, None]
        mean_k, mean_v = (m + weight * (o - m) for m, o in ((state["k"], old_k), (state["v"], old_v)))
        cache = append_token(cache.replace(next=slot), k, v, active)
        zero = jnp.zeros((*slot.shape, 1), jnp.int32)
        cache = write(cache, mean_k[:, :, None], mean_v[:, :, None], zero, active[:, None, None])
        mass = jnp.where(count > 0, jnp.log(jnp.maximum(count, 1)), -1e9)
        new = {"k": mean_k, "v": mean_v, "count": count, "at": state["at"] + active}
        return cache.replace(state=new, log_mass=jnp.broadcast_to(mass[:, None], cache.log_mass.shape))


@dataclasses.dataclass(frozen=True)
class Pyramid(Policy):
    """The most recent tokens, fewer in later layers and in odd heads; decoded tokens all stay."""

    budget: int = 80

    def _keeps(self, config, layer: int, head: int) -> int:
        return max(self.budget - 30 * layer - 20 * (head % 2), 4)

    def capacities(self, config, prompt, new):
        return tuple(
            tuple(self._keeps(config, layer, head) + new for head in range(config.num_kv_heads))
            for layer in range(config.num_layers)
        )

    def compress(self, layer, cache, k, v, chunk):
        candidates = gather_candidates(cache, k, v, chunk)
        budget = jnp.asarray([self._keeps(chunk.config, layer, head) for head in range(k.shape[1])])
        place = jnp.arange(candidates.k.shape[2])
        recent = place >= candidates.length[..., None] - budget[:, None]
        return keep_where(cache, candidates, recent & (place < candidates.length[..., None]), chunk)


PROMPT = "a prompt of some length, so that every policy here has something to drop: " * 3


@pytest.mark.parametrize(
    "policy",
    [HeavyHitters(), MergeOldest(), pytest.param(Pyramid(), marks=pytest.mark.slow)],
    ids=lambda p: type(p).__name__,
)
def test_runs_in_the_compiled_loop_and_a_row_equals_itself_alone(policy):
    lm = toys.tiny_model()
    prompts = [PROMPT, "short", PROMPT[:100]]
    together = kvjax.generate(lm, prompts, policy=policy, chat=False, max_new_tokens=40, stop_token_ids=())
    for prompt, output in zip(prompts, together, strict=True):
        alone = kvjax.generate(lm, prompt, policy=policy, chat=False, max_new_tokens=40)
        assert alone.tokens == output.tokens
        assert alone.stats.retained == output.stats.retained
    assert together[0].stats.cache_bytes < together[0].stats.full_cache_bytes or isinstance(policy, Pyramid)


def test_ragged_capacities_are_what_is_allocated():
    lm = toys.tiny_model()
    output = kvjax.generate(lm, PROMPT, policy=Pyramid(), chat=False, max_new_tokens=4)
    slots = [layer.slots for layer in output.cache.layers]
    assert slots == [(352, 320), (320, 288)]
    assert [len(set(heads)) for heads in slots] == [2, 2]
    assert output.stats.retained == ((83, 63), (53, 33))


def test_a_bounded_policy_decodes_far_beyond_its_budget_without_compiling_again():
    lm = toys.tiny_model()
    kvjax.generate(lm, PROMPT, policy=HeavyHitters(), chat=False, max_new_tokens=8)
    with compile_clock() as clock:
        output = kvjax.generate(lm, PROMPT, policy=HeavyHitters(), chat=False, max_new_tokens=100)
    assert len(output.tokens) == 100 and clock.programs == 0
    assert output.stats.retained == ((25, 25), (25, 25))


def test_merging_is_the_running_mean_of_what_left():
    rng = np.random.default_rng(0)
    from support.driver import Driver, config_for

    k, v = rng.standard_normal((2, 1, 2, 60, 4)).astype(np.float32)
    driver = Driver(MergeOldest(), config_for(2, 4), 1, prompt_capacity=64, new_capacity=8)
    driver.read(k[:, :, :30], v[:, :, :30], 30).decode(k[:, :, 30:], v[:, :, 30:])
    np.testing.assert_allclose(driver.cache.kv.k[0, np.array([0, 1]), :, 0], k[0, :, :52].mean(axis=1), atol=1e-6)
    np.testing.assert_allclose(driver.cache.kv.v[0, np.array([0, 1]), 0], v[0, :, :52].mean(axis=1), atol=1e-6)
    np.testing.assert_allclose(driver.cache.log_mass, np.log(52), atol=1e-6)


def test_capacities_of_the_wrong_shape_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Wrong(Policy):
        def capacities(self, config, prompt, new):
            return ((prompt,),)

    with pytest.raises(UsageError, match="2 layers a tuple of 2"):
        kvjax.generate(toys.tiny_model(), "x", policy=Wrong(), max_new_tokens=1)


@pytest.mark.parametrize("ratio", [0.297, 0.371, 1 / 3, 0.3, 0.999, 1e-6, 1.0])
def test_a_fraction_of_tokens_is_exact_and_compiled_programs_agree(ratio):
    """Slots are allocated by the host's number and filled by the compiled one."""
    tokens = np.concatenate([np.arange(1, 10_000), np.arange(1_000_000, 1_001_000)])
    exact = [int(fractions.Fraction(ratio).limit_denominator(10**6) * int(n)) for n in tokens]
    np.testing.assert_array_equal(floor_fraction(ratio, tokens), exact)
    np.testing.assert_array_equal(jax.jit(functools.partial(floor_fraction, ratio))(jnp.asarray(tokens)), exact)


def test_keeping_everything_is_the_full_cache():
    @dataclasses.dataclass(frozen=True)
    class All(Policy):
        def compress(self, layer, cache, k, v, chunk):
            candidates = gather_candidates(cache, k, v, chunk)
            keep = jnp.arange(candidates.k.shape[2]) < candidates.length[..., None]
            kept = keep_where(cache, candidates, keep, chunk)
            whole = keep_all(cache, candidates, chunk)
            assert pack is not None
            return jax.tree.map(lambda a, b: jnp.where(jnp.ones_like(a, bool), a, b), kept, whole)

    lm = toys.tiny_model()
    outputs = [kvjax.generate(lm, PROMPT, policy=p, chat=False, max_new_tokens=20) for p in (All(), None)]
    assert outputs[0].tokens == outputs[1].tokens
