"""What tests of the commands that measure have in common: a run that keeps compiled programs, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def run_through(cli: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], out: Path, names: list[str]) -> Any:
    """Run a command, which must leave just these files in ``out``; what was compiled stays for the next test."""
    monkeypatch.setattr("jax.clear_caches", lambda: None)
    ran = cli(*words)
    assert ran.code == 0, ran.err
    assert sorted(path.name for path in out.iterdir()) == names
    return ran


def assert_refused(cli: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], out: Path, sentence: str) -> None:
    """The command is refused with a sentence that says so, before a model is loaded or a folder made."""
    monkeypatch.setattr("kvjax.cli.first_steps.load", lambda *_, **__: pytest.fail("the model was loaded"))
    ran = cli(*words)
    assert ran.code == 2 and sentence in ran.sentence
    assert not out.exists()
