"""Choosing tokens: supports and frequencies against NumPy, on 4,096 rows that differ by their keys alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.runtime.sampling import Sampling, _threshold, log_probability, sample

ROWS, VOCABULARY = 4096, 12
LOGITS = np.random.default_rng(5).permutation(np.linspace(-2.0, 1.5, VOCABULARY)).astype(np.float32)

_sample = jax.jit(sample)


def sampling(rows: int = ROWS, seed: int = 0, **changes: float) -> Sampling:
    values = dict(temperature=1.0, top_k=VOCABULARY, top_p=1.0, min_p=0.0, repetition_penalty=1.0, known=VOCABULARY)
    numbers = {
        k: jnp.full(() if k == "known" else rows, v, jnp.int32 if k in ("top_k", "known") else jnp.float32)
        for k, v in (values | changes).items()
    }
    draws = np.stack([np.full(rows, seed), np.arange(rows), np.zeros(rows)], axis=1).astype(np.uint32)
    return Sampling(**numbers, draws=jnp.asarray(draws))


def draw(logits: np.ndarray, *, present: np.ndarray | None = None, seed: int = 0, **changes: float) -> np.ndarray:
    rows = jnp.broadcast_to(jnp.asarray(logits), (ROWS, VOCABULARY))
    there = np.zeros((ROWS, VOCABULARY), bool) if present is None else np.broadcast_to(present, (ROWS, VOCABULARY))
    made = jnp.zeros((ROWS,), jnp.int32)
    return np.asarray(_sample(rows, sampling(seed=seed, **changes), jnp.asarray(there), made))


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 1e-20},
        {"top_k": 3},
        {"top_p": 0.9, "min_p": 1e-4},
        {"temperature": 50.0},
    ],
    ids=str,
)
def test_rows_that_pad_the_embedding_are_never_drawn(changes):
    """Also where they would be the best by far; the others are drawn as if there were no such rows."""
    logits, known = LOGITS.copy(), VOCABULARY - 4
    logits[known:] = 40.0
    drawn = draw(logits, known=known, **changes)
    assert drawn.max() < known
    logits[known:] = -1e4
    np.testing.assert_array_equal(drawn, draw(logits, known=known, **changes))


def oracle(logits: np.ndarray, temperature=1.0, top_k=VOCABULARY, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Probabilities after temperature, then top-k, then top-p among those, then min-p."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    keep = np.zeros(p.size, bool)
    keep[order[:top_k]] = True
    p = np.where(keep, p, 0) / p[keep].sum()
    total = 0.0
    keep[:] = False
    for token in order[:top_k]:
        if top_p < 1 and total >= top_p:
            break
        keep[token] = True
        total += p[token]
    keep &= p >= min_p * p.max()
    return np.where(keep, p, 0) / p[keep].sum()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.5},
        {"top_p": 1e-6},
        {"top_p": 0.9, "top_k": 6},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.8, "min_p": 0.3},
    ],
    ids=str,
)
def test_frequencies_and_support(changes):
    wanted = oracle(LOGITS, **changes)
    counts = np.bincount(draw(LOGITS, **changes), minlength=VOCABULARY)
    assert (counts[wanted == 0] == 0).all()
    assert (counts[wanted > 0.005] > 0).all()
    inside = wanted > 0
    chi = (((counts - wanted * ROWS) ** 2)[inside] / (wanted * ROWS)[inside]).sum()
    assert chi < 40  # at most 11 degrees of freedom: p below 0.0001


def test_ties_with_the_threshold_stay():
    logits = np.zeros(VOCABULARY, np.float32)
    logits[:3] = 2.0
    assert set(draw(logits, top_k=2).tolist()) == {0, 1, 2}


def test_temperature_zero_is_greedy_and_ties_go_to_the_lowest_id():
    logits = LOGITS.copy()
    logits[[7, 3]] = 9.0
    assert set(draw(logits, temperature=0.0).tolist()) == {3}


@pytest.mark.parametrize("temperature", [1e-38, 1e-30, 1e-6])
def test_next_to_zero_the_best_is_drawn_and_nothing_overflows(temperature):
    logits = 1e3 * (LOGITS + 5)
    assert set(draw(logits, temperature=temperature, min_p=0.0).tolist()) == {int(logits.argmax())}
    assert set(draw(logits, temperature=temperature, min_p=0.1, top_p=0.9).tolist()) == {int(logits.argmax())}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((ROWS, VOCABULARY)).astype(np.float32)
    present = rng.random((ROWS, VOCABULARY)) < 0.4
    penalised = np.where(present, np.where(logits > 0, logits / 1.8, logits * 1.8), logits)
    assert (draw(logits, present=present, temperature=0.0, repetition_penalty=1.8) == penalised.argmax(-1)).all()
    favoured = np.where(present, np.where(logits > 0, logits / 0.5, logits * 0.5), logits)
    assert (draw(logits, present=present, temperature=0.0, repetition_penalty=0.5) == favoured.argmax(-1)).all()
    wanted = oracle(np.where(present[0], np.where(LOGITS > 0, LOGITS / 1.8, LOGITS * 1.8), LOGITS))
    counts = np.bincount(draw(LOGITS, present=present[0], repetition_penalty=1.8), minlength=VOCABULARY)
    assert ((counts - wanted * ROWS) ** 2 / (wanted * ROWS)).sum() < 40


def test_draws_come_from_the_rows_key_and_the_tokens_number():
    first = draw(LOGITS)
    assert (first == draw(LOGITS)).all()
    assert (first != draw(LOGITS, seed=1)).any()
    chosen = sampling()
    rows = jnp.broadcast_to(jnp.asarray(LOGITS), (ROWS, VOCABULARY))
    there = jnp.zeros((ROWS, VOCABULARY), bool)
    later = np.asarray(_sample(rows, chosen, there, jnp.ones((ROWS,), jnp.int32)))
    assert (first != later).any()
    # Rows 0, 2, 4, ... alone draw what they draw among the others.
    halved = jax.tree.map(lambda x: x[::2] if x.ndim else x, chosen)
    alone = sample(rows[::2], halved, there[::2], jnp.zeros((ROWS // 2,), jnp.int32))
    np.testing.assert_array_equal(alone, first[::2])


def test_the_key_is_the_seeds_with_prompt_sample_and_token_folded_in():
    numbers = [(7, 3, 2, 0), (7, 2, 3, 0), (2**32 - 1, 0, 5, 9), (0, 1, 2, 3)] * 4
    noise = []
    for number, (seed, prompt, sampled, made) in enumerate(numbers):
        prompt += number // 4  # 16 rows that all differ
        numbers[number] = (seed, prompt, sampled, made)
        key = jax.random.key(np.uint32(seed))
        for folded in (prompt, sampled, made):
            key = jax.random.fold_in(key, folded)
        noise.append(jax.random.gumbel(key, (VOCABULARY,), jnp.float32))
    draws = jnp.asarray(np.array(numbers)[:, :3].astype(np.uint32))
    chosen = dataclasses.replace(sampling(len(numbers)), draws=draws)
    logits, there = jnp.zeros((len(numbers), VOCABULARY)), jnp.zeros((len(numbers), VOCABULARY), bool)
    found = _sample(logits, chosen, there, jnp.asarray([made for *_, made in numbers], jnp.int32))
    np.testing.assert_array_equal(found, np.argmax(noise, axis=-1))


def test_every_row_has_its_own_parameters():
    """A row draws what it draws in a batch of rows like itself, whatever those beside it ask for."""
    asked: list[dict[str, float]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.3, "top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.4, "repetition_penalty": 5.0},
        {"temperature": 0.0, "repetition_penalty": 9.0},
    ]
    there = np.arange(VOCABULARY) < 7
    alone = np.stack([draw(LOGITS, present=there, **changes) for changes in asked])
    each = [sampling(**changes) for changes in asked]
    row = np.arange(ROWS) % len(asked)
    mixed = jax.tree.map(lambda *xs: jnp.stack(xs)[row, np.arange(ROWS)] if xs[0].ndim else xs[0], *each)
    rows = jnp.broadcast_to(jnp.asarray(LOGITS), (ROWS, VOCABULARY))
    present = jnp.asarray(np.broadcast_to(there, (ROWS, VOCABULARY)))
    drawn = _sample(rows, mixed, present, jnp.zeros((ROWS,), jnp.int32))
    np.testing.assert_array_equal(drawn, alone[row, np.arange(ROWS)])


@pytest.mark.parametrize("changes", [{}, {"top_k": 3, "top_p": 0.8}, {"min_p": 0.2}, {"temperature": 0.0}], ids=str)
def test_a_program_that_computes_in_64_bits_draws_the_same(changes):
    wanted = draw(LOGITS, **changes)
    with jax.enable_x64(True):
        got = draw(LOGITS, **changes)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, wanted)


def test_log_probability_is_of_the_plain_softmax():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((5, VOCABULARY)) * 4, jnp.float32)
    token = jnp.asarray(rng.integers(0, VOCABULARY, 5), jnp.int32)
    wanted = jax.nn.log_softmax(logits)[jnp.arange(5), token]
    np.testing.assert_allclose(log_probability(logits, token), wanted, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 40, 999, 1000, 5000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 1.0])
def test_what_may_be_drawn_is_what_sorting_would_leave(top_k, top_p):
    rng = np.random.default_rng(3)
    logits = np.round(rng.standard_normal((6, 1000)) * 4, 1).astype(np.float32)  # with many ties
    logits[1, 500:] = -np.inf
    logits[2] = 0.0
    logits -= logits.max(axis=-1, keepdims=True)
    least = np.asarray(_threshold(jnp.asarray(logits), sampling(6, top_k=top_k, top_p=top_p)))[:, 0]
    for row, threshold in zip(logits, least, strict=True):
        ordered = np.sort(row.astype(np.float64))[::-1][:top_k]
        mass = np.exp(ordered)
        before = np.cumsum(mass) - mass
        enough = ordered if top_p == 1 else ordered[before < top_p * mass.sum()]
        assert threshold <= enough.min() and (row < threshold).sum() == (row < enough.min()).sum()
