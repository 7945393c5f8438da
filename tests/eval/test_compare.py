"""The comparison on a toy model: what it records, that replaying is exact, refusals, resuming, table and picture."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import threading
import time
import zlib

import jax
import numpy as np
import pytest
import toys
from support.scorers import random_scorer

from kvjax import files
from kvjax.cache.groups import parts
from kvjax.calibrate import save_profile
from kvjax.errors import DoesNotFit, KvjaxError, UsageError
from kvjax.eval import compare, entries, pictures, results
from kvjax.eval import comparison_report as report
from kvjax.eval.compare import Comparison
from kvjax.eval.entries import Entry, profile_of
from kvjax.eval.follow_ups import TURNS
from kvjax.eval.material import make_prompts
from kvjax.eval.recorded import can_replay, record, record_bytes
from kvjax.eval.results import AFTER, IN_VIEW, Estimate, Row, Scored, Settings
from kvjax.figures import new_figure, png
from kvjax.generation import generate
from kvjax.policies import Policy, Signals, parse
from kvjax.policies.window_layers import for_model
from kvjax.runtime.prefill_batches import read_prompts

LENGTH = 480
SETTINGS = Settings("needles", "float32", ("niah_single_1",), samples=2)
MACHINE = {"versions": {"jax": "1.0"}, "processor": "a processor", "cores": 2, "date": "2026-01-01T00:00:00"}


@pytest.fixture(scope="module")
def lm():
    return toys.needle_model()


@pytest.fixture(autouse=True)
def keep_programs(monkeypatch):
    """A comparison forgets its programs; other tests still need theirs."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


@pytest.fixture(scope="module")
def compared(lm):
    """The full cache, a ring at half, and one that is refused: StreamingLLM takes one size and is given two."""
    saved, said = [], []
    found = Comparison(lm, SETTINGS, save=lambda rows: saved.append(len(rows)), say=said.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "clear_caches", lambda: None)
        found.run([*entries.entries("streamingllm,streamingllm:window=9", [0.5])], [LENGTH])
    return found, saved, said


@pytest.mark.parametrize("policy", ["full", "snapkv:ratio=0.3,window=8", "h2o:ratio=0.2"])
def test_a_replayed_prompt_leaves_the_cache_that_reading_it_leaves(lm, policy):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 600, length).tolist() for length in (120, 64, 97)]
    made = record(lm.params, prompts)
    options = dict(policy=parse(policy), cache=None, consume=False, dtype=lm.params.dtype)
    # The whole prompts by a program of all layers, and their beginnings by one of a layer, as real models read.
    for left, alike in ((0, False), (40, True)):
        cut = [prompt[: len(prompt) - left] for prompt in prompts]
        real, logits = read_prompts(lm.params, cut, **options)
        replayed, again = read_prompts(made, cut, by_layers=lambda _, alike=alike: alike, **options)
        np.testing.assert_allclose(logits, again, atol=1e-5)  # products of other sizes round otherwise
        for a, b in zip(real.layers, replayed.layers, strict=True):
            assert np.array_equal(a.length, b.length)
            for one, other in zip(parts(a), parts(b), strict=True):
                np.testing.assert_allclose(*(valid_keys(part) for part in (one, other)), atol=1e-5)


@pytest.mark.parametrize(
    ("policy", "replays"),
    [
        ("keydiff:ratio=0.5", True),
        ("lagkv:ratio=0.5,prefill=chunked", False),
        ("kvzip:ratio=0.5", False),
        ("criticalkv:ratio=0.5", False),
        ("razor:ratio=0.9,heads=0.1,inner=kvzip", False),
    ],
)
def test_what_needs_the_model_is_not_replayed(lm, policy, replays):
    assert can_replay(for_model(parse(policy), lm.config), lm.config) == replays


@dataclasses.dataclass(frozen=True)
class Asking(Policy):
    """Keeps everything, and asks for one signal."""

    name: str

    @property
    def signals(self):
        kinds = {bool: True, int: 8, float: 0.5}
        return Signals(**{self.name: kinds[type(getattr(Signals(), self.name))]})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Signals) if field.name != "repeat"])
def test_whatever_is_asked_of_a_replayed_prompt_is_there(lm, name):
    policy, prompts = Asking(name), [[*range(3, 70)]]
    if name in ("outputs", "hidden"):
        assert not can_replay(policy, lm.config)
        return
    assert can_replay(policy, lm.config)
    options = dict(policy=policy, cache=None, consume=False, dtype=lm.params.dtype)
    _, logits = read_prompts(lm.params, prompts, **options)
    np.testing.assert_allclose(read_prompts(record(lm.params, prompts), prompts, **options)[1], logits, atol=1e-5)


def valid_keys(layer) -> np.ndarray:
    """Keys of the slots in use, zeros elsewhere."""
    batch, _, _, dim = layer.kv.shape
    keys = np.asarray(layer.kv.keys()).reshape(batch, len(layer.pages), -1, dim)
    used = np.arange(keys.shape[2]) < np.asarray(layer.length)[..., None]
    return np.where(used[..., None], keys, 0)


def test_a_records_size_is_what_it_takes(lm):
    made = record(lm.params, [[5] * 64, [6] * 10])
    assert made.nbytes == record_bytes(lm.config, 2, 64, 4)


@pytest.mark.slow
def test_a_row_is_what_generate_gives(lm, compared):
    """Scores, first tokens and bytes of a row, from the public functions and the same samples."""
    comparison, _, _ = compared
    ring = comparison.rows[1]
    prompts = make_prompts(lm, SETTINGS, "niah_single_1", LENGTH)
    caches = [o.cache for o in generate(lm, list(prompts.contexts), policy="streamingllm:ratio=0.5", max_new_tokens=0)]
    outputs = generate(lm, list(prompts.questions), cache=caches, max_new_tokens=prompts.room)
    (scored,) = ring.scored(AFTER)
    assert scored.first == tuple(output.tokens[0] for output in outputs)
    assert scored.scores == (0.0, 0.0), "a random model cannot know"
    full = np.mean([output.stats.full_cache_bytes for output in outputs])
    assert ring.live_bytes < 0.55 * ring.full_bytes < ring.full_bytes <= full
    # A comparison allocates exactly; a call has buckets of rows and tokens.
    assert ring.live_bytes < ring.allocated_bytes <= np.mean([output.stats.cache_bytes for output in outputs])
    (scored,) = ring.scored(IN_VIEW)
    outputs = generate(lm, prompts.wholes, policy="streamingllm:ratio=0.5", max_new_tokens=1)
    assert scored.first == tuple(output.tokens[0] for output in outputs)


def test_rows_of_a_comparison(compared):
    comparison, saved, said = compared
    full, ring, refused = comparison.rows
    assert [(row.policy, row.retained) for row in comparison.rows] == [
        ("full", None),
        ("streamingllm", 0.5),
        ("streamingllm:window=9", 0.5),
    ]
    assert saved == [1, 2, 3], "saved after every row"
    assert "exactly one" in refused.refused or "one of" in refused.refused
    assert refused.answers == () and refused.refused.count("\n") == 0
    for row in (full, ring):
        assert [(group.mode, group.task) for group in row.answers] == [
            (AFTER, "niah_single_1"),
            (IN_VIEW, "niah_single_1"),
            *((turn, "") for turn in TURNS),
        ]
        assert all(len(group.scores) == len(group.first) == 2 for group in row.answers)
        assert row.prefill_tokens_per_second > 0 and row.decode_tokens_per_second > 0
        assert 0 < row.compile_seconds < row.seconds
    assert full.live_fraction == pytest.approx(1)
    # A ring keeps the size its first prompt gave it: half of 378 tokens of context, while 431 were seen.
    assert ring.live_fraction == pytest.approx(0.5 * 378 / 431, abs=0.01)
    assert any("[3/3] streamingllm:window=9 at 0.5: " in line for line in said)


def test_what_is_there_is_not_measured_again(lm, compared):
    comparison, _, _ = compared
    saved = []
    again = Comparison(lm, SETTINGS, rows=comparison.rows, save=saved.append)
    again.run(entries.entries("streamingllm", [0.5]), [LENGTH])
    assert not saved and again.rows == comparison.rows


def test_what_did_not_fit_is_tried_again_and_other_refusals_are_not(lm, monkeypatch):
    """Making the prompts anew for a policy that is none for the model would take minutes at every start."""
    chosen, made = entries.entries("streamingllm,razor:heads=9.9", [0.5]), []
    monkeypatch.setattr("kvjax.eval.compare._mean_bytes", lambda *_: {})
    monkeypatch.setattr("kvjax.eval.compare.describe", lambda row: row.name)
    rows = ()
    for failing, wanted in ((True, 3), (False, 1), (False, 0)):
        said: list[str] = []
        again = Comparison(lm, SETTINGS, rows=rows, speed=False, say=said.append)

        def ask(asker, policy, prompts, failing=failing):
            if failing and "Streaming" in type(policy).__name__:
                raise DoesNotFit("Not now.")
            return ()

        monkeypatch.setattr(again, "_material", lambda *_: made.append(1) or ([], None))
        monkeypatch.setattr(again, "_ask", ask)
        again.run(chosen, [LENGTH])
        rows = again.rows
        assert len([line for line in said if line.startswith("[")]) == wanted
    assert len(made) == 2 and [row.refused is None for row in rows if row.policy == "streamingllm"] == [True]
    assert [row.retry for row in rows if row.policy.startswith("razor")] == [False]


def test_rows_of_a_profile_that_was_made_anew_are_not_kept(lm, tmp_path, monkeypatch):
    file = tmp_path / "p.yaml"
    chosen = [Entry(f"learned:profile={file}", 0.5)]
    found, said = [], []
    monkeypatch.setattr("kvjax.eval.compare._mean_bytes", lambda *_: {})
    monkeypatch.setattr("kvjax.eval.compare.describe", lambda row: row.name)
    for seed in (0, 0, 1):
        save_profile(random_scorer(lm.config, seed), file)
        again = Comparison(lm, SETTINGS, rows=found[-1] if found else (), speed=False, say=said.append)
        monkeypatch.setattr(again, "_material", lambda *_: ([], None))
        monkeypatch.setattr(again, "_ask", lambda *_: ())
        again.run(chosen, [LENGTH])
        found.append(again.rows)
        assert len(again.rows) == 1 and again.rows[0].profile == profile_of(chosen[0]) != ""
    assert len([line for line in said if "[1/1]" in line]) == 2, "measured once for each profile"
    assert profile_of(Entry("lagkv", 0.5)) == profile_of(Entry("no policy")) == ""


def test_ctrl_c_keeps_the_rows_before_it(lm, monkeypatch):
    import os
    import signal

    comparison = Comparison(lm, dataclasses.replace(SETTINGS, turns=False))
    real = Comparison._row

    def row(self, asker, entry, *rest):
        if entry.retained is not None:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, asker, entry, *rest)

    monkeypatch.setattr(Comparison, "_row", row)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job starts without
    with pytest.raises(KeyboardInterrupt):
        comparison.run(entries.entries("streamingllm", [0.5]), [LENGTH])
    assert [row.policy for row in comparison.rows] == ["full"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("made", ["make_prompts", "make_talks"])
def test_ctrl_c_ends_the_reading_of_samples_at_once(lm, monkeypatch, made):
    import os
    import signal

    read = threading.Event()

    def reads(*given):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        read.wait(20)  # as a program does

    monkeypatch.setattr(compare, "make_prompts", lambda *given: None)
    monkeypatch.setattr(compare, made, reads)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job starts without
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            Comparison(lm, SETTINGS).run([Entry("no policy")], [LENGTH])
        assert time.monotonic() - begun < 10
    finally:
        read.set()  # what was broken off goes on by itself


def scored(mode: str, *scores: float, task: str = "", first: tuple[int, ...] | None = None) -> Scored:
    return Scored(mode, task, scores, first or (1,) * len(scores))


def test_estimates():
    assert results.estimate([[1, 0, 1, 1]]) == Estimate(0.75, pytest.approx(0.25))
    # Two groups of equal weight: their errors add in squares, halved.
    both = results.estimate([[1, 0, 1, 1], [0, 0]])
    assert both.mean == 0.375 and both.error == pytest.approx(0.125)
    assert math.isnan(results.estimate([[1.0]]).error) and math.isnan(results.estimate([]).mean)


def rows_by_hand() -> list[Row]:
    answers = lambda a, b, first: (  # noqa: E731
        scored(AFTER, *a, task="t", first=first),
        scored(IN_VIEW, *b, task="t", first=first),
        *(scored(turn, *b) for turn in TURNS),
    )
    sizes = dict(full_bytes=1000.0, prefill_tokens_per_second=50.0, decode_tokens_per_second=7.0)
    return [
        Row(100, "lagkv", 0.25, answers=answers((0, 1), (1, 1), (5, 6)), live_bytes=250, allocated_bytes=300, **sizes),
        Row(100, "full", None, answers=answers((1, 1), (1, 1), (5, 7)), live_bytes=1000, allocated_bytes=1200, **sizes),
        Row(100, "lagkv", 0.5, answers=answers((1, 1), (1, 0), (5, 7)), live_bytes=500, allocated_bytes=550, **sizes),
        Row(100, "razor", 0.25, refused="It keeps more than that | always."),
    ]


def test_the_table_and_the_numbers_say_the_same():
    rows = rows_by_hand()
    numbers = report.summary(rows)
    table = report.table(numbers)
    cells = table.cells
    assert [line[1:3] for line in cells] == [["full", ""], ["lagkv", "0.5"], ["lagkv", "0.25"], ["razor", "0.25"]]
    assert all(len(line) == len(table.header) for line in cells)
    assert numbers[2][AFTER] == {"mean": 0.5, "error": pytest.approx(0.5)}
    assert numbers[2][f"{AFTER}, first token as full"]["mean"] == 0.5
    assert dict(zip(table.header, cells[2], strict=True)) == {
        "tokens": "100",
        "policy": "lagkv",
        "retained": "0.25",
        "asked after": "0.50 ± 0.50",
        "in view": "1.00 ± 0.00",
        "first token": "0.50 / 0.50",
        "first turn": "1.00 ± 0.00",
        "on theme": "1.00 ± 0.00",
        "off theme": "1.00 ± 0.00",
        "live": "250 B",
        "allocated": "300 B",
        "of full": "25.0%",
        "prefill tokens/s": "50",
        "decode tokens/s": "7",
    }
    assert cells[3][3] == "It keeps more than that | always." and set(cells[3][4:]) == {""}


def test_markdown_and_json_hold_the_same_rows():
    rows = rows_by_hand()
    made = report.report(SETTINGS, rows, MACHINE, "accuracy.png")
    text = made.markdown()
    lines = [line for line in text.splitlines() if line.startswith("| 100 | lagkv | 0.25 |")]
    assert lines[0] == "| " + " | ".join(report.table(report.summary(rows)).cells[2]) + " |"
    assert "that \\| always." in text and "![Accuracy against bytes](accuracy.png)" in text
    held = json.loads(made.json())
    assert held["summary"] == report.summary(rows) and held["machine"] == MACHINE
    assert held["settings"]["samples"] == 2 and len(held["rows"]) == 4


def test_results_are_read_back(tmp_path):
    path, rows = tmp_path / "results.json", rows_by_hand()
    assert results.read_rows(path, SETTINGS) == []
    files.write_atomically(path, report.report(SETTINGS, rows, MACHINE).json())
    assert results.read_rows(path, SETTINGS) == rows
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
    with pytest.raises(UsageError, match="with samples 2, and 3 is asked for"):
        results.read_rows(path, dataclasses.replace(SETTINGS, samples=3))
    for content in ("{", "[]", '{"format": 1}', '{"format": 1, "settings": {"tasks": []}, "rows": [3]}'):
        path.write_text(content)
        with pytest.raises(UsageError, match="no results of a comparison"):
            results.read_rows(path, SETTINGS)


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    path.write_text("before")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(KvjaxError, match="No space left"):
        files.write_atomically(path, "after")
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG whose chunks are all whole."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, kinds = 8, []
    while place < len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        body = data[place + 4 : place + 8 + size]
        assert zlib.crc32(body) == struct.unpack(">I", data[place + 8 + size : place + 12 + size])[0]
        kinds.append(kind)
        place += 12 + size
    assert kinds[0] == b"IHDR" and kinds[-1] == b"IEND"
    return struct.unpack(">II", data[16:24])


def test_the_picture_has_a_line_for_every_policy():
    figure = pictures.accuracy_figure(rows_by_hand())
    left, right = figure.axes
    assert left.get_legend_handles_labels()[1] == ["full", "lagkv"]
    assert right.get_title() == "question in view, prompts of 100 tokens"
    line = left.containers[0].lines[0]
    assert list(line.get_xdata()) == [25, 50] and list(line.get_ydata()) == [0.5, 1]
    assert list(right.containers[0].lines[0].get_ydata()) == [1, 0.5]
    width, height = png_size(png(figure))
    assert width > 1000 and height > 500
    png_size(png(pictures.accuracy_figure([Row(100, "razor", 0.25, refused="No.")])))


def test_of_many_policies_the_best_are_named():
    """Those that answer most come first, however they were asked; a policy with fewer sizes has fewer answers."""
    rows = [Row(100, "full", None, answers=(Scored("after", "niah", (1.0,), (1,)),), live_bytes=8, full_bytes=8)]
    for number in range(11):
        for share in (2,) if number == 10 else (2, 4):
            scored = Scored("after" if number % 2 else "in view", "niah", (number / 10,), (1,))
            answers = (scored, Scored("in view" if number % 2 else "after", "niah", (0.0,), (1,)))
            rows.append(Row(100, f"p{number}", share / 8, answers=answers, live_bytes=share, full_bytes=8))
    figure = pictures.accuracy_figure(rows)
    (legend,), (_, right) = figure.legends, figure.axes
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["full", "p9", "p8", "p7", "p6", "p5", "p10", "p4", "p3", "3 other policies"]
    grey = [line for line in right.lines if line.get_color() == pictures._LIGHT_GREY]
    assert [list(line.get_ydata()) for line in grey] == [[0, 0], [0, 0], [0.2, 0.2]]


def test_without_matplotlib_it_is_one_sentence(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(KvjaxError, match=r"pip install '\.\[eval\]'"):
        new_figure(1, 1)


def test_a_policy_spelt_in_two_ways_is_compared_once():
    assert [one.name for one in entries.entries("snapkv,SnapKV,tova", (0.5,))] == [
        "full",
        "snapkv",
        "tova",
    ]


def test_which_caches_are_compared():
    found = entries.entries("lagkv:lag=64,sink=4,streamingllm;lagkv:partition_ratio=0.5,full", [0.25, 0.5, 0.25])
    assert found == [
        Entry("full"),
        Entry("lagkv:lag=64,sink=4", 0.5),
        Entry("lagkv:lag=64,sink=4", 0.25),
        Entry("streamingllm", 0.5),
        Entry("streamingllm", 0.25),
        Entry("lagkv:partition_ratio=0.5"),
    ]
    assert found[1].policy() == parse("lagkv:lag=64,sink=4,ratio=0.5")
    assert found[3].policy() == parse("streamingllm:ratio=0.5") and found[0].policy() == parse("full")
    everything = {entry.name for entry in entries.entries("all", [0.5])}
    assert {"full", "lagkv", "streamingllm"} <= everything


def test_policies_are_told_apart_from_options():
    assert entries.split_policies("a:x=1,y=2, b ;c:z=(1,2),d") == ["a:x=1,y=2", "b", "c:z=(1,2)", "d"]
    with pytest.raises(UsageError, match="--policies is empty"):
        entries.split_policies(" ")


@pytest.mark.parametrize(
    "text", ["lagkv,", ",lagkv", "lagkv,,h2o", "lagkv;", ";lagkv", "a:x=1,;b", "lagkv:sink=4,", " , "]
)
def test_an_empty_item_is_no_policy(text):
    with pytest.raises(UsageError, match=r"^--policies has an empty item; write names with one comma between two"):
        entries.split_policies(text)


@pytest.mark.parametrize("share", [0, -0.5, 1.5, math.nan, math.inf])
def test_shares_out_of_range(share):
    with pytest.raises(UsageError, match="--retained holds"):
        entries.entries("lagkv", [0.5, share])


def test_bad_settings_are_one_sentence(lm):
    for bad, said in {
        (): "No task",
        ("niah_single_1", "niah_single_1"): "twice",
        ("passkey",): "no task 'passkey'",
    }.items():
        with pytest.raises(UsageError, match=said):
            Settings("m", "float32", bad)
    with pytest.raises(UsageError, match="samples is 0"):
        Settings("m", "float32", samples=0)
    with pytest.raises(UsageError, match="not within the model's context of 1024"):
        Comparison(lm, SETTINGS).run([Entry("full")], [LENGTH, 2000])
    with pytest.raises(UsageError, match="fewer samples or shorter lengths"):
        Comparison(lm, dataclasses.replace(SETTINGS, samples=10**9)).run([Entry("full")], [LENGTH])
