"""Entry point of the ``kvjax`` command: runs the application and turns every failure into one sentence.

Exit codes: 0 done, 1 a failure, 2 a request that makes no sense as stated, 130 interrupted with Ctrl-C.
"""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence

import typer

# JAX reads this when it is loaded: its warnings are of what is meant here, such as processes that may be lost.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import kvjax.cli
from kvjax.cli.app import INTERRUPTED, root_command
from kvjax.cli.in_flags import in_flags, parsing_refusal
from kvjax.environment import switched
from kvjax.errors import QUOTED, KvjaxError, UsageError, cut, one_sentence, quoted
from kvjax.interrupt import never_lost
from kvjax.progress import showing
from kvjax.waiting import leave

# Every module beside this one that is a command adds itself to the application.
for _module in pkgutil.iter_modules(kvjax.cli.__path__):
    if _module.name != "main":
        importlib.import_module(f"kvjax.cli.{_module.name}")


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and the one sentence for whoever typed the command."""
    if isinstance(error, typer.TyperException):
        return error.exit_code, one_sentence(parsing_refusal(error) or error.format_message())
    if isinstance(error, UsageError):
        return 2, str(error)
    if isinstance(error, KvjaxError):
        return 1, str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return 1, one_sentence(f"The disk is full: {error}.")
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return 1, one_sentence(f"{error.filename} cannot be used: {error.strerror}.")
    first_line = cut((str(error).splitlines() or [""])[0], 2 * QUOTED)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in first_line:
        return 1, f"Not enough memory ({first_line}); a smaller budget, batch or context needs less."
    for name in _settings_named(error):
        why = first_line or "there is no such device"
        return 2, one_sentence(
            f"JAX cannot use {name}={quoted(os.environ[name])} of the environment ({why}); correct or unset it."
        )
    hint = "set KVJAX_TRACEBACK=1 to see where"
    return 1, f"Unexpected {type(error).__name__}: {first_line} ({hint})"


def _settings_named(error: Exception) -> list[str]:
    """JAX's settings in the environment that its own error names: a device that is not there, a word for a number."""
    said = str(error).upper() if isinstance(error, (ValueError, RuntimeError)) else ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__) if error.__traceback__ else [(None, 0)]
    if isinstance(error, AssertionError) and frame and frame.f_globals.get("__name__") == "jax._src.xla_bridge":
        said = "JAX_PLATFORMS"  # where JAX asserts that there is a device: no installed plugin has this one
    return [name for name in os.environ if name.startswith("JAX_") and name in said]


def _open_missing_streams() -> None:
    """Standard streams that the caller closed (``>&-``, some services) are as good as /dev/null."""
    # Opened in order, so that each takes the lowest free descriptor: its own, and no file of ours becomes stdout.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  open for the process's life


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` by default) and return its exit code."""
    _open_missing_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with never_lost(), showing():
            result = root_command()(args=given or ["--help"], prog_name="kvjax", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:  # before typer, which answers it, or after
        result = INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe left (``kvjax … | head``); Python must not try to flush to it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001  every failure becomes one sentence here
        code, sentence = explain(error)
        try:
            if switched("KVJAX_TRACEBACK", False):
                traceback.print_exc()
        except UsageError as wrong:
            sentence = f"{sentence} {wrong}"
        if isinstance(error, KvjaxError):
            sentence = one_sentence(in_flags(sentence, given))
        print(f"kvjax: {sentence}", file=sys.stderr)
        return code
    code = result if isinstance(result, int) else 0
    if code == INTERRUPTED:  # Ctrl-C: a command kept what there was, or typer ended it
        print("kvjax: Interrupted.", file=sys.stderr)
    # What Ctrl-C broke off goes on in a compiler or on a device, for which nobody waits.
    return leave(code, at_once=code == INTERRUPTED) if arguments is None else code
