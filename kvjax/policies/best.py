"""``best``: a name for the policy that the measurements here support for a request, chosen before anything runs.

The choice is :data:`RULES`, read from the top: the first policy for this kind of question and this ratio that runs on
the model. What each rule rests on is in ``docs/results/comparison.md``.
"""

from __future__ import annotations

import dataclasses
import functools

from kvjax.checks import number
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy, Signals
from kvjax.policies.full import Full
from kvjax.policies.parsing import format_policy, parse
from kvjax.policies.window_layers import for_model

#: The page that has the numbers.
EVIDENCE = "docs/results/comparison.md"


@dataclasses.dataclass(frozen=True)
class Rule:
    """A policy that was measured, and where it is the choice.

    Attributes:
      later: of contexts whose questions come after they were compressed; else of questions in view.
      least: the smallest ratio it is the choice for.
      policy: its text form without the ratio.
      found: what was measured, for people.
    """

    later: bool
    least: float
    policy: str
    found: str

    def at(self, ratio: float) -> str:
        """The text form of the policy at this ratio."""
        return f"{self.policy},ratio={float(ratio)!r}"


_QUARTER, _EIGHTH = "razor:inner=compactor,induction_share=0.03", "razor:inner=compactor,induction_share=0.02"
_HEADS, _MODEL = "adaptive:inner=kvzip", "adaptive:inner=kvzip,scope=model"
_BOTH = "needles in noise and essays"
#: In order of preference.
RULES: tuple[Rule, ...] = (
    Rule(True, 0.25, _QUARTER, f"measured at a quarter, where it found 120 of 120 {_BOTH}"),
    Rule(True, 0.25, _HEADS, f"it needs no profile, and at a quarter found 24 of 24 {_BOTH}"),
    Rule(True, 0.0, _MODEL, f"measured at an eighth, where it found 118 of 120 {_BOTH}"),
    Rule(True, 0.0, _EIGHTH, f"measured at an eighth, where it found 96 of 120 {_BOTH}"),
    Rule(True, 0.0, _HEADS, f"it needs no profile, and at an eighth found 15 of 24 {_BOTH}"),
    Rule(False, 0.25, _QUARTER, "measured at a half and a quarter, where it found 6 of 6 needles in essays"),
    Rule(False, 0.0, _EIGHTH, "measured at an eighth, where it found 5 of 6 needles in essays"),
    Rule(False, 0.0, _HEADS, "it needs no profile, and at a quarter found 5 of 6 needles in essays"),
)


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The policy that a request runs under, and, where ``best`` was asked for, one line on what it became and why."""

    policy: Policy
    line: str | None = None


@dataclasses.dataclass(frozen=True)
class Best(Policy):
    """A name for another policy: the one that kept the most answers in kvjax's own measurements at this ``ratio``.

    It is chosen for each request before anything is planned or compiled, by whether the question is in view of the
    compression or comes later: with ``context=``, in :func:`kvjax.read` and in conversations, and by what the model
    has, such as a profile of its retrieval heads. The choice is a table (the guide to policies shows it, with the
    numbers); ``stats.choice`` says what a request ran under and why, and a saved cache has that policy. A policy that
    cannot run on a model is passed over; ``ratio=1`` keeps everything.
    """

    ratio: float = 0.25

    def __post_init__(self) -> None:
        number("ratio", self.ratio, 0, 1, open_below=True)

    @property
    def signals(self) -> Signals:
        raise UsageError(_STANDS)

    @property
    def heads_alike(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Not to be asked: see :func:`resolve`."""
        raise UsageError(_STANDS)


_STANDS = (
    "best stands for the policy of a whole request, so it cannot be a part of another; name the inner policy itself."
)


def resolve(policy: Policy, config: ModelConfig, *, later: bool) -> Resolved:
    """The policy that runs: what ``best`` stands for, and any other itself.

    Args:
      later: whether the question comes after the compression; see :func:`asked_later`.

    Raises:
      UsageError: no policy that ``best`` may stand for runs on this model.
    """
    return _resolved(policy, config, later) if isinstance(policy, Best) else Resolved(policy)


def asked_later(*, context: bool, new_tokens: int, reserve_tokens: int | None) -> bool:
    """Whether a request's questions come after its compression: there is a context, no answer yet, or later turns."""
    return context or new_tokens == 0 or bool(reserve_tokens)


@functools.lru_cache(maxsize=64)
def _resolved(policy: Best, config: ModelConfig, later: bool) -> Resolved:
    if policy.ratio == 1:
        return Resolved(Full(), "best is full: ratio=1 keeps every token")
    passed: dict[str, str] = {}
    for rule in RULES:
        if rule.later != later or policy.ratio < rule.least:
            continue
        text = rule.at(policy.ratio)
        try:
            found = parse(text)
            for_model(found, config).check(config)
        except UsageError as error:
            passed.setdefault(text.partition(":")[0], str(error))
            continue
        asked = "the question comes after the compression" if later else "the question is in view"
        why = f"best is {format_policy(found)}: {asked}; {rule.found} ({EVIDENCE})."
        return Resolved(found, " ".join([why, *(f"Not {name}: {_reason(x)}." for name, x in passed.items())]))
    raise UsageError(list(passed.values())[-1])


def _reason(sentence: str) -> str:
    """The cause of a refusal, without the advice, which is for those who named the policy."""
    return sentence.partition(";")[0].rstrip(".")
