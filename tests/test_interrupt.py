"""Ctrl-C at any time: answered at once, nothing lost, and a process that ends well."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import kvjax
from kvjax import interrupt, waiting
from kvjax.interrupt import BrokenOff, breakably, interruptible, never_lost
from kvjax.session import Session
from kvjax.sharding import compile_thread

ROOT = Path(__file__).resolve().parent.parent
#: Seconds within which Ctrl-C is answered; tests share their machine with others.
AT_ONCE = 3.0


@pytest.fixture(autouse=True)
def own_handler():
    """Ctrl-C as Python starts with, whatever runs the tests; what a test broke off is waited for."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are handled in the main thread, and this test runs in another")
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, previous)
    waiting.wait_for_abandoned()


class Presser:
    """Presses Ctrl-C once, shortly after a stage has begun; given as ``progress=``."""

    #: Whether one is about to press.
    waiting = False

    def __init__(self, stage: str, what: str = "", wait: float = 0.2):
        self._stage, self._what, self._wait = stage, what, wait
        self.pressed: float | None = None
        self._timer: threading.Timer | None = None

    def __call__(self, event: kvjax.progress.Event) -> None:
        if self._timer is None and event.stage == self._stage and self._what in event.what:
            Presser.waiting = True
            self._timer = threading.Timer(self._wait, self._press)
            self._timer.start()

    def _press(self) -> None:
        self.pressed, Presser.waiting = time.monotonic(), False
        os.kill(os.getpid(), signal.SIGINT)

    def check_answered(self) -> None:
        assert self.pressed is not None, "the stage never came"
        assert time.monotonic() - self.pressed < AT_ONCE


@pytest.fixture
def slow(monkeypatch):
    """The compilation in which Ctrl-C is pressed takes five seconds more, in the compiler."""
    real = jax.stages.Lowered.compile

    def compile(self, *arguments):
        if Presser.waiting:
            time.sleep(5)
        return real(self, *arguments)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)


@pytest.fixture
def lm(request):
    """A model whose programs no other test has compiled."""
    return toys.tiny_model(num_layers=1 + ("round" in request.node.name), max_position=600 + len(request.node.name))


def test_ctrl_c_while_a_prompt_is_compiled(lm, slow):
    press = Presser("compile", "prefill")
    with pytest.raises(KeyboardInterrupt):
        kvjax.generate(lm, "hello", max_new_tokens=4, progress=press)
    press.check_answered()
    waiting.wait_for_abandoned()
    assert kvjax.generate(lm, "hello", max_new_tokens=4).finish_reason in ("length", "stop")


@pytest.mark.slow
def test_ctrl_c_while_a_larger_cache_is_compiled_gives_what_there_is(lm, slow):
    lm = dataclasses.replace(lm, stop_token_ids=(258,))  # which it does not say
    options = {"max_new_tokens": 590, "policy": "full"}
    press = Presser("compile", "grow")
    output = kvjax.generate(lm, "hello", progress=press, **options)
    press.check_answered()
    assert output.finish_reason == "interrupted" and len(output.tokens) > 1
    *_, last = kvjax.stream_generate(lm, "hello", progress=Presser("compile", "grow"), **options)
    assert last.output.tokens[: len(output.tokens)] == output.tokens
    following = kvjax.generate(lm, [1, 2, 3], cache=output.cache, max_new_tokens=2)
    assert following.stats.seen == output.stats.seen + 1 + 3 + 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "lagkv:ratio=0.5", "round:watershed=1"])
def test_a_turn_broken_off_while_it_compiles_leaves_the_conversation(lm, slow, policy):
    options = {"policy": policy, "max_new_tokens": 3}
    chat, other = kvjax.Chat(lm, **options), kvjax.Chat(lm, **options)
    for talk in (chat, other):
        talk.send("one")
    press = Presser("compile", "onto")
    chat.options = kvjax.GenerationOptions(**options, progress=press)
    changes = chat.changes
    with pytest.raises(KeyboardInterrupt):
        chat.send("two")
    press.check_answered()
    assert chat.changes == changes
    chat.options = kvjax.GenerationOptions(**options)
    assert chat.send("two").tokens == other.send("two").tokens


@pytest.mark.parametrize("policy", [None, "lagkv:ratio=0.5"])
def test_ctrl_c_while_a_prompt_is_read(tiny_model, monkeypatch, policy):
    options = {"policy": policy, "max_new_tokens": 3}
    chat, other = kvjax.Chat(tiny_model, **options), kvjax.Chat(tiny_model, **options)
    for talk in (chat, other):
        talk.send("one")
    press = Presser("prefill", wait=1)
    chat.options = kvjax.GenerationOptions(**options, progress=press)

    def far_from_ready(arrays, **_):
        breakably(lambda: waiting.in_thread(lambda: time.sleep(5)))
        return arrays

    with monkeypatch.context() as patched:
        patched.setattr("kvjax.session.ready", far_from_ready)
        with pytest.raises(KeyboardInterrupt):
            chat.send("two")
    press.check_answered()
    chat.options = kvjax.GenerationOptions(**options)
    assert chat.send("two").tokens == other.send("two").tokens


def test_a_device_that_computes_is_left_alone():
    work = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda i, x: x @ x, x))
    x = jnp.zeros((1000, 1000))
    jax.block_until_ready(work(x, 1))
    found = work(x, 150)  # seconds
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    before = time.monotonic()
    with interruptible(), pytest.raises(BrokenOff):
        waiting.ready(found)
    assert time.monotonic() - before < AT_ONCE and not found.is_ready()
    assert not np.asarray(found).any()


class Finalised:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


class Watched:
    def __init__(self) -> None:
        weakref.finalize(self, signal.raise_signal, signal.SIGINT)


@pytest.mark.parametrize("made", [Finalised, Watched])
def test_ctrl_c_while_python_cleans_up_is_told_once_more(capfd, made):
    def work() -> None:
        made()
        time.sleep(5)

    before = time.monotonic()
    with interruptible(), pytest.raises(BrokenOff):
        breakably(work)
    assert time.monotonic() - before < AT_ONCE and capfd.readouterr().err == ""


@pytest.mark.parametrize("made", [Finalised, Watched])
def test_ctrl_c_while_python_cleans_up_is_not_lost_in_a_command(capfd, made):
    before = time.monotonic()
    with never_lost(), pytest.raises(KeyboardInterrupt):
        made()
        time.sleep(5)
    assert time.monotonic() - before < AT_ONCE and capfd.readouterr().err == ""
    with never_lost(), pytest.raises(BrokenOff), interruptible():
        breakably(lambda: signal.raise_signal(signal.SIGINT))


def test_ctrl_c_that_comes_when_all_is_done_ends_what_comes_next(lm, monkeypatch):
    """As it would have a moment later; the answer is whole."""
    collect, whole = Session._collect, kvjax.generate(lm, "hello", max_new_tokens=1)

    def pressed(self, *args):
        signal.raise_signal(signal.SIGINT)
        return collect(self, *args)

    monkeypatch.setattr(Session, "_collect", pressed)
    with pytest.raises(KeyboardInterrupt):
        output = kvjax.generate(lm, "hello", max_new_tokens=1)
        time.sleep(5)
    assert output.tokens == whole.tokens and output.finish_reason == whole.finish_reason == "length"
    output = kvjax.generate(lm, "hello", max_new_tokens=9)
    time.sleep(0.1)  # it has been told: nothing comes later
    assert output.finish_reason == "interrupted"
    with never_lost():  # a command that is over
        kvjax.generate(lm, "hello", max_new_tokens=1)
    time.sleep(0.1)


@pytest.mark.parametrize("error", [kvjax.KvjaxError("x"), None])
def test_ctrl_c_outlives_errors_and_streams_that_nobody_reads_on(error):
    def stream():
        with interruptible():
            signal.raise_signal(signal.SIGINT)
            if error is not None:
                raise error
            yield

    reading = stream()
    with contextlib.suppress(kvjax.KvjaxError):
        next(reading)
    with pytest.raises(KeyboardInterrupt):
        reading.close()
        time.sleep(5)


def test_a_stream_that_is_dropped_later_tells_nobody(monkeypatch):
    def stream():
        with interruptible():
            signal.raise_signal(signal.SIGINT)
            yield

    monkeypatch.setattr(interrupt, "_STALE", 0.1)
    reading = stream()
    next(reading)
    time.sleep(0.2)
    reading.close()
    time.sleep(0.1)


def test_the_second_ctrl_c_is_not_lost_in_cleaning_up(capfd):
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGINT)
        Finalised()
        time.sleep(5)
    assert capfd.readouterr().err == ""


def test_ctrl_c_before_the_command_has_begun_is_its_sentence(monkeypatch, capsys):
    import kvjax.__main__
    from kvjax.cli import main

    def pressed():
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(main, "root_command", pressed)
    assert main.main(["plan"]) == 130 and capsys.readouterr().err == "kvjax: Interrupted.\n"
    monkeypatch.setattr(main, "main", pressed)
    assert kvjax.__main__.main() == 130 and capsys.readouterr().err == "kvjax: Interrupted.\n"


def test_the_second_ctrl_c_is_an_error_as_usual(lm):
    with interruptible() as held:
        signal.raise_signal(signal.SIGINT)
        assert held.requested
        with pytest.raises(BrokenOff):
            breakably(lambda: None)
        held.finishing = True  # what gives what there is, is done
        assert breakably(lambda: 3) == 3
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_errors_beside_are_the_callers():
    with pytest.raises(ZeroDivisionError):
        waiting.in_thread(lambda: 1 // 0)
    assert waiting.in_thread(lambda: threading.current_thread().name) == "kvjax-waiting"
    assert not waiting._running


def test_a_call_that_is_compiled_and_done_needs_no_thread(monkeypatch):
    @jax.jit
    def double(x):
        compile_thread.on_trace()
        return 2 * x

    assert int(compile_thread.call(double, "double", jnp.int32(3))) == 6
    monkeypatch.setattr(waiting, "in_thread", None)
    monkeypatch.setattr(compile_thread, "in_thread", None)
    assert int(compile_thread.call(double, "double", jnp.int32(4))) == 8
    assert int(waiting.ready(jnp.int32(4).block_until_ready())) == 4


def test_programs_within_programs_are_traced_with_them():
    @jax.jit
    def double(x):
        compile_thread.on_trace()
        return 2 * x

    def twice(x):
        return compile_thread.call(double, "double", compile_thread.call(double, "double", x))

    assert int(jax.jit(twice)(3)) == 12 and jax.eval_shape(twice, jnp.int32(3)).shape == ()
    with jax.disable_jit():
        assert int(twice(jnp.int32(3))) == 12
    # Traced already, it is compiled beside all the same.
    events: list[kvjax.progress.Event] = []
    jax.eval_shape(twice, jnp.float32(3))
    with kvjax.progress.showing(events.append):
        assert float(twice(jnp.float32(3))) == 12
    assert [event.finished for event in events if event.stage == "compile"][-1]


_TOY = """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, "tests")
    import {first}, jax, kvjax, toys
    jax.config.update("jax_disable_most_optimizations", True)
    lm = toys.tiny_model(num_layers={layers})
"""
_IN_A_SCRIPT = """
    kvjax.generate(lm, "hello", progress=lambda event: print(event.stage, flush=True))
"""
_AT_THE_TERMINAL = """
    kvjax.load = lambda *_, **__: lm
    from kvjax.cli.main import main
    sys.exit(main())
"""


def _started(code: str, *arguments: str, layers: int = 8, first: str = "jax", **streams) -> subprocess.Popen:
    script = textwrap.dedent(_TOY.format(layers=layers, first=first)) + textwrap.dedent(code)
    command = [sys.executable, "-c", script, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **streams)


def _broken_off(code: str, **given) -> tuple[subprocess.Popen, str, str, float]:
    """A script that Ctrl-C broke off while the compiler ran: what it said to its end, and how long that took."""
    process = _started(code, layers=40, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **given)
    assert process.stdout is not None
    told = 0
    for line in process.stdout:
        told += line == "compile\n"
        if told == 4:  # tracing is over, and the compiler runs for seconds
            break
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=120)
    assert "terminate" not in error and "Fatal" not in error, error
    return process, out, error, time.monotonic() - pressed


@pytest.mark.parametrize("first", ["jax", "kvjax.waiting"])
def test_a_script_that_ctrl_c_ends_while_something_compiles_ends_at_once(first):
    own = "    import atexit; atexit.register(print, 'its own', flush=True)\n"
    process, out, error, seconds = _broken_off(own + _IN_A_SCRIPT, first=first)
    assert error.rstrip().endswith("BrokenOff") and out.endswith("its own\n")
    assert process.returncode == -signal.SIGINT and seconds < AT_ONCE


@pytest.mark.slow
def test_a_script_that_goes_on_after_ctrl_c_ends_well():
    caught = _IN_A_SCRIPT.replace("kvjax.generate", "try: kvjax.generate").replace(
        "))\n", "))\n    except KeyboardInterrupt: sys.exit(7)\n"
    )
    process, _, error, _ = _broken_off(caught)
    assert process.returncode == 7 and not error


def test_a_script_that_leaves_an_engine_at_work_ends_well():
    left = """
    import time
    engine = kvjax.Engine(lm, slots=2, prompt_tokens=64, new_tokens=16)
    engine.submit("hello")
    time.sleep(0.3)
"""
    process = _started(left, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0 and not error


def test_the_command_shows_a_line_and_ends_at_once():
    leader, follower = pty.openpty()
    command = ("generate", "hello", "--no-compile-cache", "--max-new-tokens", "9")
    streams = dict(stdin=follower, stdout=follower, stderr=follower)
    process = _started(_AT_THE_TERMINAL, *command, layers=40, **streams)  # compiling the second takes seconds
    os.close(follower)
    seen, pressed = b"", None
    with contextlib.suppress(OSError):  # the terminal is gone when its process is
        while chunk := os.read(leader, 4096):
            seen += chunk
            if pressed is None and seen.count(b"compiling decode chunk (program 2 of 2)") > 1:
                pressed = time.monotonic()
                process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130 and pressed is not None
    assert time.monotonic() - pressed < AT_ONCE
    text = seen.decode()
    assert text.endswith("kvjax: Interrupted.\r\n") and "Traceback" not in text and "terminate" not in text
    assert text.rindex("\x1b[K") > text.rindex("compiling")  # the line is gone
    os.close(leader)
