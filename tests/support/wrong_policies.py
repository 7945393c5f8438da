"""A policy of one's own that is right, and what it is with one mistake each."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from kvjax.policies import Candidates, Policy, Selecting, Signals, numpy_or_jax, per_head, selection


@dataclasses.dataclass(frozen=True)
class Recent(Policy):
    """The ``window`` last tokens; each mistake below is one change of it."""

    window: int = 24

    def budgets(self, config, layer, total):
        return per_head(numpy_or_jax(total).minimum(total, self.window), config)

    def select(self, layer, cache, candidates: Candidates, chunk):
        index = jnp.arange(candidates.k.shape[2])
        keep = index >= candidates.length[..., None] - self.window
        return selection(cache, candidates, keep & candidates.valid)


@dataclasses.dataclass(frozen=True)
class FewSlots(Recent):
    window: int = 150

    def capacities(self, config, prompt, new):
        return ((8,) * config.num_kv_heads,) * config.num_layers


@dataclasses.dataclass(frozen=True)
class NoRoomToGrow(Recent):
    def capacities(self, config, prompt, new):
        return ((prompt + new // 2,) * config.num_kv_heads,) * config.num_layers


@dataclasses.dataclass(frozen=True)
class FewSlotsUnplanned(FewSlots):
    """What it keeps is only found when it has kept it."""

    budgets = Policy.budgets


@dataclasses.dataclass(frozen=True, eq=False)
class AnyClass(Recent):
    def __eq__(self, other):
        return vars(self) == vars(other)

    def __hash__(self):
        return hash(self.window)


@dataclasses.dataclass(frozen=True)
class StateOfSelect(Recent):
    def init_state(self, config, layer, batch, slots):
        return jnp.zeros((batch, 3))

    def select(self, layer, cache, candidates, chunk):
        return dataclasses.replace(super().select(layer, cache, candidates, chunk), state=jnp.zeros((3,)))


@dataclasses.dataclass(frozen=True)
class Mask(Recent):
    def select(self, layer, cache, candidates, chunk):
        return super().select(layer, cache, candidates, chunk).keep


@dataclasses.dataclass(frozen=True)
class Numbers(Recent):
    def select(self, layer, cache, candidates, chunk):
        found = super().select(layer, cache, candidates, chunk)
        return dataclasses.replace(found, keep=found.keep.astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class NoSlots(Recent):
    def capacities(self, config, prompt, new):
        return ((0,) * config.num_kv_heads,) * config.num_layers


@dataclasses.dataclass(frozen=True)
class Beyond(Recent):
    def select(self, layer, cache, candidates, chunk):
        keep = jnp.arange(candidates.k.shape[2]) % 4 == 0
        return selection(cache, candidates, jnp.broadcast_to(keep, candidates.valid.shape))

    budgets = Policy.budgets


@dataclasses.dataclass(frozen=True)
class TooMany(Recent):
    def retained(self, cache):
        return cache.length + 1000


@dataclasses.dataclass(frozen=True)
class Budgets(Recent):
    def budgets(self, config, layer, total):
        return per_head(total + self.window, config)


@dataclasses.dataclass(frozen=True)
class Nothing(Recent):
    def select(self, layer, cache, candidates, chunk):
        return selection(cache, candidates, jnp.zeros_like(candidates.valid))


@dataclasses.dataclass(frozen=True)
class State(Recent):
    def init_state(self, config, layer, batch, slots) -> Any:
        return {"good": jnp.zeros((batch, 3)), "bad": jnp.zeros((config.num_kv_heads, batch))}


class Plain(Recent):
    """No dataclass of its own."""


@dataclasses.dataclass(frozen=True)
class Hidden(Recent):
    def __post_init__(self):
        object.__setattr__(self, "extra", 3)


@dataclasses.dataclass(frozen=True)
class Alike(Recent):
    sink: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True)
class Equal(Recent):
    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 0


@dataclasses.dataclass(frozen=True, eq=False)
class Itself(Recent):
    __eq__, __hash__ = object.__eq__, object.__hash__


@dataclasses.dataclass(frozen=True)
class Unhashable(Recent):
    table: Any = None


@dataclasses.dataclass(frozen=True)
class NoCapacities(Recent):
    def capacities(self, config, prompt, new):
        """Forgets its result."""


@dataclasses.dataclass(frozen=True)
class OneLayer(Recent):
    def capacities(self, config, prompt, new):
        return super().capacities(config, prompt, new)[:1]


@dataclasses.dataclass(frozen=True)
class Fractions(Recent):
    def budgets(self, config, layer, total):
        return super().budgets(config, layer, total) * np.nan


@dataclasses.dataclass(frozen=True)
class OneChunk(Recent):
    def chunks(self, config):
        return 32


@dataclasses.dataclass(frozen=True)
class NothingRetained(Recent):
    def retained(self, cache):
        """Forgets its result."""


@dataclasses.dataclass(frozen=True)
class OneHeadRetained(Recent):
    def retained(self, cache):
        return cache.length[:, :1]


@dataclasses.dataclass(frozen=True)
class NoMarks(Recent):
    def select(self, layer, cache, candidates, chunk):
        return dataclasses.replace(super().select(layer, cache, candidates, chunk), marks=None)


@dataclasses.dataclass(frozen=True)
class NoSignals(Recent):
    signals = None


@dataclasses.dataclass(frozen=True)
class Marks(Recent):
    marks: ClassVar[Any] = ["score"]


@dataclasses.dataclass(frozen=True)
class AlwaysDue(Recent):
    maintains: ClassVar[bool] = True

    def due(self, layers, config):
        return jnp.ones(layers[0].length.shape[0], bool)

    def maintain(self, layer, cache, config, row, seen):
        return cache


@dataclasses.dataclass(frozen=True)
class DueOnce(AlwaysDue):
    def due(self, layers, config):
        return jnp.bool_(False)


@dataclasses.dataclass(frozen=True)
class OtherAppend(Recent):
    def append(self, layer, cache, k, v, step):
        return super().append(layer, cache, k, v, step).replace(state=jnp.zeros((3,)))


@dataclasses.dataclass(frozen=True)
class OtherObserve(Recent):
    def observe(self, layer, cache, logits, step):
        return cache.replace(length=cache.length.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class OtherMaintain(AlwaysDue):
    def due(self, layers, config):
        return layers[0].length[:, 0] > 60

    def maintain(self, layer, cache, config, row, seen):
        return cache.replace(length=cache.length[:, :1])


@dataclasses.dataclass(frozen=True)
class Next(Recent):
    def append(self, layer, cache, k, v, step):
        cache = super().append(layer, cache, k, v, step)
        return cache.replace(next=jnp.full_like(cache.next, -5))


@dataclasses.dataclass(frozen=True)
class OtherV(Recent):
    def select(self, layer, cache, candidates, chunk):
        return dataclasses.replace(super().select(layer, cache, candidates, chunk), v=candidates.v[:, :, :3])


@dataclasses.dataclass(frozen=True)
class NanV(Recent):
    def select(self, layer, cache, candidates, chunk):
        return dataclasses.replace(super().select(layer, cache, candidates, chunk), v=candidates.v * jnp.nan)


@dataclasses.dataclass(frozen=True)
class Unmarked(Recent):
    marks = ("position",)

    def select(self, layer, cache, candidates, chunk):
        return dataclasses.replace(super().select(layer, cache, candidates, chunk), marks={})


@dataclasses.dataclass(frozen=True)
class OneScore(Selecting):
    budget: int | None = 24

    def scores(self, layer, cache, candidates, chunk):
        return candidates.valid[..., :1].astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class NanScores(OneScore):
    def scores(self, layer, cache, candidates, chunk):
        return (candidates.k / 0).sum(axis=-1) * 0


@dataclasses.dataclass(frozen=True)
class AllProtected(OneScore):
    def protected(self, candidates, chunk):
        """Forgets its result."""


@dataclasses.dataclass(frozen=True)
class NoMask(Recent):
    def select(self, layer, cache, candidates, chunk):
        return dataclasses.replace(super().select(layer, cache, candidates, chunk), keep=None)


@dataclasses.dataclass(frozen=True)
class NothingCompressed(Recent):
    def compress(self, layer, cache, k, v, chunk):
        """Forgets its result."""


@dataclasses.dataclass(frozen=True)
class NothingSorted(Recent):
    def sort_slots(self, layer, cache, config):
        """Forgets its result."""


@dataclasses.dataclass(frozen=True)
class NothingDue(Recent):
    maintains: ClassVar[bool] = True

    def due(self, layers, config):
        """Forgets its result."""

    def maintain(self, layer, cache, config, row, seen):
        return cache


@dataclasses.dataclass(frozen=True)
class NoWeights(Recent):
    signals = Signals(hidden=True)

    def hidden_weights(self, config, layer):
        """Forgets its result."""


@dataclasses.dataclass(frozen=True)
class FewWeights(NoWeights):
    def hidden_weights(self, config, layer):
        return np.zeros((config.num_kv_heads, config.hidden_size), np.float32)


@dataclasses.dataclass(frozen=True)
class NanWeights(NoWeights):
    def hidden_weights(self, config, layer):
        return np.full((config.num_kv_heads, config.hidden_size + 1), np.nan, np.float32)


@dataclasses.dataclass(frozen=True)
class NoScore(OneScore):
    def scores(self, layer, cache, candidates, chunk):
        return None


@dataclasses.dataclass(frozen=True)
class Unwritten(Selecting):
    budget: int | None = 24


@dataclasses.dataclass(frozen=True)
class Twice(Recent):
    marks = ("position", "position")


@dataclasses.dataclass(frozen=True)
class Unweighed(Recent):
    signals = Signals(hidden=True)


@dataclasses.dataclass(frozen=True)
class TextState(Recent):
    def init_state(self, config, layer, batch, slots):
        return {"a": "text"}


@dataclasses.dataclass(frozen=True)
class Kinds(Recent):
    def layer_kind(self, config, layer):
        return [layer]


@dataclasses.dataclass(frozen=True)
class Notice(Recent):
    def notice(self, config, total):
        return 5


@dataclasses.dataclass(frozen=True)
class JaxSlots(Recent):
    def capacities(self, config, prompt, new):
        return ((jnp.int32(prompt + new),) * config.num_kv_heads,) * config.num_layers


@dataclasses.dataclass(frozen=True)
class Below(Recent):
    def retained(self, cache):
        return -5 * numpy_or_jax(cache.length).ones_like(cache.length)


@dataclasses.dataclass(frozen=True)
class NoRoom(Recent):
    """Nothing is left for the tokens that are decoded."""

    window: int = 32

    def capacities(self, config, prompt, new):
        return ((min(prompt, self.window),) * config.num_kv_heads,) * config.num_layers


@dataclasses.dataclass(frozen=True)
class TwoAppended(Recent):
    def append(self, layer, cache, k, v, step):
        found = super().append(layer, cache, k, v, step)
        return found.replace(length=found.length + step.active[:, None], next=found.next + step.active[:, None])

    def capacities(self, config, prompt, new):
        return ((prompt + 2 * new,) * config.num_kv_heads,) * config.num_layers


@dataclasses.dataclass(frozen=True)
class NothingChosen(Recent):
    shares_layers: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Ragged(Recent):
    def budgets(self, config, layer, total):
        return [[1, 1], [1]]


@dataclasses.dataclass(frozen=True)
class NoSize(OneScore):
    def size(self, config, layer, total):
        """Forgets its result."""
