"""A scorer: a linear map of each KV head from hidden states to KVzip's score (after KVzap, arXiv 2601.07891).

Texts are read piece by piece, as a user's message, and repeated as KVzip repeats them. Of some tokens of each piece the
inputs of every layer's attention and the logarithms of the heads' scores are kept; then the maps of all layers are
trained together on the stored numbers, in mini-batches, by the mean squared error and a penalty on the weights. Inputs
are standardised first: some channels are a hundred times larger than others. The last eighth of the pieces is held out.
"""

from __future__ import annotations

import dataclasses
import io
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from kvjax.calibrate.training import train, training_folder
from kvjax.checkpoints.digest import weights_digest
from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import MOST_SEED, MOST_SLOTS, number, whole_number
from kvjax.errors import KvjaxError, UsageError
from kvjax.files import write_atomically
from kvjax.model.config import ModelConfig
from kvjax.policies.full import Full
from kvjax.policies.kvzip import KVzip
from kvjax.policies.profile import ModelShape, ScorerProfile, model_name, packed_numbers, unpacked
from kvjax.policies.signals import Repetition
from kvjax.policies.window_layers import for_model
from kvjax.progress import stage
from kvjax.prompts import as_told, opening_tokens
from kvjax.runtime.kvzip_scores import scored_tokens
from kvjax.runtime.programs import Programs

#: Scores below this are as good as none.
_LEAST = 1e-7
#: The largest number that a profile holds.
_MOST = float(np.finfo(np.float16).max)
#: Tokens of a mini-batch, and the weight of the penalty, both of standardised inputs.
_BATCH, _PENALTY = 512, 0.03


@dataclasses.dataclass(frozen=True)
class TrainedScorer:
    """A scorer, and how its training went.

    Attributes:
      losses: [steps] mean squared error of each step's tokens and the penalty.
      before, after: mean squared error on held-out tokens, of each head's average score and of its map.
    """

    profile: ScorerProfile
    losses: np.ndarray
    before: float
    after: float


def scorer(
    lm: LanguageModel,
    texts: Sequence[str],
    *,
    tokens: int = 1024,
    most: int = 32,
    sampled: int = 256,
    steps: int = 400,
    learning_rate: float = 0.01,
    seed: int = 0,
    folder: Path | None = None,
) -> TrainedScorer:
    """Train the scorer of a model, of its global layers where others have a window.

    Args:
      lm: the model, on one device or on a mesh, whose data axis takes several pieces at a time.
      texts: what it reads; each is cut into pieces, of which some are drawn.
      tokens: of a piece, or what the context holds twice. most: pieces, at least 2. sampled: tokens of each piece.
      steps: of training, of 512 tokens each. learning_rate: of Adam, at first; it decays to 0 by a cosine.
      seed: of what is drawn.
      folder: where what was read, and checkpoints, are kept, so that an interrupted run goes on; None keeps nothing.

    Raises:
      UsageError: too little text, or a model without global layers.
    """
    config = lm.config
    for name, value, least in (("tokens", tokens, 8), ("most", most, 2), ("sampled", sampled, 1), ("steps", steps, 1)):
        whole_number(name, value, least, MOST_SLOTS)
    whole_number("seed", seed, 0, MOST_SEED)
    number("learning_rate", learning_rate, 0, open_below=True)
    if config.sliding and None not in config.windows:
        raise UsageError("Every layer of this model sees a window of tokens; a policy has nothing to choose there.")
    asked = as_told(lm, KVzip()).signals.repeat
    assert asked is not None
    size = min(tokens, (config.max_position - max(asked.request_tokens)) // 2)
    pieces = _pieces(lm, texts, size, most, seed)
    if folder is not None:
        read = zlib.crc32("\0".join(texts).encode())
        own = {"tokens": size, "most": most, "sampled": sampled, "steps": steps, "learning_rate": learning_rate}
        weights = weights_digest(lm.params)
        training_folder(folder, {"kind": "scorer", "weights": weights, "texts": read, **own, "seed": seed})
    hidden, scores = _collected(lm, pieces, min(sampled, size), asked, seed, folder)
    held = max(len(pieces) // 8, 1)
    data = Standardised.of(hidden[:-held], scores[:-held])
    seen = data.inputs.shape[1]

    def batch(step: int) -> np.ndarray:
        return np.random.default_rng((seed, step)).integers(0, seen, min(_BATCH, seen)).astype(np.int32)

    layers, heads, channels = scores.shape[1], scores.shape[2], hidden.shape[-1]
    start = {"weight": np.zeros((layers, heads, channels), np.float32), "bias": np.zeros((layers, heads), np.float32)}
    optimiser = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))
    fixed = (jnp.asarray(data.inputs), jnp.asarray(data.targets))
    found = train(_loss, start, fixed, batch, optimiser, steps, folder=folder)
    packed = data.packed(found.params)
    shape = ModelShape.of(for_model(Full(), config).seen_as(config))
    correlation, before, after = _judged(packed, hidden[-held:], scores[-held:], data.mean_target)
    own = {"texts": len(pieces) - held, "tokens": seen, "steps": steps, "correlation": round(correlation, 4)}
    profile = ScorerProfile(model=model_name(lm.name), shape=shape, weights=packed, **own)
    return TrainedScorer(profile, found.losses, before, after)


def _pieces(lm: LanguageModel, texts: Sequence[str], size: int, most: int, seed: int) -> list[list[int]]:
    """Pieces of ``size`` tokens drawn from texts, as a user's message begins; all that there are where they are few."""
    opening = opening_tokens(lm)
    own = size - len(opening)
    if own < 8:
        raise UsageError(f"A piece of {size} tokens holds {max(own, 0)} of a text; give more tokens.")
    found = [ids[i : i + own] for ids in map(lm.tokenizer.encode, texts) for i in range(0, len(ids) - own + 1, own)]
    if len(found) < 2:
        raise UsageError(f"The texts have fewer than 2 pieces of {own:,} tokens; give more pages, or shorter pieces.")
    drawn = np.random.default_rng(seed).permutation(len(found))[:most]
    return [[*opening, *found[i]] for i in drawn]


def _collected(
    lm: LanguageModel,
    pieces: list[list[int]],
    sampled: int,
    asked: Repetition,
    seed: int,
    folder: Path | None,
) -> tuple[Float[np.ndarray, "N L S M"], Float[np.ndarray, "N L H S"]]:
    """(float16 inputs of attention, logarithms of scores) of ``sampled`` tokens of each piece."""
    programs = Programs(lm.mesh, lm.config)
    together, hidden, scores = programs.rows(1), [], []

    def read(first: int, group: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        places = [np.random.default_rng((seed, first + i)).permutation(len(ids)) for i, ids in enumerate(group)]
        picked = [np.sort(order[:sampled]) for order in places]
        inputs, attention = scored_tokens(programs, lm.params, group, picked, asked)
        return np.clip(inputs, -6e4, 6e4).astype(np.float16), np.log(np.maximum(attention, _LEAST))

    files = [folder and folder / f"pieces-{first}-{together}.npz" for first in range(0, len(pieces), together)]
    left, done = sum(file is None or not file.exists() for file in files), 0
    with stage("job", "reading texts:", unit="pieces", total=left * together) as shown:
        for first, file in zip(range(0, len(pieces), together), files, strict=True):
            if file is not None and file.exists():
                inputs, logs = _saved(file, lm.config, len(pieces[first : first + together]), sampled)
                hidden.append(inputs)
                scores.append(logs)
                continue
            inputs, logs = read(first, pieces[first : first + together])
            if file is not None:
                content = io.BytesIO()
                np.savez(content, inputs=inputs, logs=logs)
                write_atomically(file, content.getvalue())
            hidden.append(inputs)
            scores.append(logs)
            done += together
            shown.update(done)
    return np.concatenate(hidden), np.concatenate(scores)


def _saved(file: Path, config: ModelConfig, rows: int, sampled: int) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and scores that an interrupted run wrote; KvjaxError where the file does not hold them."""
    try:
        with file.open("rb") as stream, np.load(stream) as saved:
            inputs, logs = saved["inputs"], saved["logs"]
        layers = sum(config.window_of(layer) is None for layer in range(config.num_layers))
        wanted = (rows, layers, sampled, config.hidden_size), (rows, layers, config.num_kv_heads, sampled)
        if (inputs.shape, logs.shape) != wanted or not np.isfinite(inputs).all() or not np.isfinite(logs).all():
            raise ValueError("it holds other numbers")
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise KvjaxError(f"{file} is damaged; remove it to have its text read again.") from error
    return inputs, logs


@dataclasses.dataclass(frozen=True)
class Standardised:
    """The numbers that the maps are trained on.

    Attributes:
      inputs: [L, N, M] float16 of mean 0 and variance 1. targets: [L, H, N] of mean 0.
      mean, scale: [L, M] of the inputs as they were. mean_target: [L, H].
    """

    inputs: np.ndarray
    targets: np.ndarray
    mean: np.ndarray
    scale: np.ndarray
    mean_target: np.ndarray

    @classmethod
    def of(cls, hidden: Float[np.ndarray, "P L S M"], scores: Float[np.ndarray, "P L H S"]) -> Standardised:
        """A layer at a time: in float32 they are twice as large."""
        layers, channels = hidden.shape[1], hidden.shape[-1]
        inputs = np.empty((layers, hidden.shape[0] * hidden.shape[2], channels), np.float16)
        mean, scale = (np.empty((layers, channels), np.float32) for _ in range(2))
        for layer in range(layers):
            own = hidden[:, layer].reshape(-1, channels).astype(np.float32)
            mean[layer] = own.mean(axis=0)
            variance = own.var(axis=0)
            # A channel that hardly changes would get a weight that float16 rounds to many times its effect.
            scale[layer] = np.sqrt(variance + 1e-4 * variance.mean() + 1e-12)
            inputs[layer] = (own - mean[layer]) / scale[layer]
        targets = np.moveaxis(scores, 0, 2).reshape(layers, scores.shape[2], -1).astype(np.float32)
        mean_target = targets.mean(axis=-1)
        return cls(inputs, targets - mean_target[..., None], mean, scale, mean_target)

    def packed(self, params: dict[str, np.ndarray]) -> tuple[str, ...]:
        """The maps of inputs as they were, with what is added last; that makes up for the weights' rounding."""
        weight = params["weight"] / self.scale[:, None]
        if np.abs(weight).max() <= _MOST:  # what float16 holds
            weight = weight.astype(np.float16).astype(np.float32)
            bias = self.mean_target + params["bias"] - (weight * self.mean[:, None]).sum(axis=-1)
            if np.abs(bias).max() <= _MOST:
                return packed_numbers(np.concatenate([weight, bias[..., None]], axis=-1))
        raise KvjaxError("The maps' weights are beyond float16's 65,504; give a lower learning rate.")


def _loss(params: dict[str, Array], batch: Array, fixed: tuple[Array, Array]) -> Array:
    inputs, targets = (jnp.take(x, batch, axis=axis) for x, axis in zip(fixed, (1, 2), strict=True))
    found = jnp.einsum("lnm,lhm->lhn", inputs.astype(jnp.float32), params["weight"]) + params["bias"][..., None]
    return ((found - targets) ** 2).mean() + _PENALTY * (params["weight"] ** 2).sum(axis=-1).mean()


def _judged(
    packed: tuple[str, ...],
    hidden: Float[np.ndarray, "P L S M"],
    scores: Float[np.ndarray, "P L H S"],
    mean: Float[np.ndarray, "L H"],
) -> tuple[float, float, float]:
    """(mean correlation over heads, mean squared error of the mean scores, and of the maps) on these tokens."""
    correlations, before, after = [], [], []
    for layer, text in enumerate(packed):
        row: Any = unpacked(text)
        weights = row.astype(np.float32).reshape(scores.shape[2], -1)
        read = hidden[:, layer].reshape(-1, hidden.shape[-1]).astype(np.float32)
        found = read @ weights[:, :-1].T + weights[:, -1]
        wanted = scores[:, layer].swapaxes(1, 2).reshape(found.shape)
        before.append(((wanted - mean[layer]) ** 2).mean())
        after.append(((wanted - found) ** 2).mean())
        for one, other in zip(found.T, wanted.T, strict=True):
            spread = one.std() * other.std()
            correlations.append(0.0 if spread == 0 else ((one - one.mean()) * (other - other.mean())).mean() / spread)
    return float(np.mean(correlations)), float(np.mean(before)), float(np.mean(after))
