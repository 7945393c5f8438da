"""Processes of a job as threads of this one, with a dictionary in place of JAX's runtime."""

from __future__ import annotations

import collections
import contextlib
import threading

from kvjax.errors import KvjaxError
from kvjax.runtime.distributed import Group


class Store:
    """The runtime's store of words, its counters, and its watch over who lives."""

    def __init__(self, count: int):
        self.words: dict[str, str] = {}
        self.counters: collections.Counter[str] = collections.Counter()
        self.alive, self._asked, self._changed = set(range(count)), 0, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.words
        self.words[key] = value

    def key_value_dir_get(self, folder):
        return [item for item in sorted(self.words.items()) if item[0].startswith(folder)]

    def key_value_increment(self, key, by):
        self.counters[key] += by
        return self.counters[key]

    def get_live_nodes(self, processes):
        """Answer all who ask once each that lives has asked, as the runtime does."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._asked >= len(self.alive))
            return {process: "its incarnation" for process in processes if process in self.alive}

    def lose(self, process):
        with self._changed:
            self.alive.discard(process)
            self._changed.notify_all()

    @contextlib.contextmanager
    def alive_while(self, group):
        """A block that a process lives in: what is raised there kills it, and nobody is told."""
        try:
            yield
        except BaseException:
            self.lose(group.process)
            raise


def groups(count: int) -> list[Group]:
    store = Store(count)
    made = [Group(i, count, store) for i in range(count)]
    for group in made:
        group._name = made[0]._name  # in as many processes they would be counted alike
    return made


def together(functions):
    """What each of the functions raised, called at once in threads of their own."""
    raised = [None] * len(functions)

    def call(place):
        try:
            functions[place]()
        except KvjaxError as error:
            raised[place] = error

    threads = [threading.Thread(target=call, args=(place,)) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "it waits for ever"
    return raised
