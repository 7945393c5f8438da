"""Ownership of a conversation: a turn may consume its arrays if only the owner refers to it."""

from __future__ import annotations

from kvjax.cache.continuation import Continuation
from kvjax.errors import UsageError


class Owned:
    """A continuation of one owner, given to ``generate`` as ``cache=``.

    A turn consumes it where nobody else holds it and a turn that fails can be undone, and gives it back when it fails;
    otherwise it stays a value, as any cache that is passed.

    Attributes:
      shared: whether somebody else was given it, who may go on from it at any later time.
    """

    def __init__(self, value: Continuation, shared: bool = False):
        self._value: Continuation | None = value
        self.shared = shared

    @property
    def value(self) -> Continuation:
        """The continuation, for its owner.

        Raises:
          UsageError: a turn has consumed it, or consumes it now.
        """
        if self._value is None:
            raise UsageError(
                "The conversation has gone on from here, or a streamed turn of it is not done; to keep this cache, "
                "read it before the next turn begins."
            )
        return self._value

    def share(self) -> Continuation:
        """The continuation, for somebody who may keep it: from now on no turn consumes it."""
        value = self.value
        self.shared = True
        return value

    def park(self) -> None:
        """Move it to host memory; whoever was given it on the device keeps that."""
        parked = self.value.to_host()
        self.shared = self.shared and parked is self._value
        self._value = parked

    def lend(self) -> Continuation:
        """The continuation, for a turn that consumes it; :meth:`give_back` follows if that turn fails."""
        value, self._value = self.value, None
        return value

    def give_back(self, value: Continuation) -> None:
        """Own it again, as it was before the turn."""
        self._value = value
