"""AdaptiveHeads over all layers: the rule in NumPy, the bytes of equal heads, and one pool that is written in place."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from policies.test_adaptive import PROMPTS, QUESTIONS, keydiff_scores
from support.compiled import compiled_programs
from support.decode_memory import decode_memory

import kvjax
from kvjax.cache.cache import Cache, next_layer
from kvjax.cache.layout import Layout
from kvjax.cache.pool import keys_and_values
from kvjax.cache.quantisation import Storage
from kvjax.engine.engine import Engine
from kvjax.errors import DoesNotFit, UsageError
from kvjax.model.decoder import abstract_decoder
from kvjax.policies import AdaptiveHeads, KeyDiff, KVzip, Merged, PyramidKV, RoundAttention, ThinK, format_policy, parse
from kvjax.policies.base import Step
from kvjax.policies.empty_cache import empty_cache
from kvjax.runtime.choice_of_all_layers import compress_together
from kvjax.runtime.programs import PREFILL_FRESH
from kvjax.sharding.compile import OneDevice

LAYERS, HEADS, DIM, BUDGET = 3, 2, 8, 10
MODEL_SCOPE = "adaptive:ratio=0.25,floor=0.1,scope=model,inner=keydiff"


# --- the rule -----------------------------------------------------------------------------------------------------


class Oracle:
    """A row of the whole model: tokens by number, and which of them each head of each layer keeps.

    KVzip's authors sort the scores of all layers and heads together and take the highest ratio of them; the floor is
    Ada-KV's.
    """

    def __init__(self, k: np.ndarray, floor: float):
        self.k, self.floor, self.seen = k.astype(np.float64), floor, 0  # [L, H, T, D]
        self.kept: dict[tuple[int, int], list[int]] = {where: [] for where in np.ndindex(k.shape[:2])}

    def read(self, count: int) -> None:
        candidates = {at: own + list(range(self.seen, self.seen + count)) for at, own in self.kept.items()}
        self.seen += count
        budget = BUDGET * len(candidates)
        if count == 0 or sum(map(len, candidates.values())) <= budget:
            self.kept = candidates
            return
        scores = {at: keydiff_scores(self.k[at][own]) for at, own in candidates.items()}
        least = max(int(self.floor * BUDGET + 1e-9), 1)
        kept = {at: np.argsort(own, kind="stable")[::-1][:least].tolist() for at, own in scores.items()}
        others = [(own[i], at, i) for at, own in scores.items() for i in range(len(own)) if i not in kept[at]]
        for _, at, i in sorted(others, reverse=True)[: max(budget - sum(map(len, kept.values())), 0)]:
            kept[at].append(i)
        self.kept = {at: [candidates[at][i] for i in sorted(some)] for at, some in kept.items()}

    def decode(self, count: int) -> None:
        self.kept = {at: own + list(range(self.seen, self.seen + count)) for at, own in self.kept.items()}
        self.seen += count


CONFIG = toys.tiny_config(num_layers=LAYERS, num_kv_heads=HEADS, num_heads=2 * HEADS, head_dim=DIM)


@functools.partial(jax.jit, static_argnames=("fresh",))
def _read(cache: Cache, k: Any, v: Any, count: Any, fresh: bool) -> Cache:
    pool, seen = cache.layers[0], cache.seen
    model = [CONFIG] * LAYERS, [0] * LAYERS
    given = cache.by_layer(), list(zip(k, v, strict=True)), [None] * LAYERS, (seen, count, count, seen + count)
    pool = compress_together(cache.policy, *model, pool, *given, pool.pages, fresh=fresh)
    return cache.replace(layers=(pool,), seen=seen + count)


@jax.jit
def _decode(cache: Cache, k: Any, v: Any) -> Cache:
    def step(cache: Cache, token: Any) -> tuple[Cache, None]:
        done: list[Any] = []
        for layer, own in enumerate(cache.by_layer()):
            now = Step(cache.seen, jnp.ones(cache.batch, bool), config=CONFIG)
            done.append(cache.policy.append(layer, next_layer(own, done), token[0][layer], token[1][layer], now))
        return cache.with_layers(done).replace(seen=cache.seen + 1), None

    return jax.lax.scan(step, cache, tuple(jnp.moveaxis(x, 3, 0) for x in (k, v)))[0]


def play(events: list[tuple[str, Any]], floor: float, storage: str = "model", seed: int = 0) -> tuple[Cache, Any]:
    """Random keys through prompts, decoding and later turns; the cache, and the keys [B, L, H, T, D]."""
    batch = len(events[0][1])
    tokens = sum(max(amount) if kind == "read" else amount for kind, amount in events)
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal((LAYERS, batch, HEADS, tokens, DIM)).astype(np.float32) for _ in range(2))
    k *= rng.uniform(0.2, 2.0, (LAYERS, 1, HEADS, 1, 1)).astype(np.float32)
    k += 2 * rng.standard_normal((LAYERS, 1, HEADS, 1, DIM)).astype(np.float32)  # so that heads' scores differ
    policy = AdaptiveHeads(budget=BUDGET, inner=KeyDiff(), floor=floor, scope="model")
    cache = empty_cache(CONFIG, policy, batch, 128, 64, jnp.float32, Storage(storage))
    for kind, amount in events:
        seen = np.asarray(cache.seen)
        width = -(-max(amount) // 64) * 64 if kind == "read" else amount
        own = [np.concatenate([x, np.full_like(x, 9.0)], axis=3) for x in (k, v)]
        new = [np.stack([x[:, b, :, s : s + width] for b, s in enumerate(seen)], axis=1) for x in own]
        if kind == "read":
            cache = _read(cache, *new, jnp.asarray(amount, jnp.int32), fresh=not seen.any())
        else:
            cache = _decode(cache, *new)
    return cache, k.swapaxes(0, 1)


def kept_tokens(cache: Cache, k: np.ndarray, row: int) -> dict[tuple[int, int], list[int]]:
    found = {}
    for layer, view in enumerate(cache.by_layer()):
        stored = np.asarray(keys_and_values(view)[0])[row]
        for head, length in enumerate(np.asarray(view.length)[row]):
            numbers = {k[row, layer, head, t].tobytes(): t for t in range(k.shape[3])}
            found[layer, head] = [numbers[slot.tobytes()] for slot in stored[head, :length]]
    return found


EVENTS = [("read", [1, 9, BUDGET, 11, 90]), ("decode", 7), ("read", [30, 12, 0, 1, 5]), ("decode", 3)]


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_the_highest_scores_of_the_whole_model_stay(floor):
    cache, k = play(EVENTS, floor)
    for row in range(k.shape[0]):
        oracle = Oracle(k[row], floor)
        for kind, amount in EVENTS:
            oracle.read(amount[row]) if kind == "read" else oracle.decode(amount)
        assert kept_tokens(cache, k, row) == oracle.kept, row
    lengths = np.concatenate(cache.lengths, axis=1)
    assert (np.ptp(lengths, axis=1)[[0, 3, 4]] > 0).all() == (floor < 1), "heads differ"


@pytest.mark.slow
def test_int8_rows_hold_the_same_tokens():
    small, _ = play(EVENTS[:1], 0.2, "int8")
    exact, _ = play(EVENTS[:1], 0.2)
    np.testing.assert_array_equal(small.layers[0].length, exact.layers[0].length)
    for one, other in zip(small.by_layer(), exact.by_layer(), strict=True):
        held = np.arange(keys_and_values(one)[0].shape[2]) < np.asarray(one.length)[..., None]
        for mine, wanted in zip(keys_and_values(one), keys_and_values(other), strict=True):
            off = np.abs(np.where(held[..., None], mine - wanted, 0))
            assert off.max() < 0.06 * np.abs(np.where(held[..., None], wanted, 0)).max()
    assert exact.nbytes > 2 * small.nbytes


# --- in generation ------------------------------------------------------------------------------------------------

OPTIONS = {"max_new_tokens": 12, "logprobs": True}


def assert_as(found: Any, wanted: Any) -> None:
    assert found.tokens == wanted.tokens
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=2e-5)


@pytest.mark.slow
def test_a_floor_of_one_and_a_single_layer_are_the_layers_scope():
    lm, one = toys.tiny_model(), toys.tiny_model(num_layers=1)
    for model, options in ((lm, "floor=1"), (one, "floor=0.1")):
        policy = f"adaptive:ratio=0.25,inner=keydiff,{options},scope="
        found, wanted = (
            kvjax.generate(model, PROMPTS[0], policy=policy + scope, **OPTIONS) for scope in ("model", "layer")
        )
        assert_as(found, wanted)
        assert found.stats.retained == wanted.stats.retained
        assert found.stats.cache_bytes == wanted.stats.cache_bytes
    inner = kvjax.generate(lm, PROMPTS[0], policy="keydiff:ratio=0.25", **OPTIONS)
    found = kvjax.generate(lm, PROMPTS[0], policy=MODEL_SCOPE.replace("floor=0.1", "floor=1"), **OPTIONS)
    assert_as(found, inner)


@pytest.mark.slow
def test_rows_choose_for_themselves_and_go_on_together_or_from_disk(tmp_path):
    """A row of a batch is the row alone; rows of other sizes join for a later turn, and one is saved before it."""
    lm = toys.tiny_model()
    together = kvjax.generate(lm, PROMPTS, policy=MODEL_SCOPE, **OPTIONS)
    assert len({output.stats.retained for output in together}) == len(PROMPTS)
    alone = [kvjax.generate(lm, one, policy=MODEL_SCOPE, **OPTIONS) for one in PROMPTS]
    for found, wanted in zip(together, alone, strict=True):
        assert_as(found, wanted)
        assert found.stats.retained == wanted.stats.retained
    turns = kvjax.generate(lm, QUESTIONS, cache=[output.cache for output in alone], **OPTIONS)
    for i, (question, found) in enumerate(zip(QUESTIONS, turns, strict=True)):
        cache = alone[i].cache
        if i == 0:
            kvjax.save_cache(tmp_path / "saved", cache, lm)
            cache = kvjax.load_cache(tmp_path / "saved", lm)
        assert_as(found, kvjax.generate(lm, question, cache=cache, **OPTIONS))


@pytest.mark.slow
def test_repeated_prompts_in_int8_and_another_page_size(tmp_path):
    lm, storage = toys.tiny_model(), Storage("int8", layout=Layout("columns", 8))
    policy = AdaptiveHeads(ratio=0.25, inner=KVzip(chunk=64), scope="model")
    first = kvjax.generate(lm, PROMPTS[0], policy=policy, storage=storage, **OPTIONS)
    assert first.stats.repeated_tokens > len(PROMPTS[0]) and len(set(first.stats.retained)) > 1
    kvjax.save_cache(tmp_path / "saved", first.cache, lm)
    found, wanted = (
        kvjax.generate(lm, QUESTIONS[0], cache=cache, **OPTIONS)
        for cache in (kvjax.load_cache(tmp_path / "saved", lm), first.cache)
    )
    assert_as(found, wanted)


@pytest.mark.parametrize("storage", ["model", "int8"])
def test_the_bytes_are_those_asked_for_and_planned(storage):
    lm, tokens = toys.tiny_model(max_position=1024), 700
    given: dict[str, Any] = {"storage": storage, "max_new_tokens": 1}
    prompt = [i * 7 % 97 for i in range(tokens)]
    equal = kvjax.plan(lm, prompt_tokens=tokens, policy="keydiff:ratio=0.25", **given)
    found = kvjax.generate(lm, prompt, policy=MODEL_SCOPE, **given)
    heads = lm.config.num_layers * lm.config.num_kv_heads
    a_page = found.cache.page_size * found.cache.pools[0].slot_nbytes
    assert found.stats.cache_bytes <= 1.06 * equal.cache_bytes + heads * (a_page + 4)
    plan = kvjax.plan(lm, prompt_tokens=tokens, policy=MODEL_SCOPE, **given)
    assert plan.cache_bytes == found.stats.cache_bytes
    assert len(plan.capacities) == lm.config.num_layers and plan.retained == equal.retained
    assert found.stats.live_cache_bytes == found.cache.live_nbytes
    assert sum(map(sum, found.stats.retained)) == sum(map(sum, plan.retained))


@pytest.mark.slow
def test_a_plan_counts_the_prompt_in_every_layer():
    """Between what the layers hold whole and a quarter more than XLA's own figure; what does not fit is refused."""
    sizes = {"num_layers": 4, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "max_position": 1 << 13}
    config, tokens = toys.tiny_config(**sizes), 4096
    policy = parse(MODEL_SCOPE)
    plan = kvjax.plan(config, prompt_tokens=tokens, policy=policy)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    lowered = PREFILL_FRESH.lower(
        OneDevice(config, policy), abstract_decoder(config), ints(1, tokens), ints(1), ints(1),
        prompt_capacity=tokens, new_capacity=256, dtype=jnp.dtype("float32"), storage=Storage(),
    )  # fmt: skip
    actual = lowered.compile().memory_analysis().temp_size_in_bytes
    assert 0.9 * actual <= plan.prefill_peak_bytes <= 1.4 * actual, (actual, plan.prefill_peak_bytes)
    layer = kvjax.plan(config, prompt_tokens=tokens, policy=MODEL_SCOPE.replace("model", "layer"))
    limit = layer.total_bytes + 1000
    with pytest.raises(DoesNotFit):
        kvjax.plan(config, prompt_tokens=tokens, policy=policy, memory_limit=limit)


@pytest.mark.parametrize("storage", ["model", "int8"])
def test_a_decode_step_writes_the_pool_in_place(storage):
    config, policy = toys.tiny_config(num_layers=4, max_position=1 << 16), parse(MODEL_SCOPE)
    found, pool = decode_memory(config, policy, 2048, storage)
    assert found.alias_size_in_bytes >= pool
    # Of an int8 pool the scales of values are no part of what is donated, as in any pool.
    assert found.temp_size_in_bytes < 0.9 * pool, (found.temp_size_in_bytes, pool)


@pytest.mark.slow
def test_prompts_of_a_bucket_share_their_programs_whatever_they_choose():
    lm = toys.tiny_model()
    with compiled_programs() as programs:
        for seed, count in ((1, 200), (2, 230), (3, 256)):
            prompt = np.random.default_rng(seed).integers(0, 97, count).tolist()
            kvjax.generate(lm, prompt, policy=MODEL_SCOPE, max_new_tokens=4)
    assert programs["prefill_fresh"] == programs["decode_chunk"] == 1, programs


@pytest.mark.slow
def test_an_engine_answers_as_alone():
    lm, lengths = toys.tiny_model(), (70, 9, 200, 40)
    prompts = [np.random.default_rng(n).integers(0, 97, n).tolist() for n in lengths]
    with Engine(lm, MODEL_SCOPE, slots=2, prompt_tokens=256, new_tokens=48, max_pause=0.0) as engine:
        handles = [engine.submit(prompt, chat=False, max_new_tokens=30, logprobs=True) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            found = handle.result(120)
            wanted = kvjax.generate(lm, prompt, policy=MODEL_SCOPE, max_new_tokens=30, logprobs=True)
            assert found.tokens == wanted.tokens and found.stats.retained == wanted.stats.retained
            np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)


def test_text_and_refusals():
    policy = AdaptiveHeads(ratio=0.25, inner=PyramidKV(), scope="model")
    assert parse(format_policy(policy)) == policy
    with pytest.raises(UsageError, match="scope is 'all'; give 'layer' or 'model'"):
        AdaptiveHeads(scope="all")  # pyright: ignore[reportArgumentType]
    for compose in (
        lambda: Merged(inner=dataclasses.replace(AdaptiveHeads(inner=KeyDiff()), scope="model")),
        lambda: ThinK(channels=0.5, inner=policy),
        lambda: RoundAttention(watershed=1, inner=AdaptiveHeads(inner=KeyDiff(), scope="model")),
        lambda: kvjax.Razor(heads=((0, 1),), inner=AdaptiveHeads(inner=KeyDiff(), scope="model")),
    ):
        with pytest.raises(UsageError, match='give its inner policy scope="layer"'):
            compose()
    with pytest.raises(UsageError, match=r'share no budget with the others; use scope="layer"\.'):
        kvjax.plan(toys.tiny_config(windows=(None, 16)), prompt_tokens=40, policy=policy)
