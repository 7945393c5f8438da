"""Search for kernel block sizes by measuring: ``python -m pallas_kernels.tune FILE`` on the machine they are for.

The best of a grid for each implementation and problem is added to the file, which ``tuned`` reads when
``PALLAS_KERNELS_TUNED`` names it. ``tunable`` lists the operations.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import dispatch, tuned
from pallas_kernels.bench import timing
from pallas_kernels.bench.decode_inputs import Sizes
from pallas_kernels.tunable import OPERATIONS, TOKENS, Case, Operation, cases

#: Steps of one timed call.
_STEPS = 10


class NothingToTune(RuntimeError):
    """There is no accelerator."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """One implementation's outcome for one problem.

    Attributes:
      kernel: name of the kernel in the file. key: key of the problem. best: the fastest sizes, ``None`` if none ran.
      microseconds: time of a step with them; ``chosen`` with the kernel's default sizes.
      tried: number of sizes that ran; ``refused`` did not. refusal: message of the first of these.
    """

    kernel: str
    key: str
    best: dict[str, Any] | None
    microseconds: float
    chosen: float
    tried: int
    refused: int
    refusal: str = ""

    def line(self) -> str:
        """One line for a person."""
        if self.best is None:
            return f"{self.kernel}, {self.key}: none of {self.refused} sizes ran ({self.refusal})"
        sizes = ", ".join(f"{name} {value}" for name, value in self.best.items())
        refused = f"; {self.refused} of {self.tried + self.refused} did not run" if self.refused else ""
        took = f"{self.microseconds:,.1f} µs with {sizes}; by rule {self.chosen:,.1f} µs"
        return f"{self.kernel}, {self.key}: {took}{refused}"


def run(
    path: Path, given: Iterable[Case] | None = None, *, rounds: int = 5, say: Callable[[str], None] = print
) -> list[Tuned]:
    """Measure every implementation of this platform on each problem, and add the best sizes of each to a file.

    Args:
      given: the problems, see :func:`pallas_kernels.tunable.cases`; by default those of all operations.
      say: called with a line for each problem before and after it is measured.

    Raises:
      NothingToTune: there is no accelerator.
      ValueError: the file exists and is of another kind.
      OSError: it cannot be written.
    """
    platform = dispatch.platform()
    given = [case for case in (cases() if given is None else given) if case.operation.order.get(platform)]
    if not given:
        raise NothingToTune("There is no accelerator here, so there is nothing to tune: XLA's form has no sizes.")
    tuned.write(path, {})  # Fails now, not after minutes of measuring, where the file cannot be written.
    found: list[Tuned] = []
    for case in given:
        problem = case.operation.problem(case.sizes)
        for name in case.operation.order[platform]:
            outcome = _search(case.operation, problem, name, rounds, say)
            say(outcome.line())
            found.append(outcome)
            if outcome.best is not None:
                tuned.write(path, {outcome.kernel: {outcome.key: outcome.best}})
    return found


def _search(operation: Operation, problem: Any, name: str, rounds: int, say: Callable[[str], None]) -> Tuned:
    kernel, key = f"{operation.name}.{name}", str(tuned.key_of(problem))
    try:
        configs = operation.candidates(problem, name)
    except NotImplementedError as refusal:
        return Tuned(kernel, key, None, 0.0, 0.0, 0, 1, _first_line(refusal))
    say(f"{kernel}, {key}: {len(configs)} sizes")
    return measure(operation, problem, name, configs, rounds)


def measure(
    operation: Operation, problem: Any, name: str, configs: list[Any], rounds: int = 5, **options: Any
) -> Tuned:
    """Time an implementation with each of these sizes; ``options`` are its own, such as ``interpret``."""
    arguments = operation.arguments(problem)
    calls: dict[str, Callable[[], Any]] = {}
    refusal = ""
    for i, config in enumerate(configs):
        run = timing.loop(operation.step(problem, name, config=config, **options), _STEPS)
        try:
            jax.block_until_ready(run(*arguments))
        except Exception as error:
            if not _is_refusal(error):
                raise
            refusal = refusal or _first_line(error)
            continue
        calls[str(i)] = lambda run=run: run(*arguments)
    timed = timing.interleaved(calls, dict.fromkeys(calls, _STEPS), rounds)
    kernel, key = f"{operation.name}.{name}", str(tuned.key_of(problem))
    refused = len(configs) - len(calls)
    if not timed:
        return Tuned(kernel, key, None, 0.0, 0.0, 0, refused, refusal)
    best = min(timed, key=lambda i: timed[i].median)
    rule = 1e6 * timed["0"].median if "0" in timed else float("nan")
    sizes = dataclasses.asdict(configs[int(best)])
    return Tuned(kernel, key, sizes, 1e6 * timed[best].median, rule, len(calls), refused, refusal)


def _is_refusal(error: Exception) -> bool:
    """Whether a kernel or a compiler refused the sizes, mostly as too large for the chip's memories.

    Pallas's own errors have no public type.
    """
    known = isinstance(error, (NotImplementedError, RuntimeError, ValueError))
    return known or type(error).__module__.partition(".")[0] in ("jax", "jaxlib")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns 1 where there is nothing to tune, or it fails."""
    default = Sizes()
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__)
    parser.add_argument("file", type=Path, help="file that sizes are added to; its other entries stay")
    parser.add_argument("--operation", nargs="+", default=list(OPERATIONS), help=f"of {', '.join(OPERATIONS)}")
    for name in ("batch", "heads", "group", "head_dim", "mean"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(default, name))
    parser.add_argument("--dtype", default=default.dtype)
    parser.add_argument("--page-size", type=int, default=None)
    parser.add_argument("--queries", type=int, nargs="+", default=[], help="of chunks; what each operation meets")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of the prompts that chunks end")
    given = vars(parser.parse_args(arguments))
    path, chosen = given.pop("file"), given.pop("operation")
    chunks = {name: given.pop(name) for name in ("queries", "tokens")}
    try:
        run(path, cases(chosen, Sizes(**given), **chunks))
    except (NothingToTune, OSError, ValueError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
