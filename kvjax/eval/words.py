"""The word pairs RULER draws keys and values from, as a sequence that is never built."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import overload

from kvjax.errors import KvjaxError, missing_extra


class WordPairs(Sequence[str]):
    """All distinct ``adjective-noun`` strings in sorted order: item i without holding the six million others.

    Pairs that start with one adjective stand together, unless another adjective continues it with a hyphen ("well",
    "well-off"); such few adjectives form one group whose pairs are built, merged and freed of doubles.
    """

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]):
        self._nouns = sorted(set(nouns))
        self._groups: list[list[str]] = []
        for adjective in sorted(set(adjectives), key=lambda word: f"{word}-"):
            if self._groups and f"{adjective}-".startswith(f"{self._groups[-1][0]}-"):
                self._groups[-1].append(adjective)
            else:
                self._groups.append([adjective])
        self._merged = {
            i: sorted({f"{adjective}-{noun}" for adjective in group for noun in self._nouns})
            for i, group in enumerate(self._groups)
            if len(group) > 1
        }
        sizes = (len(self._merged.get(i, self._nouns)) for i in range(len(self._groups)))
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # raises IndexError and resolves a negative index, as every sequence does
        group = next(i for i, end in enumerate(self._ends) if place < end)
        place -= self._ends[group - 1] if group else 0
        merged = self._merged.get(group)
        return merged[place] if merged else f"{self._groups[group][0]}-{self._nouns[place]}"


@functools.cache
def word_pairs() -> WordPairs:
    """The pairs of the ``wonderwords`` package, the lists the benchmark itself uses (extra ``eval``)."""
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise KvjaxError(missing_extra("RULER's words come from the package wonderwords", "eval")) from error
    words = RandomWord()
    return WordPairs(
        words.filter(include_categories=["adjective"]),
        words.filter(include_categories=["noun"]),
    )
