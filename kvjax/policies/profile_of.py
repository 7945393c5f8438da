"""The profile of a policy: the one that it was given, or the one of the model that comes with kvjax."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from kvjax.errors import UsageError, quoted
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy
from kvjax.policies.profile import Profile, load_profile, packaged

AnyProfile = TypeVar("AnyProfile", bound=Profile)


def read_profile(policy: Any, *kinds: type[Profile]) -> None:
    """Put a profile in place of its file's path, in the field ``profile`` of a policy that is being made.

    Raises:
      UsageError: it is none of these kinds, or the file holds none.
    """
    if isinstance(policy.profile, (str, os.PathLike)):
        object.__setattr__(policy, "profile", load_profile(policy.profile))
    if policy.profile is not None and not isinstance(policy.profile, kinds):
        commands = " or ".join(f"`kvjax calibrate {kind.kind}`" for kind in kinds)
        raise UsageError(f"profile is {quoted(policy.profile)}; give a file of {commands}, or what it was made from.")


def profile_of(policy: Policy, kind: type[AnyProfile], config: ModelConfig, otherwise: str = "") -> AnyProfile:
    """A policy's profile of this kind, else the one of this model that comes with kvjax.

    Args:
      otherwise: what may be given in its place, as the end of a sentence.

    Raises:
      UsageError: there is none, or the policy has one of another kind.
    """
    given = getattr(policy, "profile", None)
    found = given if given is not None else packaged(kind, config)
    if found is None:
        raise UsageError(
            f"No profile of {kind.kind} for this model comes with kvjax; make one with `kvjax calibrate {kind.kind}` "
            f"and give it as profile{otherwise}."
        )
    if not isinstance(found, kind):
        raise UsageError(f"The profile {found} is not one of {kind.kind}, which this model needs.")
    return found
