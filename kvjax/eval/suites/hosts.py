"""Several processes as one run: that all were started alike, and which of its pieces each of them answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from kvjax import version
from kvjax.documents import same
from kvjax.errors import UsageError, quoted
from kvjax.runtime.distributed import Group

#: A piece of a run: the numbers of a cache and of a group of questions.
Piece = tuple[int, int]


def agree(everyone: Group, what: str, asked: dict[str, Any]) -> None:
    """Refuse (UsageError) to go on where this process was asked for something else than process 0.

    Args:
      what: a name that this group has not used yet.
      asked: what must be the same, by the name that the sentence calls it.
    """
    asked = asked | {"kvjax": version.__version__, "jax": jax.__version__}
    mine = json.loads(json.dumps(asked))
    first = json.loads(everyone.gather(what, json.dumps(asked))[0])
    for name in mine:
        if not same(mine[name], first.get(name)):
            raise UsageError(
                f"Process {everyone.process} was started with {name} {quoted(mine[name])}, and process 0 with "
                f"{quoted(first.get(name))}; start all with the same command, or with --num-processes 1 to run alone."
            )


class Pieces:
    """The pieces of a run that are still to be answered, each of which one process claims.

    Every process begins with another cache, so that not all of them compile the programs of each.

    Args:
      caches, groups: how many there are.
    """

    def __init__(self, everyone: Group, caches: int, groups: int):
        self._everyone, self._turn = everyone, 0
        self._left = [list(range(groups)) for _ in range(caches)]

    def __bool__(self) -> bool:
        return any(self._left)

    def caches(self) -> list[int]:
        """The caches with something left, in the order in which this process looks at them."""
        count, everyone = len(self._left), self._everyone
        first = everyone.process * count // everyone.processes
        return [number for number in (*range(first, count), *range(first)) if self._left[number]]

    def claims(self, cache: int) -> Iterator[int]:
        """Groups that are this process' to ask of a cache."""
        left = self._left[cache]
        return (left[i] for i in self._everyone.claims(f"turn {self._turn} cache {cache}", len(left)))

    def told(self, answered: Sequence[Piece], refused: dict[int, str]) -> dict[int, str]:
        """Tell the others what was answered in this turn, and which caches were refused; hear of theirs.

        What a process had claimed and has not told, since it was killed, is left for the next turn. A cache that one
        process refused is asked no more. Returns the sentences of all that were refused.
        """
        word = json.dumps({"answered": answered, "refused": list(refused.items())})
        for _, text in sorted(self._everyone.gather(f"turn {self._turn}", word).items()):
            said = json.loads(text)
            refused = dict(map(tuple, said["refused"])) | refused
            for cache, group in said["answered"]:
                if group in self._left[cache]:
                    self._left[cache].remove(group)
        for cache in refused:
            self._left[cache] = []
        self._turn += 1
        return refused
