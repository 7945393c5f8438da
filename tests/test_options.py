"""The options of a generation: written once, taken as a value or as keywords, and known to help and type checkers."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax import errors
from kvjax.options import FIELDS, ChatKeywords, GenerationKeywords, JobKeywords, ReadKeywords, RequestKeywords

USER = Path(__file__).parent / "typing" / "user.py"


def test_keywords_for_type_checkers_are_the_fields():
    assert GenerationKeywords.__annotations__.keys() == FIELDS.keys()
    found = {name: annotation.__forward_arg__ for name, annotation in GenerationKeywords.__annotations__.items()}
    assert found == {name: field.type for name, field in FIELDS.items()}


def test_a_plan_without_options_is_that_of_a_generation_without_options():
    parameters = inspect.signature(kvjax.plan).parameters
    shared = parameters.keys() & FIELDS.keys()
    assert shared >= {"policy", "storage", "max_new_tokens", "memory_limit", "reserve_tokens", "prompt_logprobs"}
    assert {name: parameters[name].default for name in shared} == {name: FIELDS[name].default for name in shared}


def test_every_default_passes_its_own_check():
    options = kvjax.GenerationOptions()
    assert dataclasses.replace(options) == options and hash(options) == hash(kvjax.GenerationOptions())


def test_numpys_numbers_are_numbers(tiny_model, tmp_path):
    options = kvjax.GenerationOptions(max_new_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.int32(7))
    assert [type(getattr(options, name)) for name in ("max_new_tokens", "temperature", "seed")] == [int, float, int]
    assert (
        kvjax.generate(tiny_model, "a", options).tokens
        == kvjax.generate(tiny_model, "a", max_new_tokens=3, temperature=0.5, seed=7).tokens
    )
    policy = kvjax.RazorAttention(inner=kvjax.KeyDiff(budget=np.int64(20)), heads=((0, 0),))
    chat = kvjax.Chat(tiny_model, policy=policy, max_new_tokens=np.int64(2))
    chat.send("Hello")
    chat.save(tmp_path / "chat")
    assert kvjax.Chat.load(tmp_path / "chat", tiny_model, max_new_tokens=2).policy == chat.policy
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    files = tmp_path / "in.jsonl", tmp_path / "out"
    report = kvjax.batch.run(tiny_model, *files, batch_size=np.int64(2), shard_rows=np.int64(1), max_new_tokens=2)
    assert report.answered == 2 and len(report.files) == 2


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda lm, cache: kvjax.generate(lm, "x", cache=cache, consume_cache="no"), "consume_cache is 'no'"),
        (lambda lm, cache: kvjax.stream_generate(lm, "x", cache=cache, consume_cache=None), "consume_cache is None"),
        (lambda lm, cache: kvjax.plan(lm, prompt_tokens=5, prompt_logprobs="yes"), "prompt_logprobs is 'yes'"),
        (lambda lm, cache: cache.row(0.5), "no row 0.5; its rows are 0 to 0"),
        (lambda lm, cache: cache.row("0"), "no row '0'"),
        (lambda lm, cache: cache.row(1), "no row 1"),
        (lambda lm, cache: kvjax.concatenate(cache), "takes a list of caches"),
        (lambda lm, cache: kvjax.save_cache(None, cache, lm), "is None; give a path"),
        (lambda lm, cache: kvjax.load_cache(3, lm), "is 3; give a path"),
        (lambda lm, cache: kvjax.generate(lm, "a", context=[{"role": "user", "content": "x"}]), "messages were given"),
        (lambda lm, cache: kvjax.score(lm, "a", [{"role": "user", "content": "x"}]), "holds a message"),
        (lambda lm, cache: kvjax.Chat(lm, system=3), "system is 3; give text"),
        (lambda lm, cache: kvjax.Chat("smollm2"), r"kvjax\.load"),
        (
            lambda lm, cache: kvjax.generate(lm, "x", policy=kvjax.LagKV),
            r"LagKV is a class of policies; .* kvjax\.LagKV\(\)",
        ),
    ],
)
def test_natural_mistakes_are_one_sentence(tiny_model, ask, says):
    cache = kvjax.read(tiny_model, "abcdef")
    with pytest.raises(kvjax.UsageError, match=says):
        ask(tiny_model, cache)
    assert kvjax.generate(tiny_model, "x", cache=cache, max_new_tokens=1).tokens


def test_options_of_sampling_are_said_to_change_nothing_at_temperature_0(tiny_model, capsys):
    errors.say_once.cache_clear()
    for _ in range(2):
        kvjax.generate(tiny_model, "x", n=2, top_k=3, min_p=0.1, max_new_tokens=2, progress=False)
    assert (
        capsys.readouterr().err
        == "kvjax: At temperature 0, which is greedy decoding, n, top_k, min_p change nothing.\n"
    )
    kvjax.generate(tiny_model, "x", top_p=0.5, max_new_tokens=2, progress=False)
    assert capsys.readouterr().err.endswith(" greedy decoding, top_p changes nothing.\n")
    kvjax.generate(tiny_model, "x", n=2, top_p=0.5, temperature=0.5, max_new_tokens=2, progress=False)
    kvjax.generate(tiny_model, "x", n=2, max_new_tokens=0, progress=False)
    kvjax.generate(tiny_model, "x", max_new_tokens=2, progress=False)
    assert capsys.readouterr().err == ""


def test_what_a_prompt_shows_of_caches_has_no_arrays(tiny_model):
    cache = kvjax.read(tiny_model, "abcdef " * 9, policy="lagkv:ratio=0.5,lag=8")
    rounds = kvjax.generate(tiny_model, "abcdef", policy="round:watershed=1", max_new_tokens=2).cache
    assert repr(cache).startswith("Cache(rows=1, layers=2, policy=LagKV(") and f"nbytes={cache.nbytes:,}" in repr(cache)
    assert repr(rounds).startswith("Conversation(rows=1, rounds=[1], policy=RoundAttention(")
    assert "array" not in (repr(cache) + repr(rounds)).lower() and len(repr(cache)) < 300
    shapes = jax.eval_shape(lambda held: held, cache)
    assert repr(shapes).startswith("Cache(rows=1, layers=2, ")


@pytest.mark.parametrize(
    ("function", "keywords"),
    [
        (kvjax.generate, GenerationKeywords),
        (kvjax.stream_generate, GenerationKeywords),
        (kvjax.Chat, ChatKeywords),
        (kvjax.batch.run, JobKeywords),
        (kvjax.Engine.submit, RequestKeywords),
        (kvjax.read, ReadKeywords),
        (kvjax.score, ReadKeywords),
    ],
)
def test_help_shows_every_option_with_its_default(function, keywords):
    parameters = inspect.signature(function).parameters
    shown = set(keywords.__annotations__)
    assert {name: parameters[name].default for name in shown} == {name: FIELDS[name].default for name in shown}
    assert FIELDS.keys() & parameters.keys() == shown and "keywords" not in parameters
    for name in shown:
        assert re.search(rf"^ +{name}: {re.escape(FIELDS[name].metadata['help'])}", function.__doc__, re.MULTILINE)
        assert f"{name}: {FIELDS[name].metadata['help']}" in kvjax.GenerationOptions.__doc__


def test_keywords_take_the_place_of_fields(tiny_model):
    options = kvjax.GenerationOptions(policy="streamingllm:budget=16", max_new_tokens=4, temperature=1.0, seed=3)
    by_value = kvjax.generate(tiny_model, "hello", options)
    by_keyword = kvjax.generate(
        tiny_model, "hello", policy="streamingllm:budget=16", max_new_tokens=4, temperature=1.0, seed=3
    )
    both = kvjax.generate(tiny_model, "hello", options, seed=4, max_new_tokens=5)
    other = kvjax.generate(tiny_model, "hello", dataclasses.replace(options, seed=4, max_new_tokens=5))
    assert by_value.tokens == by_keyword.tokens and both.tokens == other.tokens != by_value.tokens
    assert by_value.cache.policy == by_keyword.cache.policy == both.cache.policy != kvjax.Full()
    *_, last = kvjax.stream_generate(tiny_model, "hello", options, seed=4, max_new_tokens=5)
    assert last.output.tokens == both.tokens
    assert kvjax.Chat(tiny_model, options, seed=4).send("hello").tokens == both.tokens[:4]


def test_one_value_says_how_a_text_is_read_and_how_it_is_answered(tiny_model):
    """Of reading and scoring, the fields that say how a cache is made."""
    told = []
    options = kvjax.GenerationOptions(policy="snapkv:ratio=0.5,window=4", max_new_tokens=3, logprobs=True, stop="zz")
    cache = kvjax.read(tiny_model, "abcdef " * 9, options, progress=told.append)
    assert cache.policy == kvjax.policies.parse(options.policy) and "prefill" in {event.stage for event in told}
    every = kvjax.GenerationOptions(policy="round:watershed=1", prompt_logprobs=True)  # which no rounds have
    assert kvjax.read(tiny_model, "abcdef", every).rounds
    asked = kvjax.generate(tiny_model, "ghi", options, policy=None, cache=cache)
    assert asked.tokens == kvjax.generate(tiny_model, "ghi", options, context="abcdef " * 9).tokens
    given = {"cache": cache, "way": "decode"}
    scored = kvjax.score(tiny_model, "ghi", asked.tokens, options, policy=None, **given, progress=told.append)
    assert scored.logprobs == asked.logprobs == kvjax.score(tiny_model, "ghi", asked.tokens, **given).logprobs


def test_what_is_no_option_is_one_sentence(tiny_model):
    for function in (kvjax.generate, kvjax.stream_generate):
        with pytest.raises(
            kvjax.UsageError, match=r"takes no 'tempratur'; did you mean 'temperature'\? it takes cache, "
        ):
            function(tiny_model, "hello", tempratur=1)
        with pytest.raises(kvjax.UsageError, match=r"options is \{'seed': 1\}; give a kvjax.GenerationOptions"):
            function(tiny_model, "hello", {"seed": 1})
        with pytest.raises(kvjax.UsageError, match=r"logprobs is 1; give True or False."):
            function(tiny_model, "hello", logprobs=1)
    with pytest.raises(kvjax.UsageError, match=r"stream_generate takes no 'n'; it takes cache"):
        kvjax.stream_generate(tiny_model, "hello", n=2)
    with pytest.raises(kvjax.UsageError, match=r"batch\.run takes no 'batchsize'; did you mean 'batch_size'\?"):
        kvjax.batch.run(tiny_model, "in.jsonl", "out", batchsize=2)
    with pytest.raises(kvjax.UsageError, match=r"read takes no 'onse'; did you mean 'once'\? it takes chat, memory_"):
        kvjax.read(tiny_model, "hello", onse=True)
    with pytest.raises(kvjax.UsageError, match=r"score takes no 'temperature'; it takes cache, chat, context, memory_"):
        kvjax.score(tiny_model, "hello", " you", temperature=1.0)
    with pytest.raises(kvjax.UsageError, match=r"Chat takes no 'sytem'; did you mean 'system'\?"):
        kvjax.Chat(tiny_model, sytem="Be brief.")
    with pytest.raises(kvjax.UsageError, match=r"leave chat=False out"):
        kvjax.Chat(tiny_model, kvjax.GenerationOptions(chat=False))
    with pytest.raises(kvjax.UsageError, match=r"temperature is -1; give a number of at least 0."):
        kvjax.GenerationOptions(temperature=-1)


def test_every_option_is_a_flag_with_its_help_and_default():
    from kvjax.cli.main import root_command

    for command, keywords in {"generate": GenerationKeywords, "batch": JobKeywords, "chat": ChatKeywords}.items():
        flags = {parameter.name: parameter for parameter in root_command().commands[command].params}
        assert FIELDS.keys() & flags.keys() == keywords.__annotations__.keys()
        for name in keywords.__annotations__:
            field = FIELDS[name]
            assert flags[name].help.startswith(field.metadata["help"].removesuffix(".")), name
            assert f"--{name.replace('_', '-')}" in flags[name].opts


def test_a_type_checker_knows_what_a_users_calls_return():
    tool = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("pyright is not installed; the extra dev has it")
    done = subprocess.run(
        [tool, "--outputjson", "--pythonpath", sys.executable, str(USER)],
        capture_output=True,
        text=True,
        cwd=USER.parents[2],
    )
    said: dict[int, list[tuple[str, str]]] = {}
    for item in json.loads(done.stdout)["generalDiagnostics"]:
        said.setdefault(item["range"]["start"]["line"], []).append((item["severity"], item["message"]))
    lines = USER.read_text(encoding="utf-8").splitlines()
    wanted = {number: line.split("  # ")[1] for number, line in enumerate(lines) if "  # " in line}
    assert said.keys() == wanted.keys(), "every expectation has its line, and no other line is spoken of"
    for number, expected in wanted.items():
        if expected == "refused":
            assert {severity for severity, _ in said[number]} == {"error"}, lines[number]
        else:
            ((severity, message),) = said[number]
            assert severity == "information" and message.endswith(f' is "{expected}"'), (lines[number], message)


def test_names_for_type_checkers_are_the_public_ones():
    import ast

    tree = ast.parse(Path(kvjax.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    named = {alias.asname for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names}
    from kvjax import policies

    assert named - {None} == set(kvjax.__all__) - set(policies.__all__)
    assert typing.cast(list, kvjax.__all__) == sorted(kvjax.__all__) == dir(kvjax)
