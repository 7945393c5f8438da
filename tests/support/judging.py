"""Tries hostile requests and files: what a model would run is replaced, and what is not refused well is kept."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support import hostile

import kvjax
from kvjax.checkpoints.load import load, weights_dtype
from kvjax.cli.main import main
from kvjax.errors import KvjaxError
from kvjax.sharding.mesh import parse_mesh

#: Of everything that is drawn.
SEED = 8


class Reached(BaseException):
    """The request was accepted; what it would have run has not been."""


def reached(*_: Any, **__: Any) -> Any:
    raise Reached


#: What runs a model, measures, downloads or joins other processes.
RUNS = (
    "kvjax.runtime.prefill_batches:read_prompts", "kvjax.rounds.strategy:read_question",
    "kvjax.batch.batch_run:_Run.run",
    "kvjax.eval.compare:Comparison.run", "kvjax.eval.round_questions:RoundComparison.run",
    "kvjax.eval.recommend.measure:measure", "kvjax.eval.suites.runner:Runner",
    "kvjax.eval.suites.data:DataFolder.download",
    "kvjax.eval.positions:retained_positions", "kvjax.eval.question_answer:last_round",
    "kvjax.bench.measurements:Bench", "kvjax.bench.cold_start:measure_startup", "kvjax.bench.first_hour:measure",
    "kvjax.model.decoder:random_decoder", "pallas_kernels.bench.decode:run", "pallas_kernels.tune:run",
    "kvjax.calibrate.retrieval:_scores", "kvjax.calibrate.divergence:question_mass",
    "kvjax.calibrate.filters:forward_layers", "kvjax.calibrate.kvzip_scorer:_collected",
    "kvjax.calibrate.head_gates:train",
    "kvjax.checkpoints.hub:_from_hub", "kvjax.checkpoints.hub:_gguf_from_hub", "kvjax.checkpoints.hub:_download",
)  # fmt: skip


TALK = {"messages": [{"role": role, "content": f"{role} {i}"} for i in range(9) for role in ("user", "assistant")][:-1]}
TOPICS = {
    "prompt": "Now the record start. "
    + "".join(f"USER: I would like to discuss the topic of {t}. \n ASSISTANT: Yes. \n " for t in ("tea", "bees"))
    + "Now the record ends. Which was first?",
    "topics": ["tea", "bees"],
}
SESSIONS = {
    "question": "Where?",
    "answer": "Rome",
    "answer_session_ids": ["a"],
    "haystack_session_ids": ["a", "b"],
    "haystack_sessions": [[{"role": "user", "content": "Rome"}, {"role": "assistant", "content": "Nice"}]] * 2,
}


def prepare(tiny_model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``folder``, with files that commands read, and go there; what runs a model says so instead."""
    for name in RUNS:
        module, _, attribute = name.partition(":")
        *owners, last = attribute.split(".")
        monkeypatch.setattr(functools.reduce(getattr, owners, importlib.import_module(module)), last, reached)

    def loaded(name: str, dtype: Any = None, mesh: Any = None, **_: Any) -> Any:
        weights_dtype(dtype)
        if (over := parse_mesh(mesh)) is not None:
            _ = over.jax
        return tiny_model if name == "smollm2-135m-instruct" else load(name, progress=False)

    def joined(coordinator: Any = None, *_: Any, **__: Any) -> None:
        if coordinator is None:
            raise ValueError("coordinator_address is not known")  # what JAX says where there is no cluster
        raise Reached

    monkeypatch.setattr("jax.distributed.initialize", joined)
    monkeypatch.setattr(kvjax, "load", loaded, raising=False)
    monkeypatch.setattr(kvjax, "load_config", lambda name, **_: loaded(name).config, raising=False)
    monkeypatch.delenv("KVJAX_TRACEBACK", raising=False)
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("in.jsonl").write_text('{"prompt": "hi"}\n')
    Path("talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in (TALK, TOPICS, SESSIONS)))
    Path("flags.yaml").write_text("temperature: 0.5\n")
    Path("texts/longbench").mkdir(parents=True)
    Path("texts/longbench/trec.jsonl").write_text('{"input": "Who?", "context": "Text", "answers": ["x"]}\n')
    Path("texts/long.txt").write_text("Some words of a text. " * 100)


class Judge:
    """Tries requests and keeps those that were not refused as they should be."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        self._folder, self._capsys, self._before = folder, capsys, hostile.listing(folder)
        self.tried, self.refused, self.wrong = 0, 0, list[str]()

    def command(self, words: list[str], must_refuse: bool) -> None:
        """A command line, in this process."""
        self._capsys.readouterr()
        try:
            code = main(words)
        except Reached:
            code = None
        said = self._capsys.readouterr().err
        lines = said.splitlines()
        whole = len(lines) == 1 and said.startswith("kvjax: ")
        self._judge(words, code, said if whole or code in (None, 0) else None, must_refuse)

    def call(self, about: Any, function: Callable[[], Any], must_refuse: bool) -> None:
        """A call of the library."""
        code, said = 0, ""
        try:
            function()
        except Reached:
            pass
        except KvjaxError as error:
            code, said = 2, str(error)
        except Exception as error:  # noqa: BLE001  whatever else it is, it is wrong
            code, said = -1, f"{type(error).__name__}: {str(error)[:200]}"
        self._judge(about, code, said if code >= 0 else None, must_refuse, said)

    def _judge(self, about: Any, code: int | None, said: str | None, must_refuse: bool, error: str = "") -> None:
        self.tried += 1
        after = hostile.listing(self._folder)
        if code in (None, 0):
            good = not must_refuse
        else:
            self.refused += 1
            good = code in (1, 2) and said is not None and len(said) < 300 and "Unexpected" not in said
            good = good and "\0" not in said and after == self._before
        if not good:
            left = sorted(set(after.items()) ^ set(self._before.items()))
            self.wrong.append(f"{hostile.shown(about)}: {code}, {(said or error)[:400]!r}, {left[:3]}")
        self._before = after

    def verdict(self, most: int) -> None:
        """Fail with what was wrong; at least half of what is hostile is refused."""
        assert not self.wrong, f"{len(self.wrong)} of {self.tried}:\n" + "\n".join(self.wrong[:20])
        assert self.tried >= most and self.refused > self.tried / 2, (self.tried, self.refused)


def try_files(
    judge: Judge, path: Path, texts: Iterable[bytes], read: Callable[[], Any], must_refuse: bool = False
) -> None:
    """Read a file with each of these contents in it."""
    for text in texts:
        path.write_bytes(text)
        judge._before = hostile.listing(path.parent)
        judge._folder = path.parent
        judge.call((path.name, text), read, must_refuse)
