"""The compensated ring against RazorAttention's algorithm 1 and equations [4, 5], one head at a time in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decode_memory import decode_memory
from support.driver import Driver, config_for, random_kv
from support.oracles import same_caches

import kvjax
from kvjax.cache.attention import decode_attention
from kvjax.cache.pool import keys_and_values, mark_by_head
from kvjax.errors import UsageError
from kvjax.policies.compensated import CompensatedRing
from kvjax.runtime.compilation import compile_clock

# --- the oracle: transcribed from the paper, no code shared with the product ------------------------------------------


class OracleHead:
    """One head: which tokens it holds, and which were dropped; ``buffer_of(N)`` is algorithm 1's line 2."""

    def __init__(self, sink, buffer_of, compensation=True):
        self.sink, self.buffer_of, self.buffer, self.compensation = sink, buffer_of, 0, compensation
        self.sinks, self.recent, self.dropped, self.seen = [], [], [], 0

    def read(self, count: int) -> None:
        """A prompt or a later turn: the buffer follows the tokens seen, and never shrinks."""
        if count:
            self.buffer = max(self.buffer, self.buffer_of(self.seen + count))
        for _ in range(count):
            self._take()
        self._drop()

    def decode(self) -> None:
        self._take()
        self._drop()

    def _take(self) -> None:
        (self.sinks if self.seen < self.sink else self.recent).append(self.seen)
        self.seen += 1

    def _drop(self) -> None:
        while len(self.recent) > self.buffer:
            self.dropped.append(self.recent.pop(0))

    def attend(self, q, k, v, scale) -> np.ndarray:
        """Equation [5], with the means of equation [4]."""
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        kept = self.sinks + self.recent
        weights, values = list(np.exp(k[kept] @ q * scale)), list(v[kept])
        if self.dropped and self.compensation:
            mean_k, mean_v = k[self.dropped].mean(axis=0), v[self.dropped].mean(axis=0)
            weights.append(len(self.dropped) * np.exp(mean_k @ q * scale))
            values.append(mean_v)
        weights = np.asarray(weights)
        return weights @ np.asarray(values) / weights.sum()


def buffer_rule(sink, budget=None, ratio=None, threshold=4000, compression=5.0, length=None, compensation=True):
    def buffer_of(seen: int) -> int:
        if length is not None:
            return length
        if budget is None and ratio is None:
            return max(threshold, int(seen / compression + 1e-9))
        kept = int(ratio * seen + 1e-9) if budget is None else budget
        return max(kept - sink - compensation, 1)

    return buffer_of


SCALE = 0.5


def assert_is(driver: Driver, row: int, head: int, oracle: OracleHead, own: list[int], k, v) -> None:
    """The head holds the oracle's tokens and mean, and attends as [5]; ``own`` are the row's tokens in ``k``."""
    cache, first = driver.cache, int(driver.policy.compensation)
    length = int(cache.length[row, head])
    stored_k, stored_v = (np.asarray(x)[row, head, :length] for x in keys_and_values(cache))
    table = {k[row, head, token].tobytes(): number for number, token in enumerate(own)}
    assert sorted(table[slot.tobytes()] for slot in stored_k[first:]) == oracle.sinks + oracle.recent
    if first:
        mean_k, mean_v = (
            x[row, head][[own[i] for i in oracle.dropped]].astype(np.float64).mean(axis=0)
            if oracle.dropped
            else np.zeros(x.shape[-1])
            for x in (k, v)
        )
        np.testing.assert_allclose(stored_k[0], mean_k, atol=2e-6)
        np.testing.assert_allclose(stored_v[0], mean_v, atol=2e-6)
    assert int(driver.policy.retained(cache)[row, head]) == length - (first and not oracle.dropped)
    q = np.random.default_rng(length).standard_normal(k.shape[-1]).astype(np.float32)
    asked = jnp.broadcast_to(q, (*cache.length.shape, 1, q.size))
    out, _ = decode_attention(asked, cache, scale=SCALE)
    wanted = oracle.attend(q, k[row, head][own], v[row, head][own], SCALE)
    np.testing.assert_allclose(out[row, head, 0], wanted, atol=1e-5)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=2),
    turns=st.lists(st.integers(0, 40), max_size=2),
    policy=st.sampled_from([dict(budget=9), dict(ratio=0.3, compensation=False), dict(threshold=7, compression=3.0)]),
    seed=st.integers(0, 10**6),
)
def test_tokens_means_and_attention_through_prompts_decoding_and_turns(lengths, turns, policy, seed):
    sink, decoded, room = 3, 12, 64 * 3
    k, v = random_kv(seed, 2, 2, 60 + 3 * decoded + 80, 4)
    driver = Driver(
        CompensatedRing(sink=sink, **policy), config_for(2, 4), 2, prompt_capacity=room, new_capacity=decoded
    )
    oracles = [OracleHead(sink, buffer_rule(sink, **policy), policy.get("compensation", True)) for _ in range(2)]
    own: list[list[int]] = [[], []]
    at = 0
    for counts in (lengths, *([turn, max(turn - 5, 0)] for turn in turns)):
        longest = max(counts)
        if longest:
            driver.read(k[:, :, at : at + longest], v[:, :, at : at + longest], counts)
        for row, count in enumerate(counts):
            own[row] += range(at, at + count)
            oracles[row].read(count)
        at += longest
        driver.decode(k[:, :, at : at + decoded], v[:, :, at : at + decoded])
        for row in range(2):
            own[row] += range(at, at + decoded)
            for _ in range(decoded):
                oracles[row].decode()
        at += decoded
    for row in range(2):
        for head in range(2):
            assert_is(driver, row, head, oracles[row], own[row], k, v)


@pytest.mark.slow
def test_every_head_may_have_a_length_of_its_own():
    k, v = random_kv(0, 2, 3, 200, 4)
    policy = CompensatedRing(sink=0, compensation=False, lengths=((5, 70, 33),))
    driver = Driver(policy, config_for(3, 4), 2, prompt_capacity=192, new_capacity=8)
    assert driver.cache.slots == (32, 96, 64)
    driver.read(k[:, :, :120], v[:, :, :120], [120, 40]).decode(k[:, :, 120:160], v[:, :, 120:160])
    driver.read(k[:, :, 160:180], v[:, :, 160:180], [20, 3]).decode(k[:, :, 180:], v[:, :, 180:])
    for row, own in enumerate(([*range(200)], [*range(40), *range(120, 163), *range(180, 200)])):
        for head, length in enumerate((5, 70, 33)):
            oracle = OracleHead(0, buffer_rule(0, length=length), compensation=False)
            for step, count in enumerate((120 if row == 0 else 40, 40, 20 if row == 0 else 3, 20)):
                if step % 2:
                    for _ in range(count):
                        oracle.decode()
                else:
                    oracle.read(count)
            assert_is(driver, row, head, oracle, own, k, v)


# --- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoded", [0, 40])
def test_equal_dropped_tokens_are_represented_exactly(decoded):
    """When all dropped keys are equal, and all dropped values, the output is the full cache's."""
    k, v = random_kv(1, 1, 2, 100, 8)
    k[:, :, 4:90], v[:, :, 4:90] = k[:, :, 4:5], v[:, :, 4:5]
    driver = Driver(CompensatedRing(budget=15), config_for(2, 8), 1, prompt_capacity=128, new_capacity=64)
    driver.read(k[:, :, : 100 - decoded], v[:, :, : 100 - decoded], 100 - decoded)
    if decoded:
        driver.decode(k[:, :, 60:], v[:, :, 60:])
    assert int(driver.cache.length[0, 0]) == 15
    q = np.random.default_rng(0).standard_normal((1, 2, 2, 8)).astype(np.float32)
    out, _ = decode_attention(jnp.asarray(q), driver.cache, scale=1.0)
    weights = np.exp(np.einsum("bhgd,bhtd->bhgt", q.astype(np.float64), k))
    wanted = np.einsum("bhgt,bhtd->bhgd", weights / weights.sum(axis=-1, keepdims=True), v)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


def test_twenty_thousand_merges_keep_the_mean_in_a_bfloat16_cache():
    """What a running mean in the pool's own dtype loses: bfloat16 has no 1 + 1/256."""
    tokens = 20_000
    rng = np.random.default_rng(0)
    k, v = (np.asarray(jnp.asarray(rng.standard_normal((1, 1, tokens, 4)) + 3, jnp.bfloat16)) for _ in range(2))
    config = config_for(1, 4, max_position=32_768)
    driver = Driver(
        CompensatedRing(budget=8, sink=2), config, 1, prompt_capacity=64, new_capacity=8, dtype=jnp.bfloat16
    )
    driver.read(k[:, :, :10], v[:, :, :10], 10).decode(k[:, :, 10:], v[:, :, 10:])
    dropped = slice(2, tokens - 5)
    for mean, x in ((driver.cache.state.mean_k, k), (driver.cache.state.mean_v, v)):
        np.testing.assert_allclose(mean[0, 0], x[0, 0, dropped].astype(np.float64).mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(driver.cache.log_mass, np.log(tokens - 7), rtol=1e-6)


def test_nothing_is_dropped_below_the_papers_defaults():
    policy, config = CompensatedRing(), config_for(1, 4, max_position=50_000)
    total = np.array([1, 4003, 4004, 4005, 20_000, 20_010, 30_000])
    kept = np.asarray(policy.budgets(config, 0, total))[:, 0]
    assert kept.tolist() == [1, 4003, 4004, 4005, 4005, 4007, 6005]


@pytest.mark.parametrize("ratio, seen, kept", [(0.25, 400, 100), (1.0, 64, 64), (0.5, 3, 3), (0.01, 200, 6)])
def test_a_ratio_counts_every_slot_that_is_read(ratio, seen, kept):
    policy, config = CompensatedRing(ratio=ratio), config_for(1, 4)
    k, v = random_kv(1, 1, 1, seen, 4)
    driver = Driver(policy, config, 1, prompt_capacity=448, new_capacity=8).read(k, v, seen)
    assert int(policy.retained(driver.cache)[0, 0]) == kept == int(policy.budgets(config, 0, np.array([seen]))[0, 0])


@pytest.mark.parametrize("read", [3, 31, 32, 33, 90])
def test_a_budget_is_what_a_head_holds_however_long_the_first_prompt_was(read):
    """A prompt of just as many tokens loses nothing: the one that the compensation token stands for is its own mean."""
    policy = CompensatedRing(budget=32)
    k, v = random_kv(read, 1, 2, 170, 4)
    driver = Driver(policy, config_for(2, 4), 1, prompt_capacity=128, new_capacity=64)
    assert driver.cache.slots == (32, 32)  # a page, and no page more for one slot
    driver.read(k[:, :, :read], v[:, :, :read], read)
    assert (
        policy.retained(driver.cache).tolist()
        == [[min(read, 32)] * 2]
        == policy.budgets(driver.config, 0, np.array([read])).tolist()
    )
    oracle = OracleHead(policy.sink, lambda _: 32 if read <= 32 else 32 - policy.sink - 1)
    oracle.read(read)
    q = np.random.default_rng(0).standard_normal((1, 2, 1, 4)).astype(np.float32)
    out, _ = decode_attention(jnp.asarray(q), driver.cache, scale=SCALE)
    for head in range(2):
        np.testing.assert_allclose(
            out[0, head, 0], oracle.attend(q[0, head, 0], k[0, head], v[0, head], SCALE), atol=1e-5
        )
    driver.decode(k[:, :, 90:], v[:, :, 90:])
    assert policy.retained(driver.cache).tolist() == [[32, 32]]


def test_a_row_that_is_done_keeps_everything_bit_for_bit():
    k, v = random_kv(2, 2, 1, 80, 4)
    driver = Driver(CompensatedRing(budget=12), config_for(1, 4), 2, prompt_capacity=64, new_capacity=8)
    driver.read(k[:, :, :30], v[:, :, :30], [30, 20])
    before = jax.tree.map(lambda x: np.asarray(x)[1], driver.cache)
    active = np.zeros((50, 2), bool)
    active[:, 0] = True
    driver.decode(k[:, :, 30:], v[:, :, 30:], active)
    after = jax.tree.map(lambda x: np.asarray(x)[1], driver.cache)
    jax.tree.map(np.testing.assert_array_equal, before, after)


PROMPT = "a prompt of some length, so that every policy here has something to drop: " * 3


@pytest.mark.slow
def test_what_fits_is_the_full_cache():
    lm = toys.tiny_model()
    outputs = [
        kvjax.generate(lm, [PROMPT, "short"], policy=policy, chat=False, max_new_tokens=30, stop_token_ids=())
        for policy in (None, CompensatedRing(), CompensatedRing(compensation=False, budget=400))
    ]
    for row in range(2):
        assert len({output[row].tokens for output in outputs}) == 1
        assert len({output[row].stats.retained for output in outputs}) == 1


@pytest.mark.slow
def test_a_row_equals_itself_alone_over_two_turns():
    lm, policy = toys.tiny_model(), CompensatedRing(budget=40)
    ask = dict(chat=False, max_new_tokens=20, stop_token_ids=())
    prompts, more = [PROMPT, PROMPT[:200]], ["go on", "and then? " * 5]
    together = kvjax.generate(lm, prompts, policy=policy, **ask)
    turn = kvjax.generate(lm, more, cache=[output.cache for output in together], **ask)
    for i in range(2):
        alone = kvjax.generate(lm, prompts[i], policy=policy, **ask)
        assert alone.tokens == together[i].tokens and alone.stats.retained == together[i].stats.retained
        second = kvjax.generate(lm, more[i], cache=alone.cache, **ask)
        assert second.tokens == turn[i].tokens and second.stats.retained == turn[i].stats.retained
        same_caches(second.cache, turn[i].cache)


def test_decoding_three_times_the_buffer_compiles_nothing_and_allocates_nothing():
    lm, policy = toys.tiny_model(), CompensatedRing(budget=40)
    ask = dict(policy=policy, chat=False, stop_token_ids=())
    first = kvjax.generate(lm, PROMPT, max_new_tokens=8, **ask)
    with compile_clock() as clock:
        output = kvjax.generate(lm, PROMPT, max_new_tokens=130, **ask)
    assert len(output.tokens) == 130 and clock.programs == 0
    assert output.stats.cache_bytes == first.stats.cache_bytes
    assert output.stats.retained == ((40, 40), (40, 40))
    planned = kvjax.plan(lm, prompt_tokens=len(PROMPT), max_new_tokens=130, policy=policy)
    assert planned.cache_bytes == output.cache.nbytes


def test_a_decode_step_copies_no_pool():
    """A row is read and two are written each step: the order must be clear to the compiler, or it copies the pools."""
    config = toys.tiny_config(max_position=1 << 14)
    program, size = decode_memory(config, CompensatedRing(budget=4000), 4096)
    assert program.alias_size_in_bytes >= size and program.temp_size_in_bytes < size / 2


def test_positions_are_the_tokens_own():
    """ALiBi's bias reads them; every slot but the compensation token's has its token's."""
    k, v = random_kv(3, 1, 2, 90, 4)
    policy = CompensatedRing(sink=2, compensation=False, budget=20)
    driver = Driver(policy, config_for(2, 4), 1, prompt_capacity=128, new_capacity=8)
    driver.cache = driver.cache.replace(marks={"position": jnp.zeros(driver.cache.kv.shape[:3], jnp.int32)})
    driver.read(k[:, :, :50], v[:, :, :50], 50).decode(k[:, :, 50:70], v[:, :, 50:70])
    driver.read(k[:, :, 70:80], v[:, :, 70:80], 10).decode(k[:, :, 80:], v[:, :, 80:])
    position = np.asarray(mark_by_head(driver.cache, "position"))[0]
    for head, tokens in enumerate(driver.kept(k)):
        assert position[head, : len(tokens)].tolist() == tokens


@pytest.mark.parametrize(
    "bad", [dict(sink=-1), dict(budget=5), dict(ratio=0), dict(ratio=0.5, budget=50), dict(threshold=0),
            dict(compression=0.5), dict(compensation=1), dict(lengths=((0,),)), dict(lengths=((5,),), ratio=0.1)],
)  # fmt: skip
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        CompensatedRing(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_lengths_of_another_model_are_refused():
    with pytest.raises(UsageError, match="2 layers of 2 heads"):
        CompensatedRing(compensation=False, lengths=((3, 4),)).check(toys.tiny_config())
