"""The full cache: the reference of every comparison."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvjax.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class Full(Policy):
    """Keep every token: no compression, the reference of every comparison."""

    layers_alike: ClassVar[bool] = True
