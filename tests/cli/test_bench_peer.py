"""``kvjax bench --peer llama.cpp`` where llama-cpp-python is not installed."""

from __future__ import annotations

import sys

import pytest


def test_without_it_a_run_ends_before_the_model_is_loaded(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.delitem(sys.modules, "kvjax.bench.llama_cpp_peer", raising=False)
    monkeypatch.setattr("kvjax.load", lambda *_, **__: pytest.fail("loaded"), raising=False)
    ran = cli("bench", "--peer", "llama.cpp")
    assert ran.code == 1 and "needs llama-cpp-python" in ran.sentence
