"""RazorAttention: retrieval heads keep every token, the other heads go to another policy (arXiv 2407.15891)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, ClassVar, Literal

from kvjax.checks import number, read_whole_number, whole_number
from kvjax.errors import UsageError, quoted
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy
from kvjax.policies.compensated import CompensatedRing
from kvjax.policies.composed import HeadWise, check_inner, sized_others
from kvjax.policies.head_choice import protected_heads, scope_lengths
from kvjax.policies.inner import has_own_size, sizes_of, with_size
from kvjax.policies.option_checks import changed, one_of, only_one, refuse_unused
from kvjax.policies.profile import BOUNDS, Bound, HeadProfile, Heads, ScopeProfile
from kvjax.policies.profile_files import profile_of, read_profile

#: Options of rotary models alone, and of ALiBi models alone.
_ROTARY = (
    "inner", "induction_share", "echo_share", "share_of", "heads", "ratio", "budget",
    "sink", "threshold", "compression", "compensation",
)  # fmt: skip
_ALIBI = ("bound", "eps")
#: Options that find the protected heads; ``heads`` names them instead.
_FINDING = ("profile", "induction_share", "echo_share", "share_of")
#: Options of the default inner policy.
_RING = ("sink", "threshold", "compression", "compensation")


@dataclasses.dataclass(frozen=True)
class RazorAttention(HeadWise):
    """Keep everything in retrieval heads, sinks, recent tokens and one mean in the others (arXiv 2407.15891).

    Rotary models: ``profile`` says what each query head attends to in repeated random tokens (``kvjax calibrate
    retrieval-heads``; a file, or the one that comes with kvjax for this model when not given). The top
    ``induction_share`` by induction score and the top ``echo_share`` by echo score are retrieval heads, and a KV head
    is protected when any of its query heads is one; with ``share_of="kv"`` these fractions count KV heads. ``heads``
    names the protected KV heads instead, as (layer, head) pairs or "layer.head+layer.head".

    The other heads are given to ``inner``, any policy of tokens, as a smaller layer of its own: by default a
    :class:`CompensatedRing` of ``sink`` sinks, a buffer of max(``threshold``, N / ``compression``) recent tokens and,
    unless ``compensation=False``, a compensation token. ``budget`` instead sizes what these heads keep in tokens;
    ``ratio`` what the whole cache keeps, protected heads included, as a fraction of the tokens seen. Both also size an
    ``inner`` that has a field of that name.

    ALiBi models: no retrieval heads and no ``inner``; every head keeps its last L_h tokens [2] in a buffer of its own,
    beyond which a token gets at most ``eps`` of the attention. ``profile`` comes from ``kvjax calibrate
    alibi-scopes``. ``bound`` says which form of [2] gives L_h: "scaled" has the 1 / sqrt(d) that logits are scaled by,
    "paper" is as printed, without it (scopes up to sqrt(d) times longer), "safe" holds for every input, where the
    other two take the output of a norm to be as long as its weights.

    An option that a model or another option leaves without effect is refused.
    """

    layers_alike: ClassVar[bool] = True

    profile: HeadProfile | ScopeProfile | str | None = None
    inner: Policy | None = None
    induction_share: float = 0.14
    echo_share: float = 0.01
    share_of: Literal["query", "kv"] = "query"
    heads: tuple[tuple[int, int], ...] | str | None = None
    ratio: float | None = None
    budget: int | None = None
    sink: int = 4
    threshold: int = 4000
    compression: float = 5.0
    compensation: bool = True
    bound: Bound = "scaled"
    eps: float = 0.001

    def __post_init__(self) -> None:
        read_profile(self, HeadProfile, ScopeProfile)
        number("induction_share", self.induction_share, 0, 1)
        number("echo_share", self.echo_share, 0, 1)
        number("eps", self.eps, 0, 1, open_below=True)
        one_of("share_of", self.share_of, ("query", "kv"))
        one_of("bound", self.bound, BOUNDS)
        only_one("RazorAttention", ratio=self.ratio, budget=self.budget)
        if self.ratio is not None:
            number("ratio", self.ratio, 0, 1, open_below=True)
        if self.heads is not None:
            object.__setattr__(self, "heads", _head_list(self.heads))
        self._check_inner()

    def _check_inner(self) -> None:
        inner = self.inner
        if inner is None:
            # The ring refuses what it cannot be.
            CompensatedRing(
                self.sink, self.threshold, self.compression, self.budget, self.ratio, compensation=self.compensation
            )
            return
        check_inner(inner)
        if changed(self, _RING):
            raise UsageError("sink, threshold, compression and compensation shape the default inner; leave them out.")
        for size in ("ratio", "budget"):
            if getattr(self, size) is not None and (size not in sizes_of(inner) or has_own_size(inner)):
                raise UsageError(
                    f"{size} is given, and inner has a size of its own or cannot take this one; leave out one of them."
                )

    # --- who holds what ---------------------------------------------------------------------------------------

    def protected(self, config: ModelConfig) -> Heads:
        return _protected(self, config)

    def others(self, config: ModelConfig) -> Policy:
        return _inner(self, config)

    @property
    def unsized(self) -> Policy:
        return self.inner or CompensatedRing(sink=self.sink, compensation=self.compensation)

    def check(self, config: ModelConfig) -> None:
        alibi = config.positional == "alibi"
        if alibi:
            refuse_unused(self, _ROTARY, "In an ALiBi model every head keeps its own scope, set by bound and eps")
        else:
            refuse_unused(self, _ALIBI, "Attention scopes are for ALiBi models, and this one has rotary positions")
        if self.heads is not None:
            refuse_unused(self, _FINDING, "heads names the protected heads itself")
        if self.heads is None:
            self._profile_of(config).check(config)
        for layer, head in self._named():
            if layer >= config.num_layers or head >= config.num_kv_heads:
                raise UsageError(
                    f"heads names KV head {head} of layer {layer}; this model has {config.num_layers} layers of "
                    f"{config.num_kv_heads} KV heads."
                )
        self.check_others(config)

    def _named(self) -> tuple[tuple[int, int], ...]:
        """The KV heads named by ``heads``, which were put in this form when the policy was made."""
        return self.heads if isinstance(self.heads, tuple) else ()

    def _profile_of(self, config: ModelConfig) -> HeadProfile | ScopeProfile:
        """The profile to use for this model; one sentence when there is none of the right kind."""
        wanted = ScopeProfile if config.positional == "alibi" else HeadProfile
        return profile_of(self, wanted, config)


#: The short name.
Razor = RazorAttention


@functools.lru_cache(maxsize=64)
def _protected(policy: RazorAttention, config: ModelConfig) -> Heads:
    if config.positional == "alibi":
        return ((),) * config.num_layers
    if policy.heads is not None:
        named = set(policy._named())
        return tuple(
            tuple(head for head in range(config.num_kv_heads) if (layer, head) in named)
            for layer in range(config.num_layers)
        )
    profile = policy._profile_of(config)
    assert isinstance(profile, HeadProfile)
    return protected_heads(profile, policy.induction_share, policy.echo_share, policy.share_of)


@functools.lru_cache(maxsize=64)
def _inner(policy: RazorAttention, config: ModelConfig) -> Policy:
    if config.positional == "alibi":
        profile = policy._profile_of(config)
        assert isinstance(profile, ScopeProfile)
        lengths = scope_lengths(profile, policy.bound, policy.eps, config.attention_scale)
        # A scope beyond the context is the context.
        lengths = tuple(tuple(min(max(x, 1), config.max_position) for x in heads) for heads in lengths)
        return CompensatedRing(sink=0, compensation=False, lengths=lengths)
    ring = CompensatedRing(policy.sink, policy.threshold, policy.compression, None, None, policy.compensation)
    inner = policy.inner or ring
    if policy.budget is not None:
        return with_size(inner, budget=policy.budget)
    if policy.ratio is None:
        return inner
    return sized_others(inner, policy.ratio, policy.protected(config), config)  # algorithm 1 with S0 = 0


def _head_list(heads: Any) -> tuple[tuple[int, int], ...]:
    """(layer, KV head) pairs from themselves or from "layer.head+layer.head"."""
    try:
        if isinstance(heads, str):
            heads = [tuple(read_whole_number(part, 0) for part in pair.split(".")) for pair in heads.split("+")]
        pairs = tuple(sorted((layer, head) for layer, head in heads))
        for place in (place for pair in pairs for place in pair):
            whole_number("every layer and head", place, 0)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f'heads is {quoted(heads)}; give pairs such as ((0, 1), (3, 2)), or "0.1+3.2": KV heads by layer.head.'
        ) from error
    for (layer, head), after in itertools.pairwise(pairs):
        if (layer, head) == after:
            raise UsageError(f"heads names KV head {head} of layer {layer} twice; name it once.")
    return pairs
