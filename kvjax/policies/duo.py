"""DuoAttention: heads with high gates keep every token, the others sinks and recent ones (arXiv 2410.10819)."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from kvjax.checks import MOST_SLOTS, number, whole_number
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy
from kvjax.policies.composed import HeadWise, check_inner, sized_others
from kvjax.policies.head_choice import gated_heads
from kvjax.policies.inner import has_own_size, sizes_of
from kvjax.policies.option_checks import changed, refuse_unused
from kvjax.policies.profile import GateProfile, Heads
from kvjax.policies.profile_files import profile_of, read_profile
from kvjax.policies.streaming import StreamingLLM

#: The part of a ratio that a head which does not keep everything keeps, where no fraction of heads is given.
_STREAMING = 0.2


#: First tokens that streaming heads keep, of rings of a size of their own, and of those that a ratio sizes. On the
#: default model with prompts of 440 to 700 tokens and ratio 0.5, 64 found 0 of 12 needles, 16 all of them.
_SINKS, _SINKS_OF_RATIO = 64, 16


@dataclasses.dataclass(frozen=True)
class DuoAttention(HeadWise):
    """Keep everything in heads with high gates, sinks and recent tokens in the others (DuoAttention, arXiv 2410.10819).

    ``profile`` has a gate alpha for each KV head, trained by ``kvjax calibrate gates`` (a file, or the one that comes
    with kvjax for this model when not given): how much of its output needs attention to all tokens. Retrieval heads are
    those with a gate above 0.5, or, with ``heads``, this fraction of the KV heads, those with the highest gates.

    The other heads keep their first ``sink`` tokens, 64, and a ring of ``recent`` ones. ``ratio`` instead says what the
    whole cache keeps, retrieval heads included, as a fraction of the tokens: a ring has about a fifth of this fraction,
    in place of ``recent`` and its sinks, and as many heads as the rest allows keep everything, unless ``heads`` says
    how many. There ``sink`` is 16 when not given: of a ring of 70 tokens, for prompts of 700, 64 sinks would leave 6.
    ``inner`` gives these heads to another policy of tokens.

    Decided where the authors' code differs: its ratio is of heads alone, whatever their rings hold; that is ``heads``.
    Its streaming heads see sinks and recent tokens alone already while they read a prompt, which costs less; here a
    prompt is read with full attention in every head, and what a head keeps of it is chosen then.
    """

    layers_alike: ClassVar[bool] = True

    profile: GateProfile | str | None = None
    sink: int | None = None
    recent: int = 256
    ratio: float | None = None
    heads: float | None = None
    inner: Policy | None = None

    def __post_init__(self) -> None:
        read_profile(self, GateProfile)
        if self.sink is not None:
            whole_number("sink", self.sink, 0, MOST_SLOTS)
        whole_number("recent", self.recent, 1, MOST_SLOTS)
        if self.ratio is not None:
            number("ratio", self.ratio, 0, 1, open_below=True)
            refuse_unused(self, ("recent",), "ratio sizes the rings in place of recent")
        if self.heads is not None:
            number("heads", self.heads, 0, 1)
        if self.inner is None:
            return
        check_inner(self.inner)
        if self.sink not in (None, _SINKS) or changed(self, ("recent",)):  # 64 is what earlier versions saved
            raise UsageError("sink and recent shape the default inner; leave them out.")
        if self.ratio is not None and ("ratio" not in sizes_of(self.inner) or has_own_size(self.inner)):
            raise UsageError(
                "ratio is given, and inner has a size of its own or cannot take this one; leave out one of them."
            )

    def protected(self, config: ModelConfig) -> Heads:
        return _protected(self, config)

    def others(self, config: ModelConfig) -> Policy:
        return _others(self, config)

    @property
    def unsized(self) -> Policy:
        if self.inner is not None:
            return self.inner
        if self.ratio is None:
            return StreamingLLM(sink=_SINKS if self.sink is None else self.sink, window=self.recent)
        return StreamingLLM(sink=_SINKS_OF_RATIO if self.sink is None else self.sink)

    def check(self, config: ModelConfig) -> None:
        profile_of(self, GateProfile, config).check(config)
        self.check_others(config)


@functools.lru_cache(maxsize=64)
def _protected(policy: DuoAttention, config: ModelConfig) -> Heads:
    profile, total = profile_of(policy, GateProfile, config), config.num_layers * config.num_kv_heads
    if policy.heads is not None:
        count = round(policy.heads * total)
    elif policy.ratio is not None:
        rings = _STREAMING * policy.ratio
        count = int((policy.ratio - rings) / (1 - rings) * total + 1e-9)
    else:
        count = sum(gate > 0.5 for row in profile.gates for gate in row)
    return gated_heads(profile, count)


@functools.lru_cache(maxsize=64)
def _others(policy: DuoAttention, config: ModelConfig) -> Policy:
    protected = policy.protected(config)
    every = sum(map(len, protected)) == config.num_layers * config.num_kv_heads
    if policy.ratio is None or (every and policy.ratio > 1 - 1e-6):  # nobody is left to have a size
        return policy.unsized
    return sized_others(policy.unsized, policy.ratio, protected, config)
