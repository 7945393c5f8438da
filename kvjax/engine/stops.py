"""The stop strings of all slots in one table: each request begins in a state of its own."""

from __future__ import annotations

import numpy as np

from kvjax.errors import UsageError
from kvjax.runtime.stopping import FOUND, table_size, transitions
from kvjax.text.tokenizer import Tokenizer

#: States that a table begins with: those of some sixty bytes of stop strings.
_STATES = 64
#: States that a table has at most: each is a row as long as the vocabulary.
_MOST_STATES = 2**12


class SharedStopTable:
    """The automata of several requests in one table of the loop; equal stop strings share one.

    Attributes:
      table: [S, V] int16, S a power of two of at least 64. A larger one is another compiled program, so it shrinks
        when the requests that needed it have ended; states that nobody uses any more are used again.
      changed: whether the table is another than at the last :meth:`taken`.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int):
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self.table = np.zeros((_STATES, vocabulary), np.int16)
        self.table[FOUND] = FOUND
        self.changed = True
        self._states: dict[tuple[str, ...], list[int]] = {}
        self._users: dict[tuple[str, ...], int] = {}

    def begin(self, strings: tuple[str, ...]) -> int:
        """The state in which a request with these stop strings begins; :meth:`end` once it has ended.

        Raises:
          UsageError: with those of the requests that run there would be too many.
        """
        if not strings:
            return 0
        if strings not in self._states:
            self._add(strings)
        self._users[strings] = self._users.get(strings, 0) + 1
        return self._states[strings][0]

    def end(self, strings: tuple[str, ...]) -> None:
        """A request with these stop strings has ended."""
        if not strings:
            return
        self._users[strings] -= 1
        if len(self.table) > _STATES and not self._users[strings]:
            self._shrink()

    def _shrink(self) -> None:
        """Leave out the states behind the last that somebody uses."""
        last = max((max(own) for strings, own in self._states.items() if self._users.get(strings)), default=0)
        size = max(table_size(last + 1), _STATES)
        if size < len(self.table):
            self._states = {strings: own for strings, own in self._states.items() if max(own) < size}
            self._users = {strings: count for strings, count in self._users.items() if strings in self._states}
            self.table, self.changed = self.table[:size].copy(), True

    def taken(self) -> np.ndarray:
        """The table as it now is."""
        self.changed = False
        return self.table

    def _add(self, strings: tuple[str, ...]) -> None:
        found = transitions(strings, self._tokenizer.token_bytes(), self._vocabulary)
        own = self._places(len(found) - 1)
        names = np.array([own[0], FOUND, *own[1:]], np.int16)
        self.table[own] = names[np.delete(found, FOUND, axis=0)]
        self._states[strings], self.changed = own, True

    def _places(self, count: int) -> list[int]:
        """States that nobody has; those of the strings that nobody uses, and a larger table, where there are none."""
        free = self._free()
        for strings in [*self._states]:
            if len(free) >= count:
                break
            if not self._users.get(strings):
                del self._states[strings]
                self._users.pop(strings, None)
                free = self._free()
        if len(free) < count:
            size = table_size(len(self.table) - len(free) + count)
            if size > _MOST_STATES:
                raise UsageError("The stop strings of the requests that run are too many together; give shorter ones.")
            self.table = np.concatenate([self.table, np.zeros((size - len(self.table), self._vocabulary), np.int16)])
            free = self._free()
        return free[:count]

    def _free(self) -> list[int]:
        used = {0, FOUND}.union(*self._states.values())
        return [i for i in range(len(self.table)) if i not in used]
