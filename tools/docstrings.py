"""Prepares docstrings for the documentation site: Sphinx roles become plain code. Loaded by mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):`~?([^`]+)`")


class PlainRoles(griffe.Extension):
    """Turns ``:class:`Name``` into `Name`, which is what Markdown shows as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
