"""Stop strings compiled into a table, and text streamed around them, against searches in the whole text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.errors import UsageError
from kvjax.runtime.stopping import FOUND, stop_table
from kvjax.text.detokenizer import TextStream, text_of

# Tokens of every awkward kind: letters, words, halves of characters, several characters, nothing (special).
PIECES = [
    b"a",
    b"b",
    b"c",
    b"ab",
    b"abc",
    b"bca",
    b" ",
    b"\xc3",
    b"\xa9",
    "é".encode(),
    b"\xe2\x82",
    b"\xac",
    b"",
    b"a\xc3",
]
PIECES += ["€b".encode(), "😀".encode(), "😀".encode()[:3], "😀".encode()[3:]]


class Pieces:
    """A tokenizer of the pieces above."""

    special_ids = frozenset({PIECES.index(b"")})

    def token_bytes(self):
        return PIECES

    def decode(self, ids):
        return b"".join(PIECES[i] for i in ids).decode("utf-8", "replace")


token_lists = st.lists(st.integers(0, len(PIECES) - 1), max_size=14)
stop_lists = st.lists(st.text("abcé€😀", min_size=1, max_size=4), min_size=0, max_size=3)


def stopped_at(tokens: list[int], stops: list[str]) -> int | None:
    """Tokens until a stop string is complete, by searching all text after every token."""
    for count in range(1, len(tokens) + 1):
        text = b"".join(PIECES[i] for i in tokens[:count])
        if any(stop.encode() in text for stop in stops):
            return count
    return None


def run_table(tokens: list[int], stops: list[str]) -> int | None:
    next_state = np.asarray(stop_table(stops, (), PIECES, len(PIECES) + 3, 1).next_state)
    state = 0
    for count, token in enumerate(tokens, 1):
        state = next_state[state, token]
        if state == FOUND:
            return count
    return None


@settings(max_examples=150, deadline=None)
@given(token_lists, stop_lists)
def test_the_table_stops_where_a_search_in_the_whole_text_does(tokens, stops):
    assert run_table(tokens, stops) == stopped_at(tokens, stops)


@pytest.mark.parametrize(
    ("tokens", "stops", "count"),
    [
        (["a", "b", "c"], ["bc"], 3),
        (["abc"], ["b"], 1),
        (["a", "abc", "c"], ["abcc"], 3),
        (["a", "ab", "c"], ["abc"], 3),
        (["a", "b", "c"], ["ab", "abc"], 2),
        (["a", "b", "c"], ["abc", "ab"], 2),
        (["a", "b", "c"], ["abca", "bc"], 3),
        (["ab", "ab", "c"], ["ababc"], 3),
        (["b", "bca", "b"], ["ab"], 3),
        (["a", "b"], ["c"], None),
        (["a", "b"], ["abc"], None),
    ],
)
def test_tokens_and_strings_that_overlap(tokens, stops, count):
    ids = [PIECES.index(token.encode()) for token in tokens]
    assert run_table(ids, stops) == count == stopped_at(ids, stops)


def test_a_stop_is_found_across_a_special_token_and_inside_multi_byte_characters():
    nothing, head, tail = PIECES.index(b""), PIECES.index("😀".encode()[:3]), PIECES.index("😀".encode()[3:])
    assert run_table([0, nothing, 1], ["ab"]) == 3
    assert run_table([head, tail], ["😀"]) == 2
    assert run_table([head], ["😀"]) is None


def test_the_table_keeps_its_shape_for_short_stop_strings_and_few_ids():
    shapes = {
        stop_table(stop, ids, PIECES, 40, 3).next_state.shape + stop_table(stop, ids, PIECES, 40, 3).ids.shape
        for stop, ids in [((), ()), (("ab",), (1,)), (("abcabc", "é"), range(9))]
    }
    assert shapes == {(16, 40, 3, 16)}
    assert stop_table(("a" * 60,), range(20), PIECES, 40, 1).next_state.shape == (64, 40)
    with pytest.raises(UsageError, match="bytes together"):
        stop_table(("a" * 5000,), (), PIECES, 40, 1)


@settings(max_examples=200, deadline=None)
@given(token_lists, stop_lists, st.lists(st.integers(1, 4), min_size=14, max_size=14))
def test_pieces_are_certain_and_together_the_whole_text(tokens, stops, sizes):
    end = stopped_at(tokens, stops)
    tokens = tokens[:end]
    raw = b"".join(PIECES[i] for i in tokens)
    cuts = [at for at in (raw.find(stop.encode()) for stop in stops) if at >= 0]
    wanted = raw[: min(cuts)] if cuts else raw
    wanted = wanted.decode("utf-8", "replace")
    assert text_of(Pieces(), tokens, stops) == wanted
    stream, given_so_far, start = TextStream(Pieces(), stops), "", 0
    for size in sizes:
        given_so_far += stream.add(tokens[start : start + size])
        start += size
        # Never more than what the text is sure to begin with: no half character, no beginning of a stop string.
        assert wanted.startswith(given_so_far)
    assert given_so_far + stream.rest() == wanted


def test_valid_text_is_never_streamed_with_replacement_characters():
    text = "naïve €5 😀😀 café"
    pieces = sorted({bytes([byte]) for byte in text.encode()})

    class Bytes(Pieces):
        def token_bytes(self):
            return pieces

    stream = TextStream(Bytes(), ["zz"])
    given_so_far = [stream.add([pieces.index(bytes([byte]))]) for byte in text.encode()]
    assert "\ufffd" not in "".join(given_so_far) and "".join(given_so_far) + stream.rest() == text


def test_what_may_become_a_stop_string_is_withheld_and_given_back():
    stream = TextStream(Pieces(), ["abcb"])
    a, b, c = (PIECES.index(x) for x in (b"a", b"b", b"c"))
    assert [stream.add([token]) for token in (c, a, b, c, c, a, b)] == ["c", "", "", "", "abcc", "", ""]
    assert stream.rest() == "ab"


def test_the_first_space_is_as_the_tokenizer_decodes_it():
    class Sentencepiece(Pieces):
        """Leaves out one space where text begins."""

        def token_bytes(self):
            return [b" yes", b" no", b"", b"  "]

        def decode(self, ids):
            return b"".join(self.token_bytes()[i] for i in ids).decode().removeprefix(" ")

    assert text_of(Sentencepiece(), [2, 0, 1]) == "yes no"
    assert text_of(Sentencepiece(), [3, 1]) == "  no"
    stream = TextStream(Sentencepiece(), [" no"])
    assert [stream.add([2]), stream.add([0]), stream.add([0]), stream.add([1])] == ["", "yes", " yes", ""]
    assert text_of(Sentencepiece(), [1], [" no"]) == ""
