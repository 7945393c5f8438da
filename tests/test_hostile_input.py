"""Hostile flags, keywords and configurations, generated: what is refused is one short sentence and leaves nothing.

They come from the types of what there is (``tests/support/hostile.py``), so a new option is tried here without a line.
What a request would run is replaced; what checks it is not. Hostile files are in ``test_hostile_files.py``.
"""

from __future__ import annotations

import functools
import io
import random
import sys
import typing
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support import hostile
from support.judging import SEED, Judge, prepare

import kvjax
from kvjax import policies
from kvjax.checkpoints.load import load
from kvjax.cli import main
from kvjax.options import FIELDS, GenerationOptions
from kvjax.policies.names import POLICIES


@pytest.fixture
def judge(tiny_model, tmp_path, monkeypatch, capsys) -> Judge:
    prepare(tiny_model, tmp_path / "here", monkeypatch)
    return Judge(tmp_path / "here", capsys)


# --- flags ----------------------------------------------------------------------------------------------------

#: A command line of each command that is accepted.
COMMANDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("generate",): ("hi",), ("chat",): (), ("batch",): ("--input", "in.jsonl", "--output", "out"), ("policies",): (),
    ("plan",): ("--prompt-tokens", "8"), ("fetch",): ("a/b",), ("models",): (),
    ("bench",): ("--batch", "1", "--context", "8", "--prefill", "8"),
    ("bench", "decode"): ("--shape", "tiny", "--batch", "1", "--context", "32"), ("bench", "kernels"): ("--mean", "8"),
    ("bench", "start"): (), ("bench", "engine"): ("--simulate", "--requests", "5"), ("tune",): ("sizes.json",),
    ("calibrate", "retrieval-heads"): ("--out", "p.yaml", "--no-picture"),
    ("calibrate", "alibi-scopes"): ("--out", "p.yaml"),
    ("calibrate", "qfilters"): ("--out", "p.yaml", "--texts", "talks.jsonl"),
    ("calibrate", "statistics"): ("--out", "p.yaml", "--texts", "talks.jsonl"),
    ("convert",): ("a/b", "--out", "x"),
    ("calibrate", "scorer"): ("--out", "p.yaml", "--texts", "texts/long.txt", "--tokens", "60", "--no-picture"),
    ("calibrate", "gates"): (
        "--out", "p.yaml", "--texts", "texts/long.txt", "--tokens", "500", "--keys", "1", "--words", "2",
        "--no-picture",
    ),
    ("calibrate", "watershed"): ("--out", "p.yaml", "--dialogues", "talks.jsonl", "--least-rounds", "2"),
    ("compare",): ("--out", "res"), ("compare-rounds",): ("--out", "res", "--dialogues", "talks.jsonl"),
    ("eval",): ("--suite", "longbench", "--tasks", "trec", "--data", "texts", "--out", "res"),
    ("lm-eval",): (),
    ("recommend",): ("--text", "texts", "--out", "res", "--context", "400", "--passages", "1", "--needles", "1"),
    ("picture",): ("razor-heads", "--out", "x.png"), ("read",): ("text", "--out", "kept"),
    ("warm",): ("--lengths", "8"),
}  # fmt: skip


def commands(found: Any, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Every command of the application with its words."""
    for name, command in getattr(found, "commands", {}).items():
        yield from commands(command, (*path, name))
    if path and path != ("calibrate",):
        yield path, found


def typed(flag: Any) -> list[tuple[str, bool]]:
    """Words for a flag, from its type, each with whether it must refuse them."""
    kinds = hostile.kinds_of(flag.type_descriptor.annotation)
    kinds = tuple(kind for one in kinds for kind in (typing.get_args(one) or (one,)))
    if int in kinds:
        return [(text, True) for text in hostile.TYPED_WHOLE]
    if float in kinds:
        return [(text, True) for text in hostile.TYPED_NUMBERS]
    if flag.name in ("policy", "policies"):
        return [(text, "," not in text) for text in policy_texts()]
    if flag.name == "mesh":
        return [(text, False) for text in hostile.MESHES]
    if flag.name == "memory_limit":
        return [(text, True) for text in hostile.BYTES]
    if "omma-separated" in (flag.help or "") or flag.name == "stop_token_ids":
        return [(text, text != "0") for text in hostile.LISTS]
    return [(text, False) for text in hostile.TEXTS]


@functools.cache
def policy_texts() -> list[str]:
    return hostile.policy_texts({name: policies.registry()[name] for name in POLICIES})


def test_every_command_is_tried():
    assert {path for path, _ in commands(main.root_command())} == set(COMMANDS)


def test_flags(judge, monkeypatch):
    draw, cases = random.Random(SEED), []
    for path, command in commands(main.root_command()):
        for flag in command.params:
            if getattr(flag, "is_flag", False) or flag.name in ("help", "config"):
                continue
            opts = [opt for opt in flag.opts if opt.startswith("--")]
            for text, must in hostile.sample(draw, typed(flag), 9):
                words = [*path, *COMMANDS[path]]
                if opts:
                    words += [opts[0], text]
                elif COMMANDS[path] and path != ("policies",):
                    words[len(path)] = text
                cases.append((words, must))
    for words, must in hostile.sample(draw, cases, 900):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n"), encoding="utf-8"))
        judge.command(words, must)
    judge.verdict(900)


def test_policies_as_text(judge):
    for text in policy_texts():
        judge.call(text, lambda text=text: policies.parse(text), True)
    for text in hostile.TEXTS:
        judge.call(text, lambda text=text: policies.parse(text), True)
    judge.verdict(400)


# --- the library ----------------------------------------------------------------------------------------------


def keywords(
    function: Callable[..., Any], hints: dict[str, Any], given: dict[str, Any]
) -> Iterable[tuple[Any, Any, bool]]:
    """Calls of a function with one keyword that is hostile."""
    for name, hint in hints.items():
        for value, must in hostile.values(hint):
            yield (function, name, value), functools.partial(function, **(given | {name: value})), must


def test_options_and_fields(judge, tiny_model):
    local = {"Policy": str, "Storage": str}
    options = {
        name: hint for name, hint in typing.get_type_hints(GenerationOptions, localns=local).items() if name in FIELDS
    }
    calls: list[tuple[Any, Any, bool]] = []
    generate = functools.partial(kvjax.generate, tiny_model)
    calls += keywords(generate, options | {"n": int, "prompt": str, "context": str}, {"prompt": "hi"})
    numbers = {"prompt_tokens": int, "batch": int, "max_new_tokens": int, "memory_limit": int | None}
    calls += keywords(
        functools.partial(kvjax.plan, tiny_model), numbers | {"mesh": str, "dtype": str}, {"prompt_tokens": 8}
    )
    calls += keywords(kvjax.Mesh, {"data": int, "model": int}, {})
    calls += keywords(kvjax.Storage, {"kind": str, "headroom": float}, {})
    jobs = {"batch_size": int, "shard_rows": int | None, "order": str, "format": str, "input": str, "output": str}
    calls += keywords(functools.partial(kvjax.batch.run, tiny_model), jobs, {"input": "in.jsonl", "output": "out"})
    calls += keywords(load, {"name": str, "dtype": str, "mesh": str}, {"name": "no such model"})
    for name in POLICIES:
        cls = policies.registry()[name]
        calls += keywords(cls, dict(hostile.fields(cls)), {})
    for about, call, must in hostile.sample(random.Random(SEED), calls, 800):
        judge.call(about, call, must)
    judge.verdict(800)


def test_configurations(judge, tmp_path):
    draw = random.Random(SEED)
    tree = {"temperature": 0.5, "policy": {"razor": {"ratio": 0.4, "inner": {"slimkv": {}}}}, "stop": ["a"], "seed": 1}
    path = tmp_path / "flags.yaml"
    for _ in range(120):
        path.write_bytes(hostile.broken_yaml(tree, draw))
        judge.command(["generate", "hi", "--config", str(path)], False)
    judge.verdict(120)
