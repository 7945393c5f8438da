"""Profiles as values and as files: which heads they protect, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.errors import KvjaxError, UsageError
from kvjax.policies.head_choice import protected_heads, scope_lengths
from kvjax.policies.profile import GateProfile, HeadProfile, ModelShape, ScopeProfile, ScorerProfile
from kvjax.policies.profile_files import load_profile, packaged, save_profile

CONFIG = toys.tiny_config(num_layers=3, num_heads=6, num_kv_heads=2)


def table(seed: int) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, np.random.default_rng(seed).random((3, 6)).round(6).tolist()))


def heads(**changes) -> HeadProfile:
    values = dict(tokens=50, repeats=4, seed=0, echo=table(0), induction=table(1))
    return HeadProfile("toy", ModelShape.of(CONFIG), **(values | changes))


def scopes(**changes) -> ScopeProfile:
    values = dict(paper=table(2), safe=table(3), slopes=table(4))
    return ScopeProfile("toy", ModelShape.of(CONFIG), **(values | changes))


@settings(max_examples=40, deadline=None)
@given(
    induction=st.sampled_from([0.0, 0.05, 0.14, 0.28, 0.5, 1.0]),
    echo=st.sampled_from([0.0, 0.01, 0.2]),
    seed=st.integers(0, 99),
)
def test_the_top_shares_are_protected_and_any_query_head_protects_its_group(induction, echo, seed):
    profile = heads(induction=table(seed), echo=table(seed + 100))
    wanted = set()
    for name, share in (("induction", induction), ("echo", echo)):
        scores = np.asarray(getattr(profile, name)).ravel()
        count = max(round(share * 18), 1) if share else 0
        wanted |= {(i // 6, i % 6 // 3) for i in np.argsort(-scores, kind="stable")[:count]}
    found = protected_heads(profile, induction, echo, "query")
    assert {(layer, head) for layer, row in enumerate(found) for head in row} == wanted


def test_shares_may_count_kv_heads():
    profile = heads()
    found = protected_heads(profile, 0.5, 0.0, "kv")
    best = np.asarray(profile.induction).reshape(3, 2, 3).max(axis=2).ravel()
    assert {(layer, head) for layer, row in enumerate(found) for head in row} == {
        (i // 2, i % 2) for i in np.argsort(-best)[:3]
    }
    assert protected_heads(profile, 1.0, 0.0, "kv") == ((0, 1),) * 3
    assert protected_heads(profile, 0.0, 0.0, "kv") == ((),) * 3


def test_scopes_are_equation_2_and_the_longest_of_a_group():
    profile = scopes()
    found = scope_lengths(profile, "paper", 0.001, 1 / 8)
    for layer in range(3):
        lengths = [
            math.ceil((limit - math.log(0.001)) / slope)
            for limit, slope in zip(profile.paper[layer], profile.slopes[layer], strict=True)
        ]
        assert found[layer] == (max(lengths[:3]), max(lengths[3:]))
    shorter = scope_lengths(profile, "paper", 0.5, 1 / 8)
    assert all(a < b for x, y in zip(shorter, found, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("profile", [heads(), scopes()], ids=lambda p: p.kind)
def test_a_file_holds_the_whole_profile(profile, tmp_path):
    path = tmp_path / "toy.yaml"
    save_profile(profile, path)
    read = load_profile(path)
    assert read == profile and hash(read) == hash(profile) and read.source == str(path) == str(read)
    assert [file.name for file in tmp_path.iterdir()] == ["toy.yaml"]
    read.check(CONFIG)


def test_another_models_profile_is_refused():
    with pytest.raises(UsageError, match=r"another model \(num_layers 3 instead of 2\).*kvjax calibrate retrieval"):
        heads().check(dataclasses.replace(CONFIG, num_layers=2))


@pytest.mark.parametrize(
    "change, said",
    [
        (("tokens: 50", "tokens: 50\nspeed: 3"), "unknown key 'speed'"),
        (("tokens: 50\n", ""), "does not say 'tokens'"),
        (("tokens: 50", "tokens: many"), "'many' as tokens"),
        (("kind: retrieval-heads", "kind: lengths"), "kind is 'lengths'"),
        (("family: llama, ", ""), "does not say 'family'"),
        (("family: llama", "family: llama, colour: red"), "unknown key 'colour'"),
        (("num_layers: 3", "num_layers: 4"), "4 rows of 6 numbers"),
        (("num_layers: 3", f"num_layers: {2**40}"), f"{2**40} rows of 6 numbers"),
        (("echo:\n- [", f"echo:\n- [{10**400}, "), "echo holds a number that is too large"),
        (("repeats: 4", "repeats: true"), "True as repeats"),
    ],
)
def test_a_file_that_is_not_exactly_a_profile_is_one_sentence(change, said, tmp_path):
    path = tmp_path / "toy.yaml"
    save_profile(heads(), path)
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(UsageError, match=said) as error:
        load_profile(path)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


@pytest.mark.parametrize("content", ["", "[1, 2]", "kind: [a", "echo: 3", "\x00", "kind: {a: 1}"])
def test_other_files_are_one_sentence(content, tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match="is not a profile"):
        load_profile(path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_profile(tmp_path / "absent.yaml")


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(UsageError, match="not finite"):
        heads(echo=((math.nan,) * 6,) * 3)


def test_gates_are_of_0_to_1():
    shape = ModelShape.of(CONFIG)
    for gate in (1.5, -0.1):
        with pytest.raises(UsageError, match=r"gates of a profile holds .*, which is not of 0 to 1"):
            GateProfile("toy", shape, tokens=8, steps=1, sink=1, recent=1, gates=((gate, 0.0),) * 3)


def test_counts_of_packed_numbers_take_no_memory():
    with pytest.raises(UsageError, match="weights of a profile of this model needs"):
        ScorerProfile(
            "toy", dataclasses.replace(ModelShape.of(CONFIG), num_layers=2**40), texts=1, tokens=1, steps=1,
            correlation=0.0, weights=("",),
        )  # fmt: skip


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(KvjaxError, match="cannot be written"):
        save_profile(heads(), tmp_path / "absent" / "toy.yaml")
    (tmp_path / "taken.yaml").mkdir()
    with pytest.raises(KvjaxError, match="cannot be written"):
        save_profile(heads(), tmp_path / "taken.yaml")
    assert [file.name for file in tmp_path.iterdir()] == ["taken.yaml"]


def test_no_profile_comes_with_kvjax_for_a_model_it_does_not_know():
    assert packaged(HeadProfile, CONFIG) is None
