"""Names of a checkpoint's tensors: which fill a parameter, and whether all that a model needs is there, and no more."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from kvjax.checkpoints.checkpoint import Checkpoint
from kvjax.checkpoints.families import Weight
from kvjax.errors import WeightsError, quoted
from kvjax.model.config import ModelConfig

#: Rows of an embedding and a head that are compared at a time.
_ROWS = 256
# Buffers that transformers once saved and that follow from the configuration.
_HARMLESS = re.compile(
    r"(.*\.)?rotary_(pos_)?emb\.inv_freq|rope_(freqs|factors_(short|long))\.weight|"
    r"(model\.)?(vision_tower|multi_modal_projector)\..*|"  # the parts of a multimodal model that see
    r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias"  # causal masks
)


def by_parameter(weights: Iterable[Weight], gguf: bool) -> dict[str, list[tuple[str, Weight]]]:
    """The tensors that fill each parameter, by its path: names in the checkpoint, and their places."""
    pieces: dict[str, list[tuple[str, Weight]]] = defaultdict(list)
    for weight in weights:
        pieces[weight.param].append((weight.gguf if gguf else weight.hf, weight))
    return pieces


def check_names(config: ModelConfig, named: dict[str, Weight], checkpoint: Checkpoint, *, tied: str) -> None:
    """Every weight of the model is there once with its shape, and nothing else is; WeightsError names the first not.

    A head that repeats the tied embedding is accepted when it holds the same values.
    """
    shapes = checkpoint.shapes
    missing = [name for name in named if name not in shapes]
    extra = [name for name in shapes if name not in named and not _HARMLESS.fullmatch(name)]
    extra = [name for name in extra if not _adds_nothing(name, named, checkpoint)]
    repeated = config.tie_embeddings and tied in extra
    if repeated:
        extra.remove(tied)
    if missing:
        raise WeightsError(f"{checkpoint.origin} lacks {_list(missing)}{_hint(missing[0], extra)}.")
    if extra:
        raise WeightsError(f"{checkpoint.origin} holds {_list(extra)}, which a {config.family} model does not have.")
    for name, weight in named.items():
        if tuple(shapes[name]) != weight.shape:
            raise WeightsError(
                f"{checkpoint.origin} holds {quoted(name)} with shape {list(shapes[name])}; its configuration asks for "
                f"{list(weight.shape)}."
            )
    if repeated:
        _check_tied(next(iter(named)), tied, checkpoint)


def _adds_nothing(name: str, named: dict[str, Weight], checkpoint: Checkpoint) -> bool:
    """Whether a tensor is a bias of zeros, which old GPTQ files have for every layer."""
    stem, _, end = name.rpartition(".")
    shape = checkpoint.shapes[name]
    if end != "bias" or f"{stem}.weight" not in named or len(shape) != 1:
        return False
    return shape[0] == named[f"{stem}.weight"].shape[0] and not checkpoint.read(name, 0, shape[0]).any()


def _check_tied(embedding: str, head: str, checkpoint: Checkpoint) -> None:
    shapes = checkpoint.shapes
    same = shapes.get(embedding) == shapes[head]
    for start in range(0, shapes[head][0], _ROWS) if same else ():
        stop = min(start + _ROWS, shapes[head][0])
        same = same and np.array_equal(checkpoint.read(embedding, start, stop), checkpoint.read(head, start, stop))
    if not same:
        raise WeightsError(
            f"{checkpoint.origin} ties its output to its embedding and also holds a different {quoted(head)}."
        )


def _list(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 1} more weights" if len(names) > 1 else ""
    return f"the weight {quoted(names[0])}{rest}"


def _hint(name: str, extra: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, extra, 1)
    return f" and holds {close[0]!r} instead" if close else ""
