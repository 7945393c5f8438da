"""Small readers that everything shares: quotations in errors, numbers, JSON and YAML of others, paths to write to."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from kvjax import checks, documents, files
from kvjax.environment import switched
from kvjax.errors import KvjaxError, UsageError, one_sentence, quoted
from kvjax.sharding.mesh import Mesh


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [1, 1.5, "a", "", "it's", None, True, math.nan, (0, 1), [1, "b"], {"b": 1, "a": [2]}, b"x"]
)
def test_what_is_short_is_quoted_as_it_is(value):
    assert quoted(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    ["x" * 5000, 10**5000, [10**5000] * 99, nested(100_000), np.zeros((50, 50)), {"a": nested(5000)}, b"x" * 999],
    ids=lambda value: type(value).__name__,
)
def test_what_is_long_is_cut(value):
    text = quoted(value)
    assert len(text) <= 80 and "\n" not in text


def test_errors_are_one_short_sentence():
    path = "/home/somebody/" + "folder/" * 12 + "file.json"
    assert str(KvjaxError(f"{path} cannot be read.")) == f"{path} cannot be read.", "a path of usual length is whole"
    for text in (
        "x" * 5000,
        "a b " * 900,
        "first\nsecond",
        "a\0b",
        f"{'y' * 4000} holds {'z' * 4000}; choose another.",
    ):
        said = str(UsageError(f"{text}, which is no name; give one."))
        assert len(said) < 290 and not {"\n", "\0"} & set(said) and said.endswith("give one.")
    assert one_sentence("short.") == "short."


def test_numbers_have_both_bounds():
    checks.whole_number("n", checks.MOST, 1)
    for value in (0, checks.MOST + 1, 2**63, 10**5000, 1.0, True, "1"):
        with pytest.raises(UsageError, match=r"^n is .*; give a whole number of at least 1"):
            checks.whole_number("n", value, 1)
    with pytest.raises(UsageError, match=f"at most {checks.MOST}"):
        checks.whole_number("n", 2**63, 1)
    for value in (math.inf, math.nan, 1e39, 10**400, -1):
        with pytest.raises(UsageError, match=r"^t is "):
            checks.number("t", value, 0)
    assert checks.read_whole_number(" +12 ") == 12 and checks.read_number("1e3") == 1000.0
    for text in ("1_0", "٣", "", "1.0", "9" * 5000, "--1"):
        with pytest.raises(ValueError, match="not a whole number"):
            checks.read_whole_number(text)
    for text in ("1_0", "nan", "inf", "1e999"):
        with pytest.raises(ValueError, match="not a finite number"):
            checks.read_number(text)


@pytest.mark.parametrize("parse", [documents.parse_json, documents.parse_yaml])
def test_depth_and_digits_are_bounded(parse):
    deepest = json.dumps(nested(documents.DEPTH - 1))
    assert parse(deepest) == json.loads(deepest)
    for text in (json.dumps(nested(documents.DEPTH + 1)), "[" * 100_000, "9" * 5000, b"\xff"):
        with pytest.raises(documents.NotADocument):
            parse(text)


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', '{"a": 1, "a": 1.0}', '{"a": true, "a": 1}', '[{"b": {"a": [0], "a": [false]}}]']
)
def test_a_key_of_json_has_one_value(text):
    with pytest.raises(documents.NotADocument, match="the key 'a' is there twice, with different values"):
        documents.parse_json(text)
    assert documents.parse_json('{"a": [1, {"b": null}], "c": 2, "a": [1, {"b": null}]}') == {
        "a": [1, {"b": None}],
        "c": 2,
    }


@pytest.mark.parametrize("text", ["a: &x [1]\nb: *x", "a: &x [*x]", "a: !!int ''", "a: !!timestamp b", "{"])
def test_yaml_of_a_bad_kind(text):
    with pytest.raises(documents.NotADocument) as caught:
        documents.parse_yaml(text)
    assert len(str(caught.value)) < 80


def test_an_environment_variable_switches_on_or_off(monkeypatch):
    for value, means in {
        "": None,
        "0": False,
        "no": False,
        "False": False,
        " 1 ": True,
        "on": True,
        "TRUE": True,
    }.items():
        monkeypatch.setenv("KVJAX_COMPILE_CACHE", value)
        for otherwise in (True, False):
            assert switched("KVJAX_COMPILE_CACHE", otherwise) is (otherwise if means is None else means)
    monkeypatch.setenv("KVJAX_COMPILE_CACHE", "maybe")
    with pytest.raises(UsageError, match="variable KVJAX_COMPILE_CACHE is 'maybe'; give 0 or 1"):
        switched("KVJAX_COMPILE_CACHE", True)
    monkeypatch.setenv("KVJAX_CACHE", "~nobody_of_this_name/x")
    with pytest.raises(UsageError, match="KVJAX_CACHE is '~nobody_of_this_name/x', the home of a user"):
        files.cache_folder()


def test_yaml_reads_numbers_as_they_look():
    """PyYAML alone takes 1:30 for 90, 010 for 8, 1e5 for a text, and a day for a date."""
    numbers = {
        "7": 7,
        "-3": -3,
        "+1_000": 1000,
        "0": 0,
        ".5": 0.5,
        "2.0": 2.0,
        "1e5": 1e5,
        "1.5E-3": 0.0015,
        "-.inf": -np.inf,
    }
    for text, value in numbers.items():
        found = documents.parse_yaml(f"a: {text}")["a"]
        assert found == value and type(found) is type(value)
    for text in ("1:30", "1:30.5", "010", "0x10", "0b1", "2026-11-25", "2026-99-99", "1_", "_1", "1.2.3", "-", "="):
        assert documents.parse_yaml(f"a: {text}" if text != "-" else "a: '-'") == {"a": text}
    for twice in ("a: 1\nb: 2\na: 3", "a: {b: 1, b: 1}"):
        with pytest.raises(documents.NotADocument, match="a mapping has a key twice"):
            documents.parse_yaml(twice)
    assert documents.parse_yaml("a: [true, yes, no, null, ~, '3']") == {"a": [True, True, False, None, None, "3"]}


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()

    def __post_init__(self):
        for size in self.sizes:
            checks.whole_number("size", size, 1)


@dataclasses.dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]


def test_a_schema_is_a_dataclass():
    assert documents.validated(Whole, {"parts": [{"name": "a", "sizes": [1]}]}) == Whole((Part("a", (1,)),))
    wrong = {
        "parts.0.name": {"parts": [{}]},
        "parts.0.sizes.0": {"parts": [{"name": "a", "sizes": ["1"]}]},
        "size is 0": {"parts": [{"name": "a", "sizes": [0]}]},
        "object": [],
    }
    for says, value in wrong.items():
        with pytest.raises(documents.NotADocument, match=says):
            documents.validated(Whole, value)


@pytest.mark.parametrize("path", ["gs://b/c", "gs:/b/c", "s3://x", "a\0b", "x" * 300, "y/" * 3000, "\ud800"])
def test_what_is_no_path_to_write_to(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for check in (files.check_local, files.check_writable, files.check_folder):
        with pytest.raises(UsageError, match=r"^--out names"):
            check("--out", Path(path))
    if ":" in path:
        with pytest.raises(UsageError, match=r"gs://b/c|s3://x"):
            files.check_local("--out", Path(path))
    assert not list(tmp_path.iterdir())


def test_a_folder_is_checked_and_not_made(tmp_path):
    files.check_folder("--out", tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        files.check_folder("--out", tmp_path / "file")
    with pytest.raises(KvjaxError, match="cannot be made"):
        files.check_folder("--out", tmp_path / "file" / "a")


def test_axes_that_divide_are_the_most_there_are():
    """The rule again, by all subsets."""
    for model, count in itertools.product((1, 2, 4, 6, 12, 30, 60), range(1, 61)):
        mesh = Mesh(1, model)
        subsets = itertools.chain.from_iterable(
            itertools.combinations(mesh.factors, size) for size in range(len(mesh.factors) + 1)
        )
        most = max(len(chosen) for chosen in subsets if count % math.prod(size for _, size in chosen) == 0)
        found = mesh.axes_dividing(count)
        assert len(found) == most and count % mesh.parts(found) == 0
