"""The cost of starting: compiling everything once, and a second process that finds the programs compiled."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvjax.errors import KvjaxError

_PROMPT = "What is the capital of France?"


@dataclasses.dataclass(frozen=True)
class Startup:
    """Seconds.

    Attributes:
      cold_compile: compiling the prefill and decode programs with an empty compilation cache.
      cold_total: that first process, from start to end.
      second_first_token: from starting a second process to its first text on standard output.
    """

    cold_compile: float
    cold_total: float
    second_first_token: float


def _command(model: str, policy: str, *extra: str) -> list[str]:
    command = [sys.executable, "-m", "kvjax", "generate", _PROMPT, "--model", model, "--policy", policy]
    return [*command, "--max-new-tokens", "16", *extra]


def measure_startup(
    model: str, policy: str, *, dtype: str | None = None, weights: str | None = None, repetitions: int = 3
) -> Startup:
    """Run the command line in processes of its own, sharing a compilation cache that starts empty.

    Args:
      model, policy, dtype, weights: as the command's flags. repetitions: later processes, of which the best counts.

    Raises:
      KvjaxError: with the command's own last line when it fails.
    """
    given = {"--dtype": dtype, "--weights": weights}
    flags = [word for name, value in given.items() if value is not None for word in (name, value)]
    command = _command(model, policy, *flags)
    with tempfile.TemporaryDirectory() as folder:
        environment = compiling_into(Path(folder))
        start = time.perf_counter()
        cold = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True)
        total = time.perf_counter() - start
        check_ended(cold)
        compiling = json.loads(cold.stdout)["outputs"][0]["stats"]["compile_seconds"]
        # One run brings the streaming command's own programs in, then the best of some counts: disk caches vary.
        seconds = [_first_output(command, environment) for _ in range(repetitions + 1)]
    return Startup(compiling, total, min(seconds[1:]))


def compiling_into(folder: Path) -> dict[str, str]:
    """The environment of a process that keeps its compiled programs in a folder, whatever this one's says."""
    own = {name: value for name, value in os.environ.items() if name != "KVJAX_COMPILE_CACHE"}
    return own | {"JAX_COMPILATION_CACHE_DIR": str(folder)}


def check_ended(done: subprocess.CompletedProcess[str]) -> None:
    """Refuse (KvjaxError, with the command's own last line) to time a command that failed."""
    if done.returncode:
        raise KvjaxError(f"The command to time failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")


def _first_output(command: list[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    return seconds
