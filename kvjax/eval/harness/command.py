"""The harness's own command line, with the model ``kvjax`` registered."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lm_eval.__main__ import cli_evaluate

from kvjax.errors import KvjaxError

#: Commands of the harness; without one it runs tasks.
_RUN, _OTHERS = "run", ("ls", "validate")


def run(words: Sequence[str]) -> int:
    """Run the harness's command line, with the model ``kvjax`` unless another is named, and return its exit code.

    Raises:
      KvjaxError: what the harness refuses, such as an unknown task.
    """
    command = words[0] if words and words[0] in (_RUN, *_OTHERS) else _RUN
    rest = words[1:] if words and words[0] == command else words
    model = ["--model", "kvjax"] if command == _RUN else []  # the harness takes the last
    before, sys.argv = sys.argv, ["kvjax lm-eval", command, *model, *rest]  # it reads them there
    try:
        cli_evaluate()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KvjaxError:
        raise
    except ValueError as error:
        raise KvjaxError(f"lm-evaluation-harness refuses this: {error}.") from error
    finally:
        sys.argv = before
    return 0
