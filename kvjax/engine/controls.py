"""Sampling and stopping options of each row of a batch, as arrays on the device, rebuilt when rows change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.checkpoints.load import LanguageModel
from kvjax.engine.row import Row
from kvjax.engine.stops import SharedStopTable
from kvjax.options import GenerationOptions
from kvjax.request import known_ids
from kvjax.runtime.decode import Controls
from kvjax.runtime.sampling import Sampling, numbers_of
from kvjax.runtime.stopping import StopTable, padded_ids

#: Of rows of padding, which are greedy.
_DEFAULTS = GenerationOptions()


class RowControls:
    """Makes the arrays of :class:`kvjax.runtime.decode.Controls` from rows, each with options of its own."""

    def __init__(self, lm: LanguageModel, stops: SharedStopTable):
        self._lm, self._stops = lm, stops
        self._table: jax.Array | None = None
        self._of_slots: Controls | None = None

    def rows_changed(self) -> None:
        """The rows of the slots are others from now on."""
        self._of_slots = None

    def of_slots(self, rows: Sequence[Row | None], least_running: int) -> Controls:
        """The controls of the slots' rows, for a loop that ends when fewer than ``least_running`` are left."""
        if self._of_slots is None or self._stops.changed:
            self._of_slots = self.of(rows)
        return dataclasses.replace(self._of_slots, least_running=jax.device_put(np.int32(least_running)))

    def of(self, rows: Sequence[Row | None]) -> Controls:
        """The controls of any rows; None is a row of padding."""
        arrays = self._sampling(rows)
        ids = padded_ids([() if row is None else row.request.stop_ids for row in rows])
        limit = [0 if row is None else row.most for row in rows]
        logprobs = any(row is not None and row.request.options.logprobs for row in rows)
        table = self._table
        if table is None or self._stops.changed:
            table = self._table = jax.device_put(self._stops.taken())
        ends: Any = np.array(limit, np.int32), np.int32(self._lm.config.max_position), np.bool_(logprobs), np.int32(1)
        sampling, ids, ends = jax.device_put((Sampling(**arrays), ids, ends))
        return Controls(sampling, StopTable(table, ids), *ends)

    def _sampling(self, rows: Sequence[Row | None]) -> dict[str, Any]:
        vocabulary = self._lm.config.vocab_size
        numbers = [numbers_of(_DEFAULTS if row is None else row.request.options, vocabulary) for row in rows]
        arrays: dict[str, Any] = {name: np.array([own[name] for own in numbers]) for name in numbers[0]}
        draws = np.array([(0, 0, 0) if row is None else (row.request.options.seed, row.number, 0) for row in rows])
        return arrays | {"known": np.int32(known_ids(self._lm)), "draws": draws.astype(np.uint32)}
