"""The command line run in this process, on the tiny model, with what it printed."""

from __future__ import annotations

import dataclasses
import io
import sys

import pytest


@dataclasses.dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line an error prints; fails when there is a traceback or more than one line."""
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("kvjax: "), self.err
        return lines[0].removeprefix("kvjax: ")


@pytest.fixture
def cli(monkeypatch, capsys, tiny_model):
    """Run ``kvjax ARGUMENTS`` with the tiny model in place of every named one."""
    import kvjax
    from kvjax.cli.main import main

    monkeypatch.setattr(kvjax, "load", lambda name, **_: tiny_model, raising=False)
    monkeypatch.setattr(kvjax, "load_config", lambda name, **_: tiny_model.config, raising=False)
    monkeypatch.delenv("KVJAX_TRACEBACK", raising=False)

    def run(*arguments: str, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        compiling = "generate read chat batch bench compare compare-rounds eval picture".split()
        kept = arguments[0] in compiling and arguments[1:2] not in (("kernels",), ("decode",), ("start",))
        cached = ("--no-compile-cache",) if kept else ()
        alone = ("--num-processes", "1") if arguments[0] == "eval" else ()  # JAX runs already, and joins nobody
        code = main([*arguments, *cached, *alone])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
