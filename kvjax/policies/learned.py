"""Learned: keep what a trained linear map expects KVzip to keep (after KVzap, arXiv 2601.07891)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache.pool import LayerCache
from kvjax.checks import MOST_SLOTS, whole_number
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Candidates, PromptChunk, Signals
from kvjax.policies.kvzip import mean_where_unknown
from kvjax.policies.profile import ScorerProfile
from kvjax.policies.profile_files import profile_of, read_profile
from kvjax.policies.sized import SelectingPastSinks

#: Logarithms of scores are between these, so that every score is a number above 0; attention is at most 1.
_LOG_LEAST, _LOG_MOST = -60.0, 10.0


@dataclasses.dataclass(frozen=True)
class Learned(SelectingPastSinks):
    """Keep the tokens that a linear map of their hidden states scores highest (after KVzap, arXiv 2601.07891).

    KVzip's score, the largest attention that a token gets while the model repeats the prompt, costs a second reading.
    Here each KV head has a linear map from what its layer's projections read of the token to the logarithm of that
    score, trained once a model by ``kvjax calibrate scorer``; ``profile`` has the maps (a file, or the one that comes
    with kvjax for this model when not given). A prompt is read once, and the maps cost as much as one channel of keys.

    The first ``sink`` tokens stay. A token keeps the score that it was given when it was read; decoded tokens, which
    have none, get the average on a later turn. Scores are attention, so they may be compared between heads
    (``adaptive:inner=learned``) and multiplied (``criticalkv:inner=learned``). Chosen once a prompt; decoded tokens all
    stay.

    Decided where KVzap differs: it drops what is below a threshold, however much that is, outside a window of recent
    tokens; here the highest stay, as many as the size says. It also has maps with a hidden layer.

    Size: ``budget`` tokens a head (2,048 when nothing is given) or ``ratio`` of the row's tokens.
    """

    attention_scores: ClassVar[bool] = True
    marks: ClassVar[tuple[str, ...]] = ("learned",)

    profile: ScorerProfile | str | None = None
    sink: int = 4

    def __post_init__(self) -> None:
        read_profile(self, ScorerProfile)
        whole_number("sink", self.sink, 0, MOST_SLOTS)
        super().__post_init__()

    @property
    def signals(self) -> Signals:
        return Signals(hidden=True)

    def check(self, config: ModelConfig) -> None:
        profile_of(self, ScorerProfile, config).check(config)

    def hidden_weights(self, config: ModelConfig, layer: int) -> np.ndarray:
        return profile_of(self, ScorerProfile, config).of_layer(layer)

    def marks_after(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> dict[str, Array]:
        assert candidates.signals.hidden is not None
        new = jnp.exp(jnp.clip(candidates.signals.hidden[:, :, 0], _LOG_LEAST, _LOG_MOST))
        return {"learned": jnp.where(candidates.fresh_rows, new, candidates.marks["learned"])}

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        score = self.marks_after(layer, cache, candidates, chunk)["learned"]
        return mean_where_unknown(score, candidates.valid)
