"""``kvjax plan``: every byte of a request before it is made."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax import tables


def run(*, model: str, keywords: dict[str, Any], as_json: bool) -> None:
    """Plan the request and print it; a plan beyond the memory limit is one sentence and exit code 1."""
    import kvjax

    kvjax.policies.parse(keywords["policy"])
    # The weights stay where they are: a plan needs their shapes alone, in the dtype they would be loaded in.
    from kvjax.checkpoints.load import weights_dtype

    planned = kvjax.plan(kvjax.load_config(model), **{**keywords, "dtype": weights_dtype(keywords["dtype"])})
    if as_json:
        tables.print_json(dataclasses.asdict(planned))
    else:
        print(planned)
