"""Parses ``--policies`` and ``--retained`` into the caches to be compared."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence

from kvjax.checks import number, stripped
from kvjax.errors import KvjaxError, UsageError, quoted
from kvjax.model.config import ModelConfig
from kvjax.policies import Full, format_policy, parse, registry
from kvjax.policies.base import Policy
from kvjax.policies.best import resolve
from kvjax.policies.composition import policies_within

#: Options that say how much is kept; a policy written with one of them is compared as it stands.
_SIZES = ("ratio", "budget", "partition_ratio")
#: What every other cache is compared with.
REFERENCE = "full"
#: Characters of a policy's text: a path of a profile may be as long as systems take, and nothing else is.
_MOST_TEXT = 4096


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of a comparison: a cache, by its policy and what that keeps.

    Attributes:
      name: the policy as typed.
      retained: the fraction of tokens it is to keep; None where the policy says itself.
    """

    name: str
    retained: float | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        check_retained(self.retained)

    def policy(self) -> Policy:
        """The policy; UsageError when it does not take the fraction, or refuses it."""
        if self.retained is None:
            return parse(self.name)
        joint = "," if ":" in self.name else ":"
        return parse(f"{self.name}{joint}ratio={self.retained}")


def entry_name(policy: str, retained: float | None) -> str:
    """A policy with the fraction that it is to retain, for people."""
    return policy if retained is None else f"{policy} at {retained:g}"


def check_name(text: str) -> None:
    """Refuse a policy's text that is empty, or too long to be one."""
    if not 0 < len(text.strip()) <= len(text) <= _MOST_TEXT:
        raise UsageError(f"policy is {quoted(text)}; give a policy's text, of at most {_MOST_TEXT} characters.")


def check_retained(value: float | None) -> None:
    """Refuse a fraction of tokens that is not in (0, 1]; None stands for the policy's own."""
    if value is not None:
        number("retained", value, 0, 1, open_below=True)


def profile_of(entry: Entry) -> str:
    """A digest of the profiles that a cache's policy holds, which a file gave it; empty where it has none.

    A profile that is made anew has the same name: rows of the one are no rows of the other.
    """
    try:
        held = policies_within(entry.policy())
    except KvjaxError:
        return ""
    profiles = [profile for policy in held if (profile := getattr(policy, "profile", None)) is not None]
    # What takes no part in a profile's equality is no part of it: the file that it was read from.
    numbers = [{f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.compare} for one in profiles]
    text = json.dumps(numbers, sort_keys=True, default=dataclasses.asdict)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if profiles else ""


def resolved(caches: Sequence[Entry], config: ModelConfig, *, later: bool) -> list[Policy]:
    """The policies of caches, and what ``best`` stands for where questions come ``later``, or are in view."""
    return [resolve(cache.policy(), config, later=later).policy for cache in caches]


def split_policies(text: str) -> list[str]:
    """Names with their options out of ``"snapkv,lagkv:lag=64,sink=4,h2o"``.

    Policies are separated by commas or semicolons, and a policy's options by commas. A piece such as ``sink=4`` holds
    no name and belongs to the policy before it; brackets keep together what they hold.
    """
    if not text.strip():
        raise UsageError("--policies is empty; name policies such as snapkv,lagkv, or all.")
    names: list[str] = []
    for group in _split(text, ";"):
        first = True
        for piece in stripped("--policies", _split(group, ",")):
            is_option = re.match(r"[\w-]+\s*=", piece) is not None
            if is_option and not first:
                names[-1] += f",{piece}"
            else:
                names.append(piece)
            first = False
    return names


def _split(text: str, mark: str) -> list[str]:
    """Pieces between marks that stand outside of brackets."""
    pieces, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == mark and depth == 0:
            pieces.append(text[start:place])
            start = place + 1
    return [*pieces, text[start:]]


def entries(policies: str, retained: Sequence[float]) -> list[Entry]:
    """Every cache to compare, the full one first.

    Args:
      policies: as :func:`split_policies` reads it; ``all`` stands for every registered policy.
      retained: fractions of tokens, each in (0, 1].

    Raises:
      UsageError: a policy or option that does not exist, or a fraction out of range.
    """
    if not retained:
        raise UsageError("--retained is empty; give fractions of tokens such as 0.5,0.25.")
    for fraction in retained:
        if not (math.isfinite(fraction) and 0 < fraction <= 1):
            raise UsageError(f"--retained holds {fraction:g}; give fractions of tokens above 0 and at most 1.")
    names: list[str] = []
    for name in split_policies(policies):
        names += (
            [one for one, cls in registry().items() if not cls.offloads_rounds] if name.lower() == "all" else [name]
        )
    found, known = [Entry(REFERENCE)], set[str]()
    for name in names:
        policy = parse(name)
        if isinstance(policy, Full):
            continue
        if policy.offloads_rounds:
            raise UsageError(f"{name} is for conversations of several rounds; `kvjax compare-rounds` compares it.")
        if format_policy(policy) in known:
            continue  # the same, spelt otherwise
        known.add(format_policy(policy))
        options = name.partition(":")[2]
        sized = any(re.search(rf"(^|,)\s*{size}\s*=", options) for size in _SIZES)
        if sized or not any(field.name == "ratio" for field in dataclasses.fields(policy)):
            found.append(Entry(name))
        else:
            found += [Entry(name, fraction) for fraction in sorted(set(retained), reverse=True)]
    return list(dict.fromkeys(found))
