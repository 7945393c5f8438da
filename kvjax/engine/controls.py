"""Sampling and stopping options of each row of a batch, as arrays on the device, rebuilt when rows change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from kvjax.checkpoints.load import LanguageModel
from kvjax.controls import controls_of
from kvjax.engine.row import Row
from kvjax.engine.stops import SharedStopTable
from kvjax.options import GenerationOptions
from kvjax.runtime.decode import Controls
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
        options = [_DEFAULTS if row is None else row.request.options for row in rows]
        draws = [(0, 0, 0) if row is None else (row.request.options.seed, row.number, 0) for row in rows]
        ids = padded_ids([() if row is None else row.request.stop_ids for row in rows])
        limit = [0 if row is None else row.most for row in rows]
        table = self._table
        if table is None or self._stops.changed:
            table = self._table = jax.device_put(self._stops.taken())
        return controls_of(self._lm, options, draws, limit, StopTable(table, jax.device_put(ids)))
