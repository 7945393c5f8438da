"""Stop strings and stop ids as tables that the compiled loop looks up, so that a new stop string does not recompile.

Stop strings become one automaton over bytes (Aho-Corasick), run over every token's bytes ahead of time: a table
state x token -> state. A string is found wherever it begins and ends, inside tokens or across them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Int

from kvjax.errors import UsageError

#: State 0 is the start; this one is reached when a stop string is complete, and never left.
FOUND = 1
_MOST_BYTES = 1000  # of stop strings: each may need a row of the table, which is as long as the vocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StopTable:
    """The tables that end a row.

    Attributes:
      next_state: [S, V] int16, S a power of two of at least 16.
      ids: [B, N] int32 token ids that end each row, padded with -1.
    """

    next_state: Int[Array, "S V"]
    ids: Int[Array, "B N"]

    def logical_axes(self) -> list[tuple[str | None, ...]]:
        """Every device of a mesh has all transitions, and its own rows' ids."""
        return [(), ("batch", None)]


def check_stop_strings(stop: Sequence[str]) -> None:
    """Refuse stop strings that would need too large a table."""
    size = sum(len(text.encode()) for text in stop)
    if size > _MOST_BYTES:
        raise UsageError(f"The stop strings have {size} bytes together; give at most {_MOST_BYTES}.")


def stop_table(
    stop: Sequence[str], ids: Sequence[int], token_bytes: Sequence[bytes], vocabulary: int, rows: int
) -> StopTable:
    """Compile stop strings and ids for a vocabulary (ids without bytes, as special tokens, change no state).

    They are those of all ``rows``.
    """
    found = transitions(stop, token_bytes, vocabulary)
    room = table_size(len(found))
    table = np.zeros((room, vocabulary), np.int16)
    table[: len(found)] = found
    return StopTable(*jax.device_put((table, padded_ids([ids] * rows))))


def table_size(least: int) -> int:
    """Rows, or columns, of a stop table that holds so many: a power of two of at least 16."""
    return max(16, 1 << (least - 1).bit_length()) if least else 16


def padded_ids(ids: Sequence[Sequence[int]]) -> np.ndarray:
    """[B, N] each row's ids, padded with -1."""
    padded = np.full((len(ids), table_size(max(map(len, ids), default=0))), -1, np.int32)
    for row, own in enumerate(ids):
        padded[row, : len(own)] = own
    return padded


def transitions(stop: Sequence[str], token_bytes: Sequence[bytes], vocabulary: int) -> np.ndarray:
    """[S, V] int16 the state that each token leads to: 0 is the start, FOUND is kept; S = 2 without stop strings."""
    check_stop_strings(stop)
    if not stop:
        return np.zeros((2, vocabulary), np.int16)
    goto = _automaton([text.encode() for text in stop])
    table = np.zeros((len(goto), vocabulary), np.int16)
    current = np.repeat(np.arange(len(goto), dtype=np.int16)[:, None], vocabulary, axis=1)
    lengths = np.array([len(token) for token in token_bytes[:vocabulary]], np.int32)
    lengths = np.pad(lengths, (0, vocabulary - len(lengths)))
    order = np.argsort(-lengths, kind="stable")
    for position in range(int(lengths.max(initial=0))):
        ids = order[: int((lengths > position).sum())]
        byte = np.array([token_bytes[i][position] for i in ids], np.uint8)
        current[:, ids] = goto[current[:, ids], byte]
    table[:] = current
    return table


def _automaton(patterns: Sequence[bytes]) -> np.ndarray:
    """Aho-Corasick transitions [states, 256] int16 of the patterns; any complete pattern leads to FOUND."""
    children: list[dict[int, int]] = [{}, {}]
    for pattern in patterns:
        state = 0
        for i, byte in enumerate(pattern):
            if i == len(pattern) - 1:
                children[state][byte] = FOUND
            elif children[state].get(byte) == FOUND:
                break  # a shorter stop string already ends here
            else:
                if byte not in children[state]:
                    children.append({})
                    children[state][byte] = len(children) - 1
                state = children[state][byte]
    goto = np.zeros((len(children), 256), np.int16)
    fail = [0] * len(children)
    goto[FOUND] = FOUND
    queue: deque[int] = deque()
    for byte, child in children[0].items():
        goto[0, byte] = child
        if child != FOUND:
            queue.append(child)
    while queue:
        state = queue.popleft()
        goto[state] = goto[fail[state]]
        for byte, child in children[state].items():
            if child != FOUND:
                fail[child] = int(goto[fail[state], byte])
                queue.append(child)
            # A suffix that completes a pattern wins over a longer one still under way.
            if goto[state, byte] != FOUND:
                goto[state, byte] = child
    return goto
