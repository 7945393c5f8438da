"""``kvjax fetch``: put a model in the user's cache ahead of time."""

from __future__ import annotations


def run(model: str) -> None:
    """Download ``model`` unless it is there, and print its path on standard output."""
    from kvjax.checkpoints import hub

    print(hub.fetch(model))
