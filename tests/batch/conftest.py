"""Jobs on the tiny model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.batch_rows import SIZE, write_rows


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


@pytest.fixture
def quick(monkeypatch):
    """Answers without the model: a prompt's tokens backwards, one chunk a batch."""
    from kvjax.batch import work

    def answer(request, between):
        between()
        found = [ids[::-1][:limit] for ids, limit in zip(request.prompts, request.limits, strict=True)]
        return [
            SimpleNamespace(text=str(ids), tokens=ids, finish_reason="stop", logprobs=None, prompt_logprobs=None)
            for ids in found
        ]

    monkeypatch.setattr(work, "answer", answer)


@pytest.fixture
def run(tiny_model, tmp_path):
    return Runner(tiny_model, tmp_path)
