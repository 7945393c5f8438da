"""Counts what XLA compiles, by the name of the program."""

from __future__ import annotations

import collections
import contextlib
import logging
import re
from collections.abc import Iterator

import jax

_COMPILED = re.compile(r"Finished XLA compilation of (?:jit\()?(\w+)\)? in")


class _Counter(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.programs: collections.Counter[str] = collections.Counter()

    def emit(self, record: logging.LogRecord) -> None:
        found = _COMPILED.match(record.getMessage())
        if found:
            self.programs[found[1]] += 1


@contextlib.contextmanager
def compiled_programs() -> Iterator[collections.Counter[str]]:
    """How often each program was compiled in this block, in a process whose cache of them is empty at its start."""
    logger, counter = logging.getLogger("jax._src.dispatch"), _Counter()
    before, told = jax.config.jax_log_compiles, logger.propagate
    jax.clear_caches()
    jax.config.update("jax_log_compiles", True)
    logger.addHandler(counter)
    logger.propagate = False
    try:
        yield counter.programs
    finally:
        logger.removeHandler(counter)
        logger.propagate = told
        jax.config.update("jax_log_compiles", before)
