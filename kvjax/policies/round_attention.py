"""Round Attention: upper layers' rounds in host memory, and which of them a question sees (Tang et al., 2025).

This is the policy as a value; ``kvjax/rounds`` runs it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from kvjax.checks import MOST_SLOTS, number, whole_number
from kvjax.errors import UsageError, quoted
from kvjax.model.config import ModelConfig
from kvjax.policies.base import HostOrTraced, Policy, floor_fraction, numpy_or_jax, per_head
from kvjax.policies.composed import HeadWise
from kvjax.policies.option_checks import one_of, only_one, refuse_shared_layers, refuse_unused
from kvjax.policies.profile import WatershedProfile
from kvjax.policies.profile_files import profile_of, read_profile
from kvjax.policies.split_cache import SplitCache

#: Tokens at the beginning of a conversation that belong to no round: attention that no token deserves goes to them.
SINKS = 4
STRATEGIES = ("topk", "fixed", "adaptive", "above_mean")


@dataclasses.dataclass(frozen=True)
class RoundAttention(Policy):
    """Keep a conversation's upper layers in host memory, an array for each round; a question brings back what it needs.

    A round is a question and its answer. Layers ``0 .. watershed - 1`` hold every round on the device. A question runs
    through them first; its tokens' attention at the last of them, summed over each earlier round [1] and over heads
    and normalised over rounds (qAtt), selects rounds; their keys and values of the layers above come to the device in
    one transfer, the question and its answer go on with them, and the new round's go to the host as one array.

    ``strategy`` (3.3): "topk" takes the ``top`` fraction of rounds, rounded down; "fixed" those with qAtt above
    ``threshold``; "adaptive" those above the mean and ``std`` standard deviations; "above_mean" those above the mean
    (4.4). Always at least one; of equal rounds the later; each row of a batch selects for itself. Plans count with the
    ``top`` fraction whatever the strategy: how many rounds the others take, a question decides.
    ``granularity="token"`` is the paper's ablation: tokens are selected instead of whole rounds.

    ``watershed`` is L_w; by default that of ``profile`` (``kvjax calibrate watershed``; a file, or the one that comes
    with kvjax for this model). ``inner``, a policy that chooses the tokens of a prompt (LagKV, SlimKV, SnapKV, ...),
    compresses every round by itself when it ends, in all layers. ``drop_after``: a round that was not selected by this
    many questions in a row is deleted (3.4), from all layers.

    The first 4 tokens and the system prompt belong to no round: they are always attended to and take no part in qAtt.
    A round begins with what the next turn's template writes first, so the token that ended an answer belongs to the
    round that follows. Keys keep their original positions.
    """

    offloads_rounds: ClassVar[bool] = True

    strategy: Literal["topk", "fixed", "adaptive", "above_mean"] = "topk"
    granularity: Literal["round", "token"] = "round"
    watershed: int | None = None
    top: float = 0.1
    threshold: float = 0.1
    std: float = 3.0
    inner: Policy | None = None
    drop_after: int | None = None
    profile: WatershedProfile | str | None = None

    def __post_init__(self) -> None:
        read_profile(self, WatershedProfile)
        only_one("RoundAttention", watershed=self.watershed, profile=self.profile)
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("granularity", self.granularity, ("round", "token"))
        if self.watershed is not None:
            whole_number("watershed", self.watershed, 1)
        number("top", self.top, 0, 1, open_below=True)
        number("threshold", self.threshold, 0, 1)
        number("std", self.std, 0)
        if self.drop_after is not None:
            whole_number("drop_after", self.drop_after, 1, MOST_SLOTS)
        if self.inner is not None:
            self._check_inner(self.inner)

    def _check_inner(self, inner: Policy) -> None:
        if not isinstance(inner, Policy):
            raise UsageError(f"inner is {quoted(inner)}; give a policy of tokens, such as kvjax.LagKV(ratio=0.5).")
        asked = inner.signals
        # A round is one array: its heads differ in what they hold, not in what they are.
        chooses = not (inner.offloads_rounds or inner.merges or inner.beyond_context or isinstance(inner, HeadWise))
        more = (asked.columns, asked.queries, asked.decode_logits, asked.window_share, asked.noncausal, asked.repeat)
        if not chooses or any(more) or asked.outputs or asked.hidden:
            raise UsageError(
                f"{type(inner).__name__} cannot compress a finished round; inner takes policies that choose by a "
                "window of queries or by keys and values: LagKV, SlimKV, SnapKV, PyramidKV, KeyDiff, ChunkKV."
            )
        refuse_shared_layers("RoundAttention", inner)
        if self.granularity == "token":
            raise UsageError('granularity="token" selects single tokens of whole rounds; leave inner out.')

    # --- what a model makes of it ------------------------------------------------------------------------------

    def check(self, config: ModelConfig) -> None:
        if config.positional != "rope":
            raise UsageError("RoundAttention is for models with rotary positions; this one has ALiBi's.")
        if config.num_layers < 2:
            raise UsageError("RoundAttention needs a model of at least 2 layers.")
        layers = self.layers_below(config)
        if not 1 <= layers < config.num_layers:
            raise UsageError(f"watershed is {layers}; this model has {config.num_layers} layers, so give 1 to "
                             f"{config.num_layers - 1}.")  # fmt: skip
        if self.strategy != "fixed":
            refuse_unused(self, ("threshold",), 'threshold is for strategy="fixed"')
        if self.strategy != "adaptive":
            refuse_unused(self, ("std",), 'std is for strategy="adaptive"')
        if self.inner is not None:
            self.inner.check(config)

    def layers_below(self, config: ModelConfig) -> int:
        """L_w for this model; one sentence when nothing says it."""
        if self.watershed is not None:
            return self.watershed
        found = profile_of(self, WatershedProfile, config, ", or give watershed")
        found.check(config)
        return found.watershed

    # --- plans: a conversation of so many tokens whose last question brings the top fraction of them ---------------

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        return self.answering(config, prompt).capacities(config, prompt, new)

    def budgets(self, config: ModelConfig, layer: int, total: HostOrTraced) -> HostOrTraced:
        xp = numpy_or_jax(total)
        kept = total if layer < self.layers_below(config) else xp.maximum(floor_fraction(self.top, total), 1)
        return per_head(kept, config)

    def answering(self, config: ModelConfig, prompt: int) -> Policy:
        upper = max(int(floor_fraction(self.top, np.asarray([prompt]))[0]), 1)
        return SplitCache(self.layers_below(config), upper)

    def reading(self, config: ModelConfig, slots: int) -> Policy:
        return SplitCache(self.layers_below(config), slots)
