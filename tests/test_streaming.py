"""Stop strings and ids, streams and Ctrl-C on a tiny model."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import kvjax

PROMPT = np.random.default_rng(2).integers(0, 256, 20).tolist()
DRAWN = dict(temperature=1.0, seed=7, max_new_tokens=60)


@pytest.fixture(scope="module")
def free(tiny_model):
    """What comes without anything that stops it."""
    return kvjax.generate(tiny_model, PROMPT, **DRAWN)


def plain(text: str, start: int, size: int = 1) -> str:
    """A stretch of whole characters of ``text``, at or after ``start``."""
    return next(text[i : i + size] for i in range(start, len(text)) if "\ufffd" not in text[i : i + size])


def test_text_is_cut_at_the_first_stop_string(tiny_model, free):
    near, far = plain(free.text, 10), plain(free.text, 30, 2)
    for stops in ([far], [far, near], [near, near + "never"], near, (near + "never", "nor this")):
        listed = [stops] if isinstance(stops, str) else list(stops)
        output = kvjax.generate(tiny_model, PROMPT, stop=stops, **DRAWN)
        found = [at for at in (free.text.find(stop) for stop in listed) if at >= 0]
        assert output.text == (free.text[: min(found)] if found else free.text)
        assert output.finish_reason == ("stop" if found else "length")
        assert output.tokens == free.tokens[: len(output.tokens)]
        if found:  # the token that completed it is the last one
            shorter = tiny_model.tokenizer.decode(output.tokens[:-1])
            assert not any(stop in shorter for stop in listed)


def test_stop_ids_end_the_answer_and_are_its_last_token(tiny_model, free):
    for ids in ([free.tokens[9]], np.array(free.tokens[4:6]), (np.int64(free.tokens[20]),)):
        first = min(free.tokens.index(int(i)) for i in ids)
        output = kvjax.generate(tiny_model, PROMPT, stop_token_ids=ids, **DRAWN)
        assert output.finish_reason == "stop" and output.tokens == free.tokens[: first + 1]
    assert kvjax.generate(tiny_model, PROMPT, stop_token_ids=(), **DRAWN).tokens == free.tokens


def test_the_models_own_end_of_text_is_not_part_of_the_text(tiny_model):
    end = tiny_model.stop_token_ids[0]
    params = tiny_model.params
    outputs = kvjax.generate(tiny_model, PROMPT, n=64, temperature=3.0, seed=1, max_new_tokens=60)
    assert params is tiny_model.params
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert ended  # of 64 x 60 nearly uniform draws
    for output in outputs:
        assert (end in output.tokens) == (output.finish_reason == "stop")
        assert output.tokens.index(end) == len(output.tokens) - 1 if end in output.tokens else len(output.tokens) == 60
        assert "<|" not in output.text


@pytest.mark.parametrize("kind", ["free", "stopped", "withheld", "none", "logprobs"])
def test_pieces_are_the_output(tiny_model, free, kind):
    stop = {"stopped": [plain(free.text, 25)], "withheld": [free.text[-1] + "never"]}.get(kind, ())
    options = DRAWN | {"stop": stop, "logprobs": kind == "logprobs"} | ({"max_new_tokens": 0} if kind == "none" else {})
    if kind == "withheld" and "\ufffd" in stop[0]:
        options["stop"] = ["never"]
    whole = kvjax.generate(tiny_model, PROMPT, **options)
    pieces = list(kvjax.stream_generate(tiny_model, PROMPT, **options))
    assert all(piece.output is None for piece in pieces[:-1])
    output = pieces[-1].output
    assert output.tokens == whole.tokens == sum((piece.tokens for piece in pieces), ())
    assert output.text == whole.text == "".join(piece.text for piece in pieces)
    assert output.finish_reason == whole.finish_reason and output.logprobs == whole.logprobs
    if kind != "none":
        assert len(pieces) > 2 and max(len(piece.tokens) for piece in pieces) <= 8


def test_streams_refuse_at_the_call(tiny_model):
    for options in ({"n": 2}, {"tempratur": 1}, {"stop_token_ids": [-1]}, {"temperature": -1}, {"policy": "lagk"}):
        with pytest.raises(kvjax.UsageError):
            kvjax.stream_generate(tiny_model, PROMPT, **options)
    with pytest.raises(kvjax.UsageError, match="one prompt"):
        kvjax.stream_generate(tiny_model, [PROMPT])


@pytest.fixture
def own_handler():
    """Ctrl-C as Python starts with, whatever runs the tests."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are handled in the main thread, and this test runs in another")
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, previous)


ENDLESS = dict(policy="streamingllm:sink=4,window=20,positions=cache", max_new_tokens=100_000, stop_token_ids=())


def test_an_abandoned_stream_gives_ctrl_c_back(tiny_model, own_handler):
    stream = kvjax.stream_generate(tiny_model, PROMPT, **ENDLESS)
    next(stream)
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    stream.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert kvjax.generate(tiny_model, PROMPT, **(ENDLESS | {"max_new_tokens": 3})).finish_reason == "length"


def test_ctrl_c_returns_what_there_is(tiny_model, own_handler):
    kvjax.generate(tiny_model, PROMPT, **(ENDLESS | {"max_new_tokens": 70}))  # compiled before the clock runs
    before = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    output = kvjax.generate(tiny_model, PROMPT, **ENDLESS)
    assert 0.4 < time.monotonic() - before < 30
    assert output.finish_reason == "interrupted" and len(output.tokens) > 1
    assert output.stats.generated_tokens == len(output.tokens) == output.stats.seen - len(PROMPT) + 1
    whole = kvjax.generate(tiny_model, PROMPT, **(ENDLESS | {"max_new_tokens": 40}))
    assert output.tokens[:40] == whole.tokens[: len(output.tokens[:40])]
    following = kvjax.generate(tiny_model, PROMPT, cache=output.cache, max_new_tokens=5)
    assert len(following.tokens) == 5 and following.stats.seen == output.stats.seen + 1 + len(PROMPT) + 4


def test_a_second_ctrl_c_is_an_error_as_usual(tiny_model, own_handler):
    stream = kvjax.stream_generate(tiny_model, PROMPT, **ENDLESS)
    next(stream)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    pieces = list(stream)
    assert pieces[-1].output.finish_reason == "interrupted"


def test_a_handler_installed_meanwhile_stays(tiny_model, own_handler):
    def mine(*_):
        return None

    stream = kvjax.stream_generate(tiny_model, PROMPT, **ENDLESS)
    next(stream)
    signal.signal(signal.SIGINT, mine)
    stream.close()
    assert signal.getsignal(signal.SIGINT) is mine
    kvjax.generate(tiny_model, PROMPT, max_new_tokens=1)  # with someone's handler there, it stays too
    assert signal.getsignal(signal.SIGINT) is mine
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_generate_too(tiny_model):
    found = []
    thread = threading.Thread(target=lambda: found.append(kvjax.generate(tiny_model, PROMPT, max_new_tokens=5)))
    thread.start()
    thread.join()
    assert len(found[0].tokens) == 5
