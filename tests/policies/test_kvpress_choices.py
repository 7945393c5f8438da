"""The tokens that policies keep, against those that NVIDIA's kvpress 0.5.5 keeps of the same model and prompt.

``scripts/golden_kvpress.py`` ran the presses in torch; it says what of two presses was changed so that the part that is
common could be compared. Each choice was the same in float32 and in float64, so that rounding decides none. Finch's
weights differ a little (kvpress counts one token less for each query), which decides none here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import toys
from support import kvpress_cases as cases

import kvjax
from kvjax.cache.pool import keys_and_values
from kvjax.policies import Full, Policy, QFilters, parse
from kvjax.policies.profile import FilterProfile, ModelShape
from kvjax.text.tokenizer import Tokenizer

CASES = {case.name: case for case in cases.CASES}
#: Where the rules differ, which the last tests are about.
DIFFERENT = ("pyramidkv", "tova", "chunkkv_rest")

#: The tokens that each head keeps, layer by layer.
Choice = list[list[list[int]]]
#: [T, D] keys and values of each head, layer by layer.
Held = list[list[tuple[np.ndarray, np.ndarray]]]


@pytest.fixture(scope="module")
def held(tmp_path_factory) -> Callable[[str, bool], Held]:
    """What kvjax's policy of a case holds of its prompt, or the full cache."""
    plain = toys.byte_tokenizer()
    tokenizer = Tokenizer(plain._backend, chat_template=None, special_tokens=plain.special_tokens)
    folder = cases.folder(tmp_path_factory.mktemp("kvpress"))
    lm = dataclasses.replace(kvjax.load(folder), tokenizer=tokenizer)

    def after(tokens: int, policy: Policy) -> Held:
        cache: Any = kvjax.generate(lm, cases.prompt(tokens), policy=policy, max_new_tokens=0).cache
        pools = [[np.asarray(x)[0] for x in (*keys_and_values(layer), layer.length)] for layer in cache.by_layer()]
        return [[(k[:count], v[:count]) for k, v, count in zip(*pool, strict=True)] for pool in pools]

    @functools.cache
    def whole(tokens: int) -> Held:
        return after(tokens, Full())

    def found(name: str, full: bool) -> Held:
        case = CASES[name]
        return whole(case.tokens) if full else after(case.tokens, with_filters(parse(case.policy)))

    def with_filters(policy: Policy) -> Policy:
        if not isinstance(policy, QFilters):
            return policy
        filters = cases.filters()
        table = tuple(map(tuple, filters.reshape(len(filters), -1).tolist()))
        profile = FilterProfile("tiny", ModelShape.of(lm.config), pieces=1, tokens=8, filters=table)
        return dataclasses.replace(policy, profile=profile)

    return found


@pytest.fixture(scope="module")
def choice(held) -> Callable[[str], Choice]:
    """The tokens that kvjax's policy of a case keeps: those with the keys that each head holds."""

    def found(name: str) -> Choice:
        layers = zip(held(name, False), held(name, True), strict=True)
        return [[sorted(places(kept, every)) for (kept, _), (every, _) in zip(*heads, strict=True)] for heads in layers]

    return found


def places(kept: np.ndarray, every: np.ndarray) -> list[int]:
    """The rows of ``every`` that the rows of ``kept`` are."""
    apart = np.abs(kept[:, None] - every[None]).max(axis=-1)
    assert (apart.min(axis=1) < 1e-4).all()
    found = apart.argmin(axis=1).tolist()
    assert len(set(found)) == len(found)
    return found


def by_head(*choices: Choice) -> list[tuple[set[int], ...]]:
    """Choices beside each other: a tuple of sets for each head of each layer."""
    layers = zip(*choices, strict=True)
    return [tuple(map(set, heads)) for layer in layers for heads in zip(*layer, strict=True)]


@pytest.mark.parametrize("name", [name for name in CASES if name not in DIFFERENT])
def test_the_tokens_that_kvpress_keeps(choice, name):
    assert choice(name) == cases.recorded()[name]


def test_values_are_merged_as_kvpress_does(held):
    """Slots are in order of position here, and so are the recorded values."""
    for heads, wanted in zip(held("merged", False), cases.recorded()["merged_values"], strict=True):
        for (_, v), theirs in zip(heads, wanted, strict=True):
            np.testing.assert_allclose(v[:, : cases.CHANNELS], theirs, atol=1e-4)


def test_pyramidkv_ranks_as_kvpress_does(choice):
    """The official code and kvjax let a window stand beside the pyramid; in kvpress it is part of the pyramid.

    So a layer keeps more or fewer tokens here, the best of the same order, and all layers together as many.
    """
    found, theirs = choice("pyramidkv"), cases.recorded()["pyramidkv"]
    sizes = [(len(mine[0]), len(other[0])) for mine, other in zip(found, theirs, strict=True)]
    assert sizes == [(64, 70), (40, 40), (16, 10)]
    assert all(mine <= other or other <= mine for mine, other in by_head(found, theirs))


def test_tova_keeps_what_kvpress_does_but_for_the_newest_token(choice):
    """kvpress always keeps the newest token; the official code and kvjax only where enough is attended to it."""
    newest = {CASES["tova"].tokens - 1}
    heads = by_head(choice("tova"), cases.recorded()["tova"])
    assert all(len(mine) == len(other) and mine >= other - newest for mine, other in heads)
    assert any(mine != other for mine, other in heads)


def test_chunkkv_spends_what_whole_chunks_leave(choice):
    """kvpress keeps whole chunks alone, over the budget where its fraction of the chunks is more than of the tokens.

    Here the last chunk that the budget does not hold gives its best tokens: of the same chunks, one or more fewer.
    """
    case = CASES["chunkkv_rest"]
    assert case.tokens % 20
    for mine, other in by_head(choice(case.name), cases.recorded()[case.name]):
        assert len(mine) == int(case.tokens * cases.RATIO) and (mine < other or other < mine)
