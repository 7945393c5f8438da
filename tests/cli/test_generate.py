"""``kvjax generate``: what it prints where, and that it says the same as the library."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

import kvjax
from kvjax import tables
from kvjax.session import Session


def test_streams_text_and_prints_stats_apart(cli, tiny_model):
    ran = cli("generate", "hello", "--max-new-tokens", "8")
    assert ran.code == 0
    assert ran.out.rstrip("\n") == kvjax.generate(tiny_model, "hello", max_new_tokens=8).text.rstrip("\n")
    for line in ("time to first token", "cache allocated", "full cache", "retained", "ended by"):
        assert line in ran.err


def test_json_is_one_object_with_every_number(cli, tiny_model):
    ran = cli("generate", "hello", "--max-new-tokens", "8", "--json", "--logprobs", "--policy", "lagkv:ratio=0.5")
    said = json.loads(ran.out)
    direct = kvjax.generate(tiny_model, "hello", max_new_tokens=8, logprobs=True, policy="lagkv:ratio=0.5")
    (output,) = said["outputs"]
    assert said["policy"] == "lagkv:ratio=0.5"
    assert output["text"] == direct.text
    assert output["tokens"] == list(direct.tokens)
    assert output["finish_reason"] == direct.finish_reason
    assert len(output["logprobs"]) == len(direct.tokens)
    assert output["stats"]["cache_bytes"] == direct.cache.nbytes


def test_dash_reads_standard_input(cli):
    typed = cli("generate", "hello wörld", "--max-new-tokens", "4", "--json")
    piped = cli("generate", "-", "--max-new-tokens", "4", "--json", stdin="hello wörld\n".encode())
    assert json.loads(typed.out)["outputs"][0]["text"] == json.loads(piped.out)["outputs"][0]["text"]


def test_several_prompts_and_samples(cli):
    ran = cli("generate", "one", "two", "--n", "2", "--temperature", "1", "--max-new-tokens", "4", "--json")
    outputs = json.loads(ran.out)["outputs"]
    assert len(outputs) == 4
    ran = cli("generate", "one", "two", "--max-new-tokens", "4")
    assert ran.code == 0 and "2 of 2" in ran.err


def test_flags_reach_the_library(cli, monkeypatch, tiny_model):
    seen = {}
    real = kvjax.generate

    def spy(lm, prompt, **keywords):
        seen.update(keywords)
        return real(lm, prompt, **keywords)

    monkeypatch.setattr(kvjax, "generate", spy, raising=False)
    ran = cli(
        *"generate hi --json --no-chat --max-new-tokens 2 --temperature 0.5 --top-k 9 --top-p 0.9 --min-p 0.1".split(),
        *"--repetition-penalty 1.1 --seed 5 --stop END --stop X --stop-token-ids 1,2 --memory-limit 2GB".split(),
        *"--context background --storage int8".split(),
    )
    assert ran.code == 0, ran.err
    assert seen == dict(
        policy="full",
        context="background",
        chat=False,
        max_new_tokens=2,
        temperature=0.5,
        top_k=9,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        seed=5,
        n=1,
        stop=("END", "X"),
        stop_token_ids=(1, 2),
        logprobs=False,
        prompt_logprobs=False,
        reserve_tokens=None,
        memory_limit=2 * 10**9,
        storage="int8",
    )


def test_context_from_a_file(cli, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("background", encoding="utf-8")
    seen = {}
    monkeypatch.setattr(kvjax, "stream_generate", lambda lm, prompt, **kw: seen.update(kw) or iter(()), raising=False)
    cli("generate", "hi", "--context", f"@{tmp_path / 'notes.txt'}")
    assert seen["context"] == "background"


def test_interrupted_generation_keeps_its_text(cli, monkeypatch, tiny_model):
    real = kvjax.stream_generate

    def interrupted(lm, prompt, **keywords):
        for piece in real(lm, prompt, **keywords):
            if piece.output is None:
                yield piece
            else:
                yield piece.__class__(piece.text, piece.tokens, _ended(piece.output, "interrupted"))

    monkeypatch.setattr(kvjax, "stream_generate", interrupted, raising=False)
    ran = cli("generate", "hello", "--max-new-tokens", "4")
    assert ran.code == 130
    assert ran.out.strip("\n") and "interrupted" in ran.err


def _ended(output, reason):
    import dataclasses

    return dataclasses.replace(output, finish_reason=reason)


@pytest.mark.parametrize("as_json", [True, False])
def test_ctrl_c_as_an_answer_is_done_loses_none_of_it(cli, monkeypatch, as_json):
    collect = Session._collect

    def pressed(self, *args):
        os.kill(os.getpid(), signal.SIGINT)
        return collect(self, *args)

    def slowly(function):
        return lambda *args: time.sleep(0.2) or function(*args)

    monkeypatch.setattr(Session, "_collect", pressed)
    for name in ("print_json", "print_stats"):
        monkeypatch.setattr(tables, name, slowly(getattr(tables, name)))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ran = cli("generate", "hello", "--max-new-tokens", "1", *["--json"] * as_json)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert ran.code == 0 and ran.out.strip() and "Interrupted" not in ran.err
