"""``docs/howto/kernel_form.md``: its code runs exactly as printed, and its form is the one that is dispatched."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from pallas_kernels.ragged_decode import IMPLEMENTATIONS

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/kernel_form.md"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the page registers a form for CPUs")
def test_the_page_adds_a_form(tmp_path, monkeypatch):
    """Blocks run in order in an empty folder; the form is gone afterwards."""
    monkeypatch.setattr(IMPLEMENTATIONS, "functions", dict(IMPLEMENTATIONS.functions))
    monkeypatch.setattr(IMPLEMENTATIONS, "order", dict(IMPLEMENTATIONS.order))
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "kernel_form"}
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)):
        exec(compile(block, f"{PAGE.name}, block {i + 1}", "exec"), names)
    with pytest.raises(ValueError, match="already has an implementation 'plain'"):
        IMPLEMENTATIONS.register("plain", names["decode"])

    calls = []
    monkeypatch.setitem(IMPLEMENTATIONS.functions, "plain", lambda p: calls.append(p) or names["decode"](p))
    checks, case = names["TestPlainDecode"](), names["Case"]
    checks.check(case(((130, 17), (64, 0)), (5, 2), head_dim=64, dtype="int8", page_size=32))
    assert len(calls) == len(checks.layouts)
    checks.check(case(((70, 3),), (5, 1), soft_cap=3.0))  # refused, and answered by another form
