"""``kvjax bench start``, and ``kvjax bench`` of starting and long answers alone: tables and refusals."""

from __future__ import annotations

import functools
import json

from kvjax.bench import cold_start, first_hour, machine, measurements


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


def test_what_is_measured_without_a_case_is_reported_too(cli, monkeypatch, tmp_path):
    monkeypatch.setattr(cold_start, "measure_startup", lambda *_, **__: cold_start.Startup(1.5, 4.0, 2.5))
    monkeypatch.setattr(machine, "BandwidthMeter", functools.partial(machine.BandwidthMeter, 1 << 20))
    row = measurements.LongRow("tova:budget=8", 100, 120, 0.01, 0.02, 2.0, 64, 64)
    monkeypatch.setattr(measurements.Bench, "long", lambda self, many: [row])
    saved = tmp_path / "result.json"
    nothing = ("bench", "--batch", "", "--context", "", "--prefill", "", "--json", str(saved), "--markdown")
    ran = cli(*nothing, "--long-steps", "120")
    assert ran.code == 0 and "tova:budget=8" in ran.out and json.loads(saved.read_text())["long"][0]["many"] == 120
    ran = cli(*nothing, "--startup")
    assert ran.code == 0 and "1.5 s" in ran.out and json.loads(saved.read_text())["startup"]["cold_total"] == 4.0
