"""Profiles that were changed by hand: numbers that no calibration finds, and files that are too large."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import toys
import yaml
from support.filters import random_filters
from support.scorers import random_gates, random_scorer, random_statistics

from kvjax.errors import UsageError
from kvjax.policies import parse
from kvjax.policies.profile import HeadProfile, ModelShape, Profile, ScopeProfile, WatershedProfile
from kvjax.policies.profile_files import folder as packaged_folder
from kvjax.policies.profile_files import load_profile, save_profile

CONFIG = toys.tiny_config(num_layers=2)
SHAPE = ModelShape.of(CONFIG)
TABLE = ((0.5,) * CONFIG.num_heads,) * 2
PROFILES: dict[str, Profile] = {
    found.kind: found
    for found in (
        HeadProfile("toy", SHAPE, tokens=8, repeats=2, seed=0, echo=TABLE, induction=TABLE),
        ScopeProfile("toy", SHAPE, TABLE, TABLE, TABLE),
        WatershedProfile("toy", SHAPE, watershed=1, dialogues=2, rounds=5, prominence=0.1, divergence=(0.2, 0.0)),
        random_filters(CONFIG),
        random_scorer(CONFIG),
        random_gates(CONFIG),
        random_statistics(CONFIG),
    )
}
COUNTS = {
    "retrieval-heads": ("tokens", "repeats", "seed"),
    "watershed": ("watershed", "dialogues", "rounds"),
    "qfilters": ("pieces", "tokens"),
    "scorer": ("texts", "tokens", "steps"),
    "gates": ("tokens", "steps", "sink", "recent"),
    "statistics": ("pieces", "tokens", "seed", "sink"),
}
NUMBERS = {
    ("retrieval-heads", "echo"): (-1.0, 1.5, 1e300, math.nan),
    ("retrieval-heads", "induction"): (-1e300, 1e39),
    ("alibi-scopes", "paper"): (-1.0, 1e39, math.inf),
    ("alibi-scopes", "safe"): (-1e300,),
    ("alibi-scopes", "slopes"): (0.0, -1.0, 1e-320),
    ("watershed", "divergence"): (-0.5, 1e300, math.nan),
    ("qfilters", "filters"): (1e39, -1e300, 1e38, -math.inf),
    ("gates", "gates"): (1.5, -0.1, 1e300),
}
SCALARS = {
    ("watershed", "prominence"): (math.nan, math.inf, -0.5, 0.0, 1e300),
    ("scorer", "correlation"): (math.nan, -math.inf, 1.5, -5.5),
}


def refused(kind: str, tmp_path: Path, said: str, **changes) -> None:
    """Check that the profile of this kind is refused in one sentence once its file is changed."""
    path = tmp_path / "p.yaml"
    save_profile(PROFILES[kind], path)
    content = yaml.safe_load(path.read_text())
    assert load_profile(path) == PROFILES[kind]
    for name, value in changes.items():
        if name in content["shape"]:
            content["shape"][name] = value
        elif isinstance(content[name], list):
            first = content[name]
            while isinstance(first[0], list):
                first = first[0]
            first[0] = value
        else:
            content[name] = value
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UsageError) as error:
        load_profile(path)
    sentence = str(error.value)
    assert said in sentence and len(sentence) < 300 and "\n" not in sentence and sentence.endswith("."), sentence


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in COUNTS.items() for name in names])
def test_counts_have_a_least_and_a_most(kind, name, tmp_path):
    for value in (-1, 10**30, *([] if name in ("seed", "sink") else [0])):
        refused(kind, tmp_path, f"{name} of a profile is {value}", **{name: value})


@pytest.mark.parametrize(("kind", "name"), NUMBERS)
def test_numbers_are_what_a_calibration_finds(kind, name, tmp_path):
    for value in NUMBERS[kind, name]:
        why = "is not of" if abs(value) < 1e39 else "is not finite in float32"
        refused(kind, tmp_path, f"{name} of a profile holds {value:g}, which {why}", **{name: value})


@pytest.mark.parametrize(("kind", "name"), SCALARS)
def test_what_a_calibration_says_of_itself_is_in_range(kind, name, tmp_path):
    for value in SCALARS[kind, name]:
        refused(kind, tmp_path, f"{name} of a profile is", **{name: value})


@pytest.mark.parametrize("name", ["vocab_size", "intermediate_size", "num_layers", "num_kv_heads", "head_dim"])
def test_a_shape_is_one_of_a_model(name, tmp_path):
    for value in (-1, 0, 2**63 - 1):
        refused("gates", tmp_path, f"{name} of a profile's shape is {value}", **{name: value})


def test_a_shape_has_as_many_query_heads_for_every_kv_head(tmp_path):
    refused("gates", tmp_path, f"{CONFIG.num_heads} heads and 3 KV heads", num_kv_heads=3)


def test_profiles_that_come_with_kvjax_are_in_range():
    paths = sorted(packaged_folder().glob("*.yaml"))
    assert {load_profile(path).kind for path in paths} >= {"watershed", "qfilters", "scorer", "gates"}


def test_a_file_without_an_end_is_not_read_to_it(tmp_path, monkeypatch):
    from kvjax.policies import profile_files

    monkeypatch.setattr(profile_files, "_MOST_BYTES", 3_000_000)
    path = tmp_path / "p.yaml"
    save_profile(PROFILES["gates"], path)
    assert load_profile(path).kind == "gates"
    for name in ("/dev/zero", str(path)):
        if name == str(path):
            with path.open("ab") as file:
                file.truncate(3_000_001)
        with pytest.raises(UsageError, match=rf"{name} has more than 3 MB; give a smaller file\.$"):
            parse(f"duo:profile={name}")
