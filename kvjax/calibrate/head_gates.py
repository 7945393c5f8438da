"""Gates of KV heads, which tell retrieval heads from streaming ones (DuoAttention, arXiv 2410.10819, section 2.2).

Every KV head has a gate alpha, 1 at first; its queries get ``alpha * full + (1 - alpha) * streaming`` attention, the
latter to the first and the recent tokens alone. The gates are trained, and nothing else: by the squared distance of the
last hidden states from those of the model as it is, where it answers, plus ``penalty`` times the mean gate; after each
step they are cut to [0, 1]. The texts are synthetic: pass keys of random words, hidden in a user's text and asked for
behind it. The official recipe's numbers are kept where they do not depend on the size: penalty 0.05, a learning rate
that rises over the first fifth of the steps and falls over the last, no less than a tenth of it, no weight decay. It
takes 2,000 steps of up to 32,000 tokens at a rate of 0.02; the defaults here are for two cores.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from kvjax.calibrate.training import train, training_folder
from kvjax.checkpoints.digest import weights_digest
from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import MOST_SEED, MOST_SLOTS, number, whole_number
from kvjax.errors import UsageError
from kvjax.model.decoder import Decoder
from kvjax.policies.full import Full
from kvjax.policies.profile import GateProfile, ModelShape, model_name
from kvjax.policies.window_layers import for_model
from kvjax.prompts import opening_tokens
from kvjax.runtime.gated_forward import hidden_states

#: The words of pass keys: the spelling alphabet, as in the paper.
WORDS = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec romeo "
    "sierra tango uniform victor whiskey xray yankee zulu"
).split()
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
_HIDDEN = "\nRemember these words: the {which} pass key of the vault is {key}.\n"
_ASKED = "\n\nWhat is the {which} pass key of the vault? The {which} pass key of the vault is"


@dataclasses.dataclass(frozen=True)
class TrainedGates:
    """Gates, and how their training went.

    Attributes:
      losses: [steps] distance and penalty of each step.
    """

    profile: GateProfile
    losses: np.ndarray


def gates(
    lm: LanguageModel,
    texts: Sequence[str],
    *,
    tokens: int = 512,
    keys: int = 2,
    words: int = 8,
    steps: int = 80,
    learning_rate: float = 0.05,
    penalty: float = 0.05,
    sink: int = 16,
    recent: int = 64,
    seed: int = 0,
    folder: Path | None = None,
) -> TrainedGates:
    """Train the gate of every KV head of a model, of its global layers where others have a window.

    Args:
      lm: the model, on one device or on a mesh, whose data axis divides the texts of a step.
      texts: what pass keys are hidden in.
      tokens: of a step's text, or what fits the context. keys: pass keys in it, of so many ``words`` each.
      steps, learning_rate, penalty: of training, AdamW's, and of the mean gate.
      sink, recent: tokens that streaming attention sees.
      seed: of texts and pass keys.
      folder: where checkpoints are kept, so that an interrupted run goes on; None keeps nothing.

    Raises:
      UsageError: too little text, texts that hold no pass keys, or a model without global layers.
    """
    config = lm.config
    counts = {"tokens": tokens, "keys": keys, "words": words, "steps": steps, "recent": recent}
    check(**counts, learning_rate=learning_rate, penalty=penalty, sink=sink, seed=seed)
    if config.sliding and None not in config.windows:
        raise UsageError("Every layer of this model sees a window of tokens; none has heads that retrieve from afar.")
    task = PassKeys.of(lm, texts, min(tokens, config.max_position), keys, words, seed)
    shape = ModelShape.of(for_model(Full(), config).seen_as(config))
    rows = 1 if lm.mesh is None else lm.mesh.rows(1)
    if folder is not None:
        read = zlib.crc32("\0".join(texts).encode())
        settings = {"kind": "gates", "weights": weights_digest(lm.params), "texts": read, **counts}
        # A mesh with another data axis takes other texts a step.
        settings |= {"learning_rate": learning_rate, "penalty": penalty, "sink": sink, "seed": seed, "rows": rows}
        training_folder(folder, settings)
    teacher = jax.jit(functools.partial(_answers, sink=0, recent=0))

    def batch(step: int) -> tuple[Array, Array, Array]:
        drawn = [task.sample(step * rows + row) for row in range(rows)]
        ids, where = (_placed(lm, np.stack(each)) for each in zip(*drawn, strict=True))
        return ids, where, teacher(lm.params, ids, where, None)

    def loss(given: Array, batch: tuple[Array, Array, Array], params: Decoder) -> Array:
        ids, where, wanted = batch
        found = _answers(params, ids, where, given, sink=sink, recent=recent)
        return ((found - wanted) ** 2).mean() + penalty * jnp.abs(given).mean()

    start = np.ones((shape.num_layers, shape.num_kv_heads), np.float32)
    optimiser = optax.adamw(rate_of(learning_rate, steps), weight_decay=0.0)
    found = train(
        loss, start, lm.params, batch, optimiser, steps, project=lambda x: jnp.clip(x, 0, 1), folder=folder, every=10
    )
    table = tuple(tuple(round(float(gate), 4) for gate in row) for row in found.params)
    own = {"tokens": task.size, "steps": steps, "sink": sink, "recent": recent, "gates": table}
    return TrainedGates(GateProfile(model=model_name(lm.name), shape=shape, **own), found.losses)


def check(
    *,
    tokens: int,
    keys: int,
    words: int,
    steps: int,
    recent: int,
    learning_rate: float,
    penalty: float,
    sink: int,
    seed: int,
) -> None:
    """Refuse (UsageError) numbers that :func:`gates` does not take of any model."""
    counts = {"tokens": tokens, "keys": keys, "words": words, "steps": steps, "recent": recent}
    for name, value in counts.items():
        whole_number(name, value, 1, len(_ORDINALS) if name == "keys" else MOST_SLOTS)
    whole_number("sink", sink, 0, MOST_SLOTS)
    whole_number("seed", seed, 0, MOST_SEED)
    number("learning_rate", learning_rate, 0, open_below=True)
    number("penalty", penalty, 0)


def rate_of(peak: float, steps: int) -> optax.Schedule:
    """The learning rate of each step: up over the first fifth, down over the last, at least a tenth of the peak."""
    fifth = max(steps // 5, 1)

    def rate(step: Any) -> Any:
        rising, falling = (step + 1) / fifth, (steps - step) / fifth
        return peak * jnp.clip(jnp.minimum(rising, falling), 0.1, 1.0)

    return rate


def _placed(lm: LanguageModel, x: np.ndarray) -> Array:
    """Rows over the data axis of a mesh."""
    if lm.mesh is None:
        return jnp.asarray(x)
    where = jax.sharding.NamedSharding(lm.mesh.jax, jax.sharding.PartitionSpec("data"))
    return jax.device_put(x, where)


def _answers(
    params: Decoder, ids: Int[Array, "B T"], where: Int[Array, "B A"], given: Any, *, sink: int, recent: int
) -> Float[Array, "B A M"]:
    """The last hidden states of the tokens whose next ones are the answers'."""
    x = hidden_states(params, ids, given, sink=sink, recent=recent)
    return jnp.take_along_axis(x, where[..., None], axis=1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class PassKeys:
    """Texts of equal length with pass keys in them, and the questions for these.

    Attributes:
      size: tokens of a text. haystack: ids that pass keys are hidden in. opening: before a user's words.
      hidden: [keys] ids before and after each key. asked: [keys] ids of each question.
      names: [W] ids of each word of a pass key, all of the same number. words: of a pass key.
    """

    size: int
    haystack: np.ndarray
    opening: list[int]
    hidden: list[tuple[list[int], list[int]]]
    asked: list[list[int]]
    names: list[list[int]]
    words: int
    seed: int

    @classmethod
    def of(cls, lm: LanguageModel, texts: Sequence[str], size: int, keys: int, words: int, seed: int) -> PassKeys:
        """Pass keys for a model's tokenizer; one sentence where the texts or the length do not do."""
        encode = lm.tokenizer.encode
        named = [encode(" " + word) for word in WORDS]
        usual = min(map(len, named))  # so that every pass key of a run has as many tokens
        names = [ids for ids in named if len(ids) == usual]
        if len(names) < 4:
            counts = [len(ids) for ids in named]
            usual = max(set(counts), key=counts.count)
            names = [ids for ids in named if len(ids) == usual]
        hidden, asked = [], []
        for which in _ORDINALS[:keys]:
            before, _, after = _HIDDEN.format(which=which, key="\0").partition(" \0")
            hidden.append((encode(before), encode(after)))
            asked.append(encode(_ASKED.format(which=which)))
        task = cls(
            size, np.concatenate([encode(text) for text in texts] or [[]]).astype(np.int32), opening_tokens(lm), hidden,
            asked, names, words, seed,
        )  # fmt: skip
        if task.rest < size // 4:
            raise UsageError(
                f"{keys} pass keys of {words} words leave {max(task.rest, 0)} of {size} tokens for the text they are "
                "hidden in; give more tokens, or fewer keys."
            )
        if len(task.haystack) < task.rest:
            raise UsageError(f"The texts have {len(task.haystack):,} tokens; give at least {task.rest:,}.")
        return task

    @property
    def key_tokens(self) -> int:
        return self.words * len(self.names[0])

    @property
    def rest(self) -> int:
        """Tokens of the haystack in each text."""
        own = sum(len(before) + len(after) for before, after in self.hidden) + sum(map(len, self.asked))
        return self.size - len(self.opening) - own - 2 * len(self.hidden) * self.key_tokens

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids [T], places [A] of the tokens whose next ones are the answers') of one text."""
        rng = np.random.default_rng((self.seed, index))
        first = rng.integers(0, len(self.haystack) - self.rest + 1)
        hay = self.haystack[first : first + self.rest].tolist()
        depths = np.sort((rng.uniform(0.05, 0.95, len(self.hidden)) * self.rest).astype(int))
        drawn = [rng.integers(0, len(self.names), self.words) for _ in self.hidden]
        keys = [[token for name in names for token in self.names[name]] for names in drawn]
        ids, end, where = list(self.opening), 0, []
        for depth, (before, after), key in zip(depths, self.hidden, keys, strict=True):
            ids += [*hay[end:depth], *before, *key, *after]
            end = depth
        ids += hay[end:]
        for i in rng.permutation(len(keys)):
            ids += self.asked[i]
            where += range(len(ids) - 1, len(ids) - 1 + self.key_tokens)
            ids += keys[i]
        return np.array(ids, np.int32), np.array(where, np.int32)
