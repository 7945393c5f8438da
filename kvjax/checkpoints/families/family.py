"""A family of models as the loaders see it: a mapping of its configurations and the place of each of its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.model.config import ModelConfig

#: Takes a parameter, with its logical axes, to the writable view of it that a tensor fills.
Place = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint and its place.

    Attributes:
      hf, gguf: its name in either kind of checkpoint.
      shape: its shape there, [out, in] for a linear layer.
      param: the parameter it fills, as a path into ``Decoder`` ("layers.3.qkv").
      place: takes that parameter to the writable view that this tensor fills: the tensor, reshaped to the view's
        shape, is its value. Every transposition is expressed here, so nothing is copied for it.
      rows: the tensor's rows that fill the view, in its order; None for all of them as they are. Several weights may
        have a tensor in common, each some of its rows; together they have every row once.
      change: what becomes of rows as they are read, if anything.
    """

    hf: str
    gguf: str
    shape: tuple[int, ...]
    param: str
    place: Place
    rows: Sequence[int] | np.ndarray | None = None
    change: Callable[[np.ndarray], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture, to the loaders.

    Attributes:
      from_hf: ``(config.json, origin) -> ModelConfig``.
      from_gguf: ``(metadata, checkpoint shapes, rope factors, origin) -> ModelConfig``, or None when no GGUF has it.
      weights: every weight of a model, given its configuration and whether the checkpoint is a GGUF.
      other_prefixes: beginnings of Hugging Face's names that some checkpoints have in the place of "model.".
      optional_prefix: the beginning of Hugging Face's names that a checkpoint saved without its output head lacks.
    """

    from_hf: Callable[[Mapping[str, Any], str], ModelConfig]
    from_gguf: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]], Mapping[str, Any], str], ModelConfig] | None
    weights: Callable[[ModelConfig, bool], Iterable[Weight]]
    optional_prefix: str = ""
    other_prefixes: tuple[str, ...] = ()

    def hf_weights(self, config: ModelConfig, names: Collection[str]) -> list[Weight]:
        """The weights as a Hugging Face checkpoint of tensors called ``names`` calls them."""
        found = list(self.weights(config, False))
        for other in self.other_prefixes:
            if any(name.startswith(other) for name in names):
                return [dataclasses.replace(weight, hf=_begun_by(other, weight.hf)) for weight in found]
        prefix = self.optional_prefix
        if not prefix or any(name.startswith(prefix) for name in names):
            return found
        return [dataclasses.replace(weight, hf=weight.hf.removeprefix(prefix)) for weight in found]

    def gguf_weights(self, config: ModelConfig, names: Collection[str]) -> list[Weight]:
        """The weights as a GGUF of tensors called ``names`` calls them: the first files of Mixtral divide experts."""
        found = self.weights(config, True)
        if "blk.0.ffn_gate.0.weight" not in names:
            return list(found)
        return [part for weight in found for part in _divided(weight)]


def _divided(weight: Weight) -> Iterator[Weight]:
    """A tensor of all experts as one of each: ``blk.3.ffn_up_exps.weight`` is ``blk.3.ffn_up.0.weight`` and so on."""
    stem, mark, end = weight.gguf.partition("_exps.")
    if not mark:
        yield weight
        return
    for expert in range(weight.shape[0]):

        def place(values: np.ndarray, expert: int = expert) -> np.ndarray:
            return weight.place(values)[expert]

        yield dataclasses.replace(weight, gguf=f"{stem}.{expert}.{end}", shape=weight.shape[1:], place=place)


def _begun_by(prefix: str, name: str) -> str:
    return prefix + name.removeprefix("model.") if name.startswith("model.") else name


def unchanged(values: np.ndarray) -> np.ndarray:
    """The place of a tensor that is the parameter as it is."""
    return values


def transposed(values: np.ndarray) -> np.ndarray:
    """The place of a matrix [out, in] that fills a parameter [in, out]."""
    return values.T


def input_last(place: Place) -> Place:
    """The place of a matrix, given its bias's: the input axis M leads in the parameter and is last in a checkpoint."""
    return lambda values: np.moveaxis(place(values), 0, -1)


def output_first(values: np.ndarray) -> np.ndarray:
    """The place of a matrix [out, in] that fills [*in, out]: the output axis leads in a checkpoint."""
    return np.moveaxis(values, -1, 0)
