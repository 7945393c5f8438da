"""Without lm-evaluation-harness its command says in one sentence what to install."""

from __future__ import annotations

import sys

from kvjax.cli.main import main


def test_the_command_names_the_extra(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith(("lm_eval", "kvjax.eval.harness"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["lm-eval", "--tasks", "arc_easy"]) == 1
    said = capsys.readouterr().err
    how = "install the extra lm-eval, in the clone of kvjax: pip install '.[lm-eval]'"
    assert said == f"kvjax: This needs lm-evaluation-harness; {how}.\n"
