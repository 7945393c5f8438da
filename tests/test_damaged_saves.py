"""Saves that were changed or cut short: one sentence says so, before memory is taken, and nothing else is printed."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvjax
from kvjax.saving import store
from kvjax.saving.checksums import CHECKSUMS

METADATA = "_CHECKPOINT_METADATA"
PROMPT = list(range(70))
#: A place in a description, a value of another kind or size, and what the sentence names.
WRONG: list[tuple[str, str, Any, str]] = [
    ("lagkv", "slots.0.0", 10**6, "slots is 1,000,000"),
    ("lagkv", "slots.0.1", -1, "slots is -1"),
    ("lagkv", "slots.1.0", True, "slots.1.0"),
    ("lagkv", "slots.0", [96], "heads"),
    ("lagkv", "counts.0.0.0", 2**29, "counts is 536,870,912"),
    ("lagkv", "counts.0.0.0", 1, "the array"),
    ("lagkv", "counts.0", [], "counts"),
    ("lagkv", "counts", [[[1, 1]]], "slots is of 2 layers"),
    ("lagkv", "batch", 2**20, "the array"),
    ("lagkv", "batch", 0, "batch is 0"),
    ("lagkv", "new_room", "x", "new_room"),
    ("lagkv", "new_room", [], "new_room"),
    ("lagkv", "new_room", 1.5, "new_room"),
    ("lagkv", "new_room", 2**29, "new_room"),
    ("lagkv", "prompt_room", {}, "prompt_room"),
    ("lagkv", "prompt_room", None, "prompt_room"),
    ("lagkv", "prompt_room", -1, "prompt_room is -1"),
    ("lagkv", "prompt_room", 10**30, "prompt_room"),
    ("lagkv", "version", float("nan"), "version is nan"),
    ("lagkv", "version", 0, "version is 0"),
    ("lagkv", "model.name", {}, "model.name"),
    ("lagkv", "storage", None, "storage"),
    ("lagkv", "storage.kind", None, "storage.kind"),
    ("lagkv", "policy", {}, "damaged"),
    ("lagkv", "policy.kind", "ModelShape", "damaged"),
    ("lagkv", "policy", {"kind": "Placed", "watershed": 1, "upper_room": 0}, "rounds are missing"),
    ("round", "policy.watershed", 2**31, "policy is"),
    ("round", "policy.upper_room", 10**6, "policy is"),
    ("round", "rounds.asked", ["x"], "rounds.asked.0"),
    ("round", "rounds.asked", [-1], "asked is -1"),
    ("round", "rounds.asked", [1, 2], "asked is of 2 rows"),
    ("round", "rounds.parts.0", [], "no prefix"),
    ("round", "rounds.parts.0.1.room", 10**7, "room is 10,000,000"),
    ("round", "rounds.parts.0.1.room", 2**31, "room is 2147483648"),
    ("round", "rounds.parts.0.1.room", 3, "room is 3"),
    ("round", "rounds.parts.0.1.count", 3, "count is 3"),
    ("round", "rounds.parts.0.1.tokens", "x", "tokens"),
    ("round", "rounds.parts.0.1.tokens", -5, "tokens is -5"),
    ("round", "rounds.parts.0.1.tokens", 2**40, "tokens is"),
    ("round", "rounds.parts.0.1.tokens", 10**6, "1,000,000"),
    ("round", "rounds.parts.0.1.start", None, "start"),
    ("round", "rounds.parts.0.1.start", 10**6, "start and tokens"),
    ("round", "rounds.parts.0.1.start", 0, "within the one before it"),
    ("round", "rounds.parts.0.1.used", [], "used"),
    ("round", "rounds.parts.0.1.used", 9, "used is 9"),
    ("round", "rounds.parts.0.1.layers", 2, "layers is 2"),
    ("round", "rounds.parts.0.1.held.0", [1, 1], "a round of"),
    ("round", "rounds.policy", {"kind": "lagkv", "ratio": 0.5}, "rounds are of a policy that has none"),
]


@pytest.fixture(scope="module")
def saves(tiny_model, tmp_path_factory) -> Path:
    """A folder with a saved cache and a saved conversation of rounds; it is not changed."""
    folder = tmp_path_factory.mktemp("saves")
    policy = kvjax.LagKV(ratio=0.5, lag=16, sink=4)
    cache = kvjax.generate(tiny_model, PROMPT, policy=policy, max_new_tokens=1).cache
    kvjax.save_cache(folder / "lagkv", cache, tiny_model)
    chat = kvjax.Chat(tiny_model, policy=kvjax.RoundAttention(watershed=1), max_new_tokens=2)
    chat.send("Of the sea.")
    chat.save(folder / "round")
    return folder


@pytest.fixture
def copied(saves, tmp_path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(saves / name, tmp_path / name))


def changed(folder: Path, place: str, value: Any, digest: bool) -> None:
    """Change one value of a description; without its digest it is as version 0.1 would have written it."""
    path = folder / "0" / METADATA
    content = json.loads(path.read_text())
    if not digest:
        del content["custom_metadata"]["checksum"]["description"]
    *parents, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    functools.reduce(lambda tree, part: tree[part], parents, content["custom_metadata"])[last] = value
    path.write_text(json.dumps(content))


def refusal(folder: Path, lm: Any) -> str:
    with pytest.raises(kvjax.KvjaxError) as caught:
        kvjax.load_cache(folder, lm)
    sentence = str(caught.value)
    assert folder.name in sentence and sentence.endswith(".") and len(sentence) < 300 and "\n" not in sentence
    return sentence


@pytest.fixture
def nothing_allocated(monkeypatch):
    monkeypatch.setattr(store, "_load", lambda *_: pytest.fail("arrays were read"))
    monkeypatch.setattr(store, "_zeros", lambda *_: pytest.fail("pages were allocated"))


@pytest.mark.parametrize(("name", "place", "value", "said"), WRONG, ids=lambda value: str(value)[:30])
def test_a_description_that_cannot_be_is_refused(copied, tiny_model, nothing_allocated, name, place, value, said):
    folder = copied(name)
    changed(folder, place, value, digest=False)
    sentence = refusal(folder, tiny_model)
    assert "is damaged" in sentence and said in sentence


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("lagkv", "policy.sink", 10**6),
        ("lagkv", "slots.1.0", 160),
        ("lagkv", "prompt_room", 0),
        ("lagkv", "checksum.crc32", 1),
        ("lagkv", "later", "a field of a later version"),
        ("round", "rounds.parts.0.1.room", 512),
        ("round", "rounds.policy.top", 0.2),
    ],
)
def test_a_description_that_could_be_but_was_changed_is_refused(
    copied, tiny_model, nothing_allocated, name, place, value
):
    folder = copied(name)
    changed(folder, place, value, digest=True)
    assert "its description is not what was saved: its digest differs" in refusal(folder, tiny_model)


@pytest.mark.parametrize("name", ["lagkv", "round"])
def test_without_digest_and_checksums_a_save_is_read_as_before(copied, tiny_model, name):
    folder = copied(name)
    changed(folder, "later", "a field of a later version", digest=False)
    (folder / "0" / CHECKSUMS).unlink()
    assert kvjax.load_cache(folder, tiny_model).batch == 1


@pytest.mark.parametrize("damage", ["cut", "emptied", "changed", "removed"])
def test_broken_files_are_one_sentence_and_nothing_is_printed(copied, tiny_model, capfd, caplog, damage):
    folder = copied("lagkv")
    item = folder / "0"
    names = [path for path in sorted(item.rglob("*")) if path.is_file() and path.name != "commit_success.txt"]
    assert len([path for path in names if "d" in path.parts]) > 1, "the files of arrays are among them"
    for path in names:
        content = path.read_bytes()
        half = len(content) // 2
        if damage == "removed":
            if path.name in (METADATA, CHECKSUMS):
                continue
            path.unlink()
        else:
            flipped = content[:half] + bytes([content[half] ^ 0x80]) + content[half + 1 :]
            path.write_bytes({"cut": content[:half], "emptied": b"", "changed": flipped}[damage])
        assert "is damaged" in refusal(folder, tiny_model)
        path.write_bytes(content)
    assert capfd.readouterr() == ("", "") and not caplog.records
    assert kvjax.load_cache(folder, tiny_model).batch == 1


def test_a_description_that_cannot_be_read_is_damaged_and_not_written_over(copied, tiny_model, saves):
    cache = kvjax.load_cache(saves / "lagkv", tiny_model)
    folder = copied("lagkv")
    path = folder / "0" / METADATA
    content = path.read_bytes()
    for text in (b"", content[:-20], b"\xff" + content):
        path.write_bytes(text)
        for call in (kvjax.load_cache, lambda path, lm: kvjax.save_cache(path, cache, lm)):
            with pytest.raises(
                kvjax.KvjaxError, match=r"The conversation at .*lagkv is damaged; 0/_CHECKPOINT"
            ) as caught:
                call(folder, tiny_model)
            assert not isinstance(caught.value, kvjax.UsageError)
        assert path.read_bytes() == text
    # Without checksums it may have been anybody's.
    (folder / "0" / CHECKSUMS).unlink()
    with pytest.raises(kvjax.KvjaxError, match=r"^\S*lagkv is damaged; 0/_CHECKPOINT"):
        kvjax.load_cache(folder, tiny_model)


def test_checksums_name_files_of_its_save_alone(copied, tiny_model):
    folder = copied("lagkv")
    for name in ("../../outside", "/etc/hostname"):
        (folder / "0" / CHECKSUMS).write_text(json.dumps({name: {"bytes": 1, "sha256": ""}}))
        assert f"contradicts itself about '{name}'" in refusal(folder, tiny_model)


def test_a_save_whose_checksums_could_not_be_written_is_whole(tiny_model, saves, tmp_path, monkeypatch):
    cache = kvjax.load_cache(saves / "lagkv", tiny_model)

    def full(path, content):
        raise kvjax.KvjaxError("The disk is full.")

    with monkeypatch.context() as patched:
        patched.setattr("kvjax.saving.checksums.write_atomically", full)
        kvjax.save_cache(tmp_path / "talk", cache, tiny_model)
    assert not (tmp_path / "talk" / "0" / CHECKSUMS).exists()
    assert kvjax.load_cache(tmp_path / "talk", tiny_model).seen.tolist() == cache.seen.tolist()
