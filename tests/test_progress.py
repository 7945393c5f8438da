"""What a call tells of itself while it runs, and to whom."""

from __future__ import annotations

import io
import time

import jax
import numpy as np
import pytest
import toys

import kvjax
from kvjax import progress
from kvjax.batch.counts import Counts
from kvjax.cache.buckets import rows_multiplied
from kvjax.eval.suites import estimate
from kvjax.live_line import LogLine, NotebookLine, TerminalLine, display, shown
from kvjax.progress import Event, Reporter, reporter, showing, stage, telling
from kvjax.runtime import prefill_speed


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


def test_a_call_tells_its_stages_in_order(tiny_model):
    events: list[Event] = []
    kvjax.generate(tiny_model, "hello " * 7, max_new_tokens=6, stop_token_ids=[], progress=events.append)
    kinds = list(dict.fromkeys(event.stage for event in events if event.stage != "compile"))
    assert kinds == ["prefill", "decode"]
    read = [event for event in events if event.stage == "prefill"]
    assert read[0].total > 30 and not read[0].finished and read[-1].finished
    assert [event.done for event in events if event.stage == "decode"][-1] == 6
    compiled = {event.what: (event.done, event.total) for event in events if event.stage == "compile"}
    numbers = {"prefill fresh": (1, 2), "decode chunk": (2, 2)}
    assert compiled.items() <= numbers.items()  # some were compiled by other tests


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["prefill_fresh", "decode_chunk"]),
        ({"max_new_tokens": 0}, ["prefill_fresh"]),
        ({"context": "some text"}, ["prefill_fresh", "prefill_onto", "decode_chunk"]),
        ({"policy": "round:watershed=1"}, ["prefill_fresh", "decode_chunk"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else None,
)
def test_the_programs_of_a_call_are_known(tiny_model, monkeypatch, options, names):
    """Every program that a call runs is one of those it announced."""
    from kvjax.sharding import compile_thread

    ran, call = [], compile_thread.call

    def noted(jitted, name, *arguments, **static):
        ran.append(name)
        return call(jitted, name, *arguments, **static)

    monkeypatch.setattr(compile_thread, "call", noted)
    place = Reporter(function=lambda event: None)
    with telling(place):
        kvjax.generate(tiny_model, "hello", **({"max_new_tokens": 3, "stop_token_ids": []} | options))
    assert list(place.programs) == names == list(dict.fromkeys(ran))


def test_a_program_a_kind_of_layer_is_counted_each():
    """Layers with a window and global ones have programs of one name."""
    lm = toys.tiny_model(num_layers=8, windows=(16, None) * 4)
    events: list[Event] = []
    options = {"max_new_tokens": 2, "stop_token_ids": [], "progress": events.append}
    kvjax.generate(lm, "a few words", context="and what was before them", **options)
    found = [(e.what, e.done, e.total) for e in events if e.stage == "compile" and e.what.startswith("prefill layer")]
    fresh, onto = "prefill layer fresh", "prefill layer onto"
    assert list(dict.fromkeys(found)) == [(fresh, 1, 5), (fresh, 2, 5), (onto, 3, 5), (onto, 4, 5)]


def test_false_and_pipes_show_nothing_and_callers_decide(tiny_model, capsys):
    events: list[Event] = []
    kvjax.generate(tiny_model, "hello", max_new_tokens=2, progress=False)
    assert not reporter(None).visible  # pytest's standard error is no terminal
    with showing(events.append):
        kvjax.generate(tiny_model, "hello", max_new_tokens=2, progress=False)
        assert not events
        kvjax.generate(tiny_model, "hello", max_new_tokens=2)
    assert events and capsys.readouterr() == ("", "")
    with pytest.raises(kvjax.UsageError, match=r"^progress is 'yes'; give None, True, False or a function"):
        kvjax.generate(tiny_model, "hello", progress="yes")
    with pytest.raises(kvjax.UsageError, match="progress is 3"):
        kvjax.load("none", progress=3)


def test_streams_tell_between_their_pieces_alone(tiny_model):
    events: list[Event] = []
    place = None
    for piece in kvjax.stream_generate(tiny_model, "hello", max_new_tokens=20, progress=events.append):
        assert progress.current() is not place and not progress.current().visible
        place = progress.current() if piece.output else None
    assert events[0].stage == "prefill"


def test_what_a_line_says():
    assert str(Event("prefill", "", 3.0, 1234.0, 6000.0, "tokens", 310.4, 15.6, True)) == (
        "prefill ~1,234 of 6,000 tokens, ~310 tokens/s, ~16 s left"
    )
    assert str(Event("prefill", "", 3.2, None, 6000.0)) == "prefill 6,000 tokens, 3 s"
    assert (
        str(Event("compile", "decode chunk", 4.0, 3, 3, "programs")) == "compiling decode chunk (program 3 of 3), 4 s"
    )
    assert str(Event("compile", "grow", 4.0, None, None, "programs")) == "compiling grow, 4 s"
    assert str(Event("load", "org/name", 1.0, 98e6, 271e6, "bytes", 50e6, 3.4)) == (
        "loading org/name 98 of 271 MB, 3 s left"
    )
    assert str(Event("job", "kvjax batch:", 80, 600, 1200, "prompts", 7.5, 80, note="310 tokens/s")) == (
        "kvjax batch: 600 of 1,200 prompts, 310 tokens/s, 1:20 min left"
    )
    assert str(Event("job", "kvjax batch:", 2, unit="prompts")) == "kvjax batch, 2 s"
    assert str(Event("decode", "", 5, 100, 256, "tokens", 20.0, 7300)) == (
        "decode 100 of 256 tokens, 20 tokens/s, 2:01 h left"
    )


def test_estimates_are_marked_and_end_when_they_were_too_short(monkeypatch):
    events: list[Event] = []
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    with showing(events.append) as place, stage("prefill", total=1000, expected=10) as made:
        now[0] = 4.0
        assert (made.event().done, made.event().rate, made.event().left) == (400, 100, 6) and made.event().estimated
        with stage("compile", "x", unit="programs"):
            now[0] = 7.0
        assert made.event().left == 6 and made.seconds == 4  # compiling is no part of it
        now[0] = 20.0
        assert made.event().left is None and not made.event().estimated
        place.tick()
    assert events[-1].finished and events[-2].seconds == 17


def test_what_is_known_takes_the_place_of_an_estimate(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    with showing(lambda event: None), stage("prefill", total=1000, expected=10) as made:
        now[0] = 2.0
        progress.advance("decode", 100)  # not this stage
        assert made.event().estimated
        progress.advance("prefill", 100)
        now[0] = 4.0
        progress.advance("prefill", 100)
        found = made.event()
        assert (found.done, found.rate, found.left, found.estimated) == (200, 50, 16, False)
        now[0] = 5.0  # nothing new is known: the rate stays, and the time goes on
        assert (made.event().rate, made.event().left) == (50, 15)
        now[0] = 50.0
        assert made.event().left is None


def test_a_line_is_drawn_after_a_second_and_taken_away(terminal, monkeypatch):
    monkeypatch.setattr(progress, "SILENCE", 0.3)
    monkeypatch.setattr(progress, "_REDRAW", 0.05)
    with telling(Reporter(TerminalLine(terminal))):
        with stage("load", "quick"):
            time.sleep(0.1)
        assert terminal.getvalue() == ""
        with stage("load", "slow"):
            time.sleep(0.8)
            with stage("download", "file"):
                time.sleep(0.2)
    text = terminal.getvalue()
    assert "quick" not in text and text.index("loading slow") < text.index("downloading file") < text.rindex("\x1b[K")
    # The cursor stays where it is: what is streamed goes on there.
    assert text.count("\x1b7") == text.count("\x1b8") and "\n" not in text and text.endswith("\x1b[K")


def test_the_job_stays_in_view():
    job, inner = Event("job", "kvjax batch:", 9, 1, 3, "prompts"), Event("prefill", "", 2)
    assert shown([job, Event("decode", "", 1), inner]) == "kvjax batch: 1 of 3 prompts, 9 s; prefill, 2 s"
    assert shown([job]) == "kvjax batch: 1 of 3 prompts, 9 s"


def test_the_place_decides_what_is_shown(terminal, monkeypatch):
    assert isinstance(display(terminal), TerminalLine)
    assert display(io.StringIO()) is None and isinstance(display(io.StringIO(), log=True), LogLine)
    monkeypatch.setenv("TERM", "dumb")
    assert display(terminal) is None


def test_a_log_has_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr("kvjax.live_line.LOG_SECONDS", 0.0)
    log = io.StringIO()
    line = LogLine(log)
    line.draw([Event("job", "kvjax batch:", 9, 1, 3, "prompts")])
    line.clear()
    assert log.getvalue() == "kvjax batch: 1 of 3 prompts, 9 s\n"


def test_a_notebook_has_one_output_that_changes(monkeypatch):
    published = []

    class Handle:
        def update(self, data, raw):
            published.append(("update", data["text/plain"]))

    def show(data, raw, display_id):
        published.append(("new", data["text/plain"]))
        return Handle()

    monkeypatch.setattr("IPython.display.display", show)
    line = NotebookLine()
    line.clear()
    line.draw([Event("load", "x", 2)])
    line.draw([Event("load", "x", 3)])
    line.clear()
    assert published == [("new", "loading x, 2 s"), ("update", "loading x, 3 s"), ("update", "")]


def test_in_a_kernel_it_is_a_notebook(monkeypatch, terminal):
    from types import SimpleNamespace

    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: SimpleNamespace(kernel=object()))
    assert isinstance(display(terminal), NotebookLine)
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: SimpleNamespace())  # IPython at a terminal
    assert isinstance(display(terminal), TerminalLine)


def test_counts_of_a_job_say_how_far_it_is():
    events: list[Event] = []
    with showing(events.append), stage("job", "kvjax batch:", unit="prompts") as made:
        counts = Counts()
        counts.start(1_234, made)
        counts.skip(34)
        time.sleep(0.3)
        counts.add([{"prompt_tokens": 3, "generated_tokens": 5}] * 599 + [{"error": "bad"}])
    assert (events[-1].done, events[-1].total) == (600, 1200) and events[-1].note.endswith(" tokens/s")
    assert (counts.answered, counts.failed, counts.prompt_tokens) == (599, 1, 3 * 599)


@pytest.fixture
def speeds(monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prefill_speed, "_speeds", {})
    return tmp_path / "cache" / "prefill_speed.json"


def test_earlier_prompts_tell_how_long_one_takes(speeds):
    config = toys.tiny_config()
    short, long = prefill_speed.work(config, 1, 256), prefill_speed.work(config, 1, 25_600)
    assert long > 100 * short  # attention grows with the square
    assert prefill_speed.work(config, 2, 256, 50) > 2 * short
    assert prefill_speed.work(config, 1, 0) == 0
    together = rows_multiplied(1, 256)
    assert prefill_speed.work(config, 1, 3) == prefill_speed.work(config, 1, together)
    assert prefill_speed.work(config, 1, together) < prefill_speed.work(config, 1, together + 1)
    assert prefill_speed.expected_seconds(config, long) is None
    prefill_speed.note(config, short, 0.01, keep=True)  # too short a time to tell anything
    assert prefill_speed.expected_seconds(config, long) is None and not speeds.exists()
    prefill_speed.note(config, short, 2.0, keep=False)
    assert prefill_speed.expected_seconds(config, long) == pytest.approx(2 * long / short) and not speeds.exists()
    prefill_speed.note(config, long, 100.0, keep=True)
    prefill_speed.note(config, short, 2.0, keep=True)  # says less than the long one
    assert prefill_speed.expected_seconds(config, short) == pytest.approx(100 * short / long)


def test_short_prompts_do_not_tell_how_long_a_run_of_long_ones_takes(speeds):
    lm, day = toys.tiny_model(), 86_400.0
    read = prefill_speed.work(lm.config, 1, 4096)
    prefill_speed.note(lm.config, prefill_speed.work(lm.config, 1, 40), day, keep=True)
    assert prefill_speed.expected_seconds(lm.config, read) > day
    assert estimate.work_seconds(lm, [(2, 4096)], 1) < 60
    prefill_speed.note(lm.config, read, day, keep=True)
    assert estimate.work_seconds(lm, [(2, 4096)], 1) == pytest.approx(2 * day, rel=0.01)
    # A later process that has read a short one alone knows what the long one told.
    prefill_speed._speeds.clear()
    prefill_speed.note(lm.config, prefill_speed.work(lm.config, 1, 40), day, keep=False)
    assert estimate.work_seconds(lm, [(2, 4096)], 1) == pytest.approx(2 * day, rel=0.01)


def test_speeds_are_kept_for_the_next_process(speeds, monkeypatch):
    config = toys.tiny_config()
    prefill_speed.note(config, 1e6, 2.0, keep=True)
    monkeypatch.setattr(prefill_speed, "_speeds", {})
    assert prefill_speed.expected_seconds(config, 3e6) == pytest.approx(6.0)
    assert prefill_speed.expected_seconds(toys.tiny_config(num_layers=9), 3e6) is None
    for content in ("", "[1]", '{"a": 3}', '{"a": [0, 1]}', "null", "\x00"):
        speeds.write_text(content)
        assert prefill_speed.expected_seconds(config, 3e6) is None
    speeds.unlink()
    speeds.mkdir()
    prefill_speed.note(config, 1e6, 2.0, keep=True)  # a place that cannot be written keeps nothing
    assert prefill_speed.expected_seconds(config, 3e6) == pytest.approx(6.0)


def test_loading_tells_its_bytes(tmp_path):
    from support import gguf_files

    folder = gguf_files.write_folder(gguf_files.case("llama_gqa"), tmp_path / "m")
    events: list[Event] = []
    lm = kvjax.load(folder, progress=events.append)
    assert {event.stage for event in events} == {"load"} and events[-1].finished
    size = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(lm.params))
    assert events[-1].done == events[-1].total == size


def test_who_is_told_changes_no_job(tiny_model):
    one, other = (kvjax.GenerationOptions(progress=value) for value in (None, print))
    assert one == other and hash(one) == hash(other)
