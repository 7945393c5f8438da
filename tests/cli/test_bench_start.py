"""``kvjax bench start``: its tables and refusals."""

from __future__ import annotations

import json

from kvjax.bench import first_hour, machine


def test_the_report_has_both_tables_and_the_machine(cli, monkeypatch, tmp_path):
    monkeypatch.setattr(
        first_hour, "measure_seconds", lambda *_: [first_hour.Seconds("a short prompt", 12.34, 1.25, 9.87, 0.55)]
    )
    monkeypatch.setattr(first_hour, "count_programs", lambda policy: first_hour.Programs(policy, 3, 0, 10))
    saved = tmp_path / "start.json"
    ran = cli("bench", "start", "--policy", "full", "--markdown", "--json", str(saved))
    assert ran.code == 0 and "| a short prompt" in ran.out and "12.3 s" in ran.out and "1.25 s" in ran.out
    assert "9.9 s" in ran.out and "0.55 s" in ran.out
    assert "| full" in ran.out and machine.sentence(machine.describe())[:20] in ran.out
    assert json.loads(saved.read_text())["programs"] == [
        {"policy": "full", "conversation": 3, "late": 0, "requests": 10}
    ]
    ran = cli("bench", "start", "--repetitions", "0")
    assert ran.code == 2 and "--repetitions is 0" in ran.sentence
