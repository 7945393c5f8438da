"""Parameters that are quantised in groups of inputs, filled on the host a block of a tensor at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from kvjax.checkpoints.checkpoint import Checkpoint, Format, Numbers
from kvjax.checkpoints.families import Weight
from kvjax.checkpoints.group_formats import common_format
from kvjax.model.config import Kept, ModelConfig
from kvjax.model.decoder import abstract_decoder
from kvjax.model.group_quantised import GroupFormat, GroupQuantised, rounded_groups
from kvjax.model.params import logical_view
from kvjax.model.quantised import Quantised
from pallas_kernels.quantised_matmul import weight_tiles


class GroupFilling:
    """The numbers of one parameter as they are read: a byte each until all are there, and are packed.

    Attributes:
      whole: int8 [..., N, K].
      scale, minimum: [..., N, K / G], as the parameter has them but for the order of axes.
    """

    def __init__(self, param: nnx.Variable):
        spec = param.get_value()
        assert isinstance(spec, GroupQuantised)
        self.spec, self._param = spec, param
        *rows, inputs = spec.shape
        groups = (*rows, inputs // spec.group)
        # What is not needed on this host is not read, and stays so.
        self.whole = np.zeros(spec.shape, np.int8)
        self.scale = np.ones(groups, spec.scale.dtype)
        self.minimum = None if spec.minimum is None else np.zeros(groups, spec.minimum.dtype)

    def view(self, weight: Weight) -> np.ndarray:
        """The part of ``whole`` that a tensor fills."""
        return weight.place(logical_view(self._param, self.whole))

    def rounding(self, weight: Weight) -> tuple[Callable[[np.ndarray, slice], None], bool]:
        """A function that rounds a part of a tensor, in the shape of that part of the view, into its place.

        Also whether all of the tensor must be read at once: where its inputs lead, no block of rows has any group.
        """
        rows, columns = self._places(weight)
        inputs = _input_axes(rows)
        outputs = [axis for axis in range(rows.ndim) if axis not in inputs]

        def put(read: np.ndarray, part: slice) -> None:
            count = math.prod(read.shape[axis] for axis in inputs)
            each = (read, rows[part], columns[part])
            matrix, row, column = (x.transpose(*outputs, *inputs).reshape(-1, count) for x in each)
            order = np.argsort(column[0])
            begin = int(column[0, order[0]])
            whole, scale = rounded_groups(matrix if _increases(order) else matrix[:, order], self.spec.group)
            self._set(row[:, 0], begin, whole, scale, None)

        return put, rows.shape[0] > 1 and rows.strides[0] == 0

    @property
    def format(self) -> GroupFormat:
        """The format of the parameter."""
        spec, name = self.spec, str(self.spec.scale.dtype)
        kind = "float16" if name == "int16" else name
        return GroupFormat(spec.bits, spec.group, spec.minimum is not None, kind, spec.fp8, spec.fp4)

    def keep(self, weight: Weight, numbers: Numbers, part: slice) -> None:
        """Put numbers of the parameter's format, their inputs last, in the place of a part of the tensor's view."""
        rows, columns = _first_inputs(*(x[part] for x in self._places(weight)))
        count = numbers.whole.shape[-1]
        whole, scale = numbers.whole.reshape(-1, count), numbers.scale.reshape(-1, count // self.spec.group)
        minimum = None if numbers.minimum is None else numbers.minimum.reshape(scale.shape)
        self._set(rows.reshape(-1), int(columns.reshape(-1)[0]), whole, scale, minimum)

    def _places(self, weight: Weight) -> tuple[np.ndarray, np.ndarray]:
        """The row, and the column, in the matrix of each number of the tensor's view, in arrays of one axis' memory."""
        return _places(self._param, weight)

    def _set(
        self, rows: np.ndarray, begin: int, whole: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None
    ) -> None:
        """Put numbers [n, k], from input ``begin`` on, into some rows."""
        group = self.spec.group
        end, first, last = begin + whole.shape[1], begin // group, (begin + whole.shape[1]) // group
        self.whole.reshape(-1, self.whole.shape[-1])[rows, begin:end] = whole
        for held, given in ((self.scale, scale), (self.minimum, minimum)):
            if held is not None and given is not None:
                by_row = held.reshape(-1, held.shape[-1])
                (by_row.view(np.float16) if held.dtype == np.int16 else by_row)[rows, first:last] = given

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Values, scale and minimum as the parameter has them."""
        values = weight_tiles.packed(self.whole, self.spec.bits, self.spec.group)
        scale, minimum = (
            None if x is None else np.ascontiguousarray(x.swapaxes(-1, -2)) for x in (self.scale, self.minimum)
        )
        assert scale is not None
        return values, scale, minimum


def kept_formats(
    config: ModelConfig, tensors: Mapping[str, Sequence[tuple[str, Weight]]], checkpoint: Checkpoint
) -> Kept:
    """How the numbers of a checkpoint are kept, for :attr:`ModelConfig.kept`; nothing where all of it is floats.

    A parameter whose tensors have formats of groups, in the order of its inputs, has that format, or the least that
    holds the numbers of them all (:func:`common_format`); one of which anything else is quantised is int8, of numbers
    that the checkpoint has or that are rounded.

    Args:
      tensors: of each parameter, by its path, names in the checkpoint and places.
    """
    formats, found = checkpoint.formats, {}
    if not formats:
        return ()
    state = nnx.to_flat_state(nnx.state(abstract_decoder(dataclasses.replace(config, weights="int8", kept=()))))
    for path, param in state:
        name = ".".join(map(str, path))
        if not isinstance(param.get_value(), Quantised) or name not in tensors:
            continue
        form = _form_of_all({formats.get(tensor) for tensor, _ in tensors[name]})
        if isinstance(form, GroupFormat):
            *_, outputs, inputs = param.get_value().shape
            in_order = all(_keeps_groups(param, weight) for _, weight in tensors[name])
            form = form if in_order and form.fits(outputs, inputs) else "int8"
        found[name] = "int8" if form == "rounded" else form
    return _by_name(found, config.num_layers)


def _by_name(found: Mapping[str, Any], layers: int) -> Kept:
    """Forms by the names that parameters have in a layer: one where all layers have the same, or one for each."""
    kept = {}
    for path, form in found.items():
        first, _, rest = path.partition(".")
        index, _, name = rest.partition(".")
        if first == "layers":
            kept.setdefault(name, [None] * layers)[int(index)] = form
        else:
            kept[path] = [form]
    return tuple((name, tuple(forms[:1] if len(set(forms)) == 1 else forms)) for name, forms in sorted(kept.items()))


def _form_of_all(kinds: set[Format | None]) -> Any:
    """The form of a parameter whose tensors have these formats, None of floats."""
    if len(kinds) == 1:
        return next(iter(kinds))
    groups = [kind for kind in kinds if isinstance(kind, GroupFormat)]
    return (common_format(groups) if len(groups) == len(kinds) else None) or "int8"


def _keeps_groups(param: nnx.Variable, weight: Weight) -> bool:
    """Whether a tensor has rows of a matrix, or parts of them, from their first input to their last."""
    if weight.change is not None:
        return False
    rows, columns = _places(param, weight)
    inputs = _input_axes(rows)
    if any(columns.strides[axis] for axis in range(columns.ndim) if axis not in inputs and columns.shape[axis] > 1):
        return False
    first = tuple(slice(None) if axis in inputs else 0 for axis in range(columns.ndim))
    found = columns[first].reshape(-1)
    return bool(found.size and (found == np.arange(found.size)).all())


def keeps_rows(param: nnx.Variable, weight: Weight) -> bool:
    """Whether a tensor's rows are whole rows of a matrix, so that what each is multiplied by is an output's."""
    return weight.shape[-1] == param.get_value().shape[-1] and _keeps_groups(param, weight)


def _input_axes(rows: np.ndarray) -> list[int]:
    """The axes of a view's rows along which they stay the same."""
    return [axis for axis, stride in enumerate(rows.strides) if stride == 0]


def _first_inputs(rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both of each output's first input alone."""
    inputs = _input_axes(rows)
    first = tuple(0 if axis in inputs else slice(None) for axis in range(rows.ndim))
    return rows[first], columns[first]


def _places(param: nnx.Variable, weight: Weight) -> tuple[np.ndarray, np.ndarray]:
    """The row, and the column, in the matrix of each number of the tensor's view, in arrays of one axis' memory."""
    *leading, inputs = shape = param.get_value().shape
    count = math.prod(leading)
    steps = [math.prod(leading[axis + 1 :]) * 8 for axis in range(len(leading))]
    strided = np.lib.stride_tricks.as_strided
    rows = strided(np.arange(count, dtype=np.int64), shape, (*steps, 0))
    columns = strided(np.arange(inputs, dtype=np.int64), shape, (*(0 for _ in leading), 8))
    return weight.place(logical_view(param, rows)), weight.place(logical_view(param, columns))


def _increases(order: np.ndarray) -> bool:
    return bool((order[1:] > order[:-1]).all())
