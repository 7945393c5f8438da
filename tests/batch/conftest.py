"""Jobs on the tiny model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.batch_rows import SIZE, write_rows

from kvjax.text.detokenizer import text_of


class Runner:
    """Runs jobs in one temporary folder: (rows or file, output's name, options) to (report, output's folder)."""

    def __init__(self, lm, home: Path):
        self._lm, self._home = lm, home

    def folder(self, name: str) -> Path:
        return self._home / name

    def __call__(self, rows, name="out", *, lm=None, **options):
        from kvjax import batch

        path = rows if isinstance(rows, Path) else write_rows(self._home / f"{name}.jsonl", rows)
        given = {"max_new_tokens": 6, "batch_size": SIZE, "progress": False} | options
        return batch.run(lm or self._lm, path, self.folder(name), **given), self.folder(name)


class QuickEngine:
    """Answers without a model: a prompt's tokens backwards, of as many requests an iteration as it has slots."""

    def __init__(self, lm, policy, storage, *, slots, prompt_tokens, new_tokens, memory_limit):
        self.size, self.loop, self.slots, self.waiting = slots, self, self, []
        self.prompt_tokens = prompt_tokens

    def holds(self, prompt_tokens, new_tokens):
        return prompt_tokens <= self.prompt_tokens

    def row_of(self, request, *, number, limit):
        return SimpleNamespace(request=request, limit=limit, told=None, output=None, error=None, ended=False)

    def add(self, row):
        self.waiting.append(row)

    @property
    def idle(self):
        return not self.waiting

    def iterate(self):
        now, self.waiting = self.waiting[: self.size], self.waiting[self.size :]
        for row in now:
            ids = row.request.prompts[0][::-1][: row.limit]
            options = row.request.options
            read = [None] + [-0.25] * (len(row.request.prompts[0]) - 1)
            scores = {
                "logprobs": [-0.5] * len(ids) if options.logprobs else None,
                "prompt_logprobs": read if options.prompt_logprobs else None,
            }
            text = text_of(row.request.lm.tokenizer, ids, options.stop_strings)
            row.output, row.ended = SimpleNamespace(text=text, tokens=ids, finish_reason="stop", **scores), True
            row.on_change(row)

    def close(self):
        self.waiting.clear()


@pytest.fixture
def quick(monkeypatch):
    """Jobs without the model."""
    from kvjax.batch import work

    monkeypatch.setattr(work, "EngineCore", QuickEngine)
    return QuickEngine


@pytest.fixture
def run(tiny_model, tmp_path):
    return Runner(tiny_model, tmp_path)
