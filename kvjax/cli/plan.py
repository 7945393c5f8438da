"""``kvjax plan``: every byte of a request before it is made."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.cli import render, session


def run(*, model: str, keywords: dict[str, Any], as_json: bool) -> None:
    """Plan the request and print it; a plan beyond the memory limit is one sentence and exit code 1."""
    import kvjax

    kvjax.policies.parse(keywords["policy"])
    lm = session.load(model, keywords["dtype"])
    planned = kvjax.plan(lm, **keywords)
    if as_json:
        render.print_json(dataclasses.asdict(planned))
    else:
        print(planned)
