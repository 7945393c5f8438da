"""A policy inside another one: its size, which the outer policy gives, and the base of those that use its scores."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pool import LayerCache
from kvjax.errors import UsageError, quoted
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Candidates, HostOrTraced, Policy, PromptChunk, Signals
from kvjax.policies.option_checks import refuse_shared_layers
from kvjax.policies.sized import Scoring, Selecting

#: Fields of token policies that say how much is kept, where they are None by default: one of them is given. (A window
#: that has a default, as SnapKV's, is how a policy observes.)
_SIZES = ("budget", "ratio", "window", "partition_ratio")


def sizes_of(policy: Policy) -> dict[str, Any]:
    """The fields of a policy that say how much it keeps, with their values."""
    fields = {field.name for field in dataclasses.fields(policy) if field.default is None}
    return {name: getattr(policy, name) for name in _SIZES if name in fields}


def has_own_size(policy: Policy) -> bool:
    """Whether the policy was made with another size than the one it has by default."""
    try:
        return sizes_of(policy) != sizes_of(type(policy)())
    except TypeError:  # it has no default: its size was chosen
        return True


def with_size(policy: Policy, **size: Any) -> Any:
    """The policy with this size and no other."""
    return dataclasses.replace(policy, **(dict.fromkeys(sizes_of(policy)) | size))


@dataclasses.dataclass(frozen=True)
class Rescoring(Selecting):
    """Base of policies that choose by the scores of another one, ``inner``.

    The inner policy says which statistics are collected, what is protected, what a layer keeps in mind and how many
    tokens each layer has; the size is the outer policy's. A subclass gives :meth:`scores`, from :meth:`inner_scores`.
    """

    #: A policy that this one takes as ``inner``, for sentences.
    takes_such: ClassVar[str] = "KeyDiff"

    inner: Policy | None = None

    def __post_init__(self) -> None:
        inner, name = self._inner, type(self).__name__
        if not isinstance(inner, Policy):
            raise UsageError(f"inner is {quoted(inner)}; give {name} a policy, such as kvjax.{self.takes_such}().")
        if not isinstance(inner, Scoring) or not self.takes(inner):
            raise UsageError(f"inner is {type(inner).__name__}, which {self.refusal(inner, name)}.")
        if has_own_size(inner) or inner.keep_turn != type(inner)().keep_turn:
            raise UsageError(f"The size of {name} is its own; leave budget, ratio and keep_turn out of inner.")
        refuse_shared_layers(name, inner)
        super().__post_init__()

    def usual(self) -> Selecting:
        """The inner policy when none is given."""
        raise NotImplementedError

    def takes(self, inner: Scoring) -> bool:
        """Whether this policy may be over another one: by its scores, over those that choose once, by these alone."""
        return type(inner).select is Selecting.select

    def refusal(self, inner: Policy, name: str) -> str:
        """Why an inner policy is refused, and what to give this one, ``name``: the end of a sentence."""
        return (
            f"does not choose once, by a score of each token; give {name} a policy that does, such as {self.takes_such}"
        )

    @property
    def _inner(self) -> Any:
        return self.usual() if self.inner is None else self.inner

    @property
    def scoring(self) -> Scoring:
        """The inner policy at the size of this one."""
        return _scoring(self)

    def inner_scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        """The scores that the inner policy gives."""
        return self.scoring.scores(layer, cache, candidates, chunk)

    # --- what the inner policy says ---------------------------------------------------------------------------

    @property
    def marks(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner policy's numbers of each slot."""
        return self.scoring.marks

    @property
    def heads_alike(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the inner policy treats all heads alike."""
        return self.scoring.heads_alike

    @property
    def signals(self) -> Signals:
        return self.scoring.signals

    def window_scale(self, config: ModelConfig, total: Int[Array, " B"]) -> Float[Array, " B"]:
        return self.scoring.window_scale(config, total)

    def hidden_weights(self, config: ModelConfig, layer: int) -> np.ndarray:
        return self.scoring.hidden_weights(config, layer)

    def check(self, config: ModelConfig) -> None:
        self.scoring.check(config)

    def notice(self, config: ModelConfig, total: int) -> str | None:
        return self.scoring.notice(config, total)

    def useless(self, config: ModelConfig, total: int) -> bool:
        return self.scoring.useless(config, total)

    def layer_kind(self, config: ModelConfig, layer: int) -> Hashable | None:
        return None if super().layer_kind(config, layer) is None else self.scoring.layer_kind(config, layer)

    def smallest(self) -> int:
        return self._inner.smallest()

    def size(self, config: ModelConfig, layer: int, total: HostOrTraced) -> Any:
        return self.scoring.size(config, layer, total)

    def init_state(self, config: ModelConfig, layer: int, batch: int, slots: tuple[int, ...]) -> Any:
        return self.scoring.init_state(config, layer, batch, slots)

    def protected(self, candidates: Candidates, chunk: PromptChunk) -> Bool[Array, "B H N"]:
        return self.scoring.protected(candidates, chunk)

    def marks_after(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> dict[str, Array]:
        return self.scoring.marks_after(layer, cache, candidates, chunk)

    def state_after(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Any:
        return self.scoring.state_after(layer, cache, candidates, chunk)


@functools.lru_cache(maxsize=256)
def _scoring(policy: Rescoring) -> Scoring:
    return with_size(policy._inner, budget=policy.budget, ratio=policy.ratio)
