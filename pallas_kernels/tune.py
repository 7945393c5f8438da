"""Sizes of kernels found by measuring: ``python -m pallas_kernels.tune FILE`` on the machine they are for.

The best of a grid for each implementation and problem is added to the file, which ``tuned`` reads (where
``PALLAS_KERNELS_TUNED`` names it).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import dispatch, tuned
from pallas_kernels.bench import problem as problems
from pallas_kernels.bench import timing
from pallas_kernels.bench.problem import Sizes
from pallas_kernels.ragged_decode.api import IMPLEMENTATIONS, ORDER
from pallas_kernels.ragged_decode.problem import Problem


class NothingToTune(RuntimeError):
    """There is no accelerator."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """One implementation's outcome for one problem.

    Attributes:
      kernel: as in the file. key: the problem there. best: sizes of the fastest, ``None`` if none ran.
      microseconds: of a step with them; ``chosen`` with the kernel's own rule.
      tried: configurations that ran; ``refused`` did not.
    """

    kernel: str
    key: str
    best: dict[str, Any] | None
    microseconds: float
    chosen: float
    tried: int
    refused: int

    def line(self) -> str:
        """One line for a person."""
        if self.best is None:
            return f"{self.kernel}, {self.key}: none of {self.refused} sizes ran"
        sizes = ", ".join(f"{name} {value}" for name, value in self.best.items())
        return f"{self.kernel}, {self.key}: {self.microseconds:,.1f} µs with {sizes}; by rule {self.chosen:,.1f} µs"


def run(
    path: Path, sizes: Iterable[Sizes] = (Sizes(),), *, rounds: int = 5, say: Callable[[str], None] = print
) -> list[Tuned]:
    """Measure every implementation of this platform on each problem, and add the best sizes of each to a file.

    Raises:
      NothingToTune: there is no accelerator.
      ValueError: the file is there and holds something else.
      OSError: it cannot be written.
    """
    order = ORDER.get(dispatch.platform(), ())
    if not order:
        raise NothingToTune("There is no accelerator here, so there is nothing to tune: XLA's form has no sizes.")
    tuned.write(path, {})  # What cannot be written, or added to, is said before minutes are spent on it.
    found: list[Tuned] = []
    for one in sizes:
        problem = problems.make(one)
        for name in order:
            outcome = measure(problem, name, candidates(name, problem), rounds)
            say(outcome.line())
            found.append(outcome)
            if outcome.best is not None:
                tuned.write(path, {outcome.kernel: {outcome.key: outcome.best}})
    return found


def candidates(name: str, problem: Problem) -> list[Any]:
    """Sizes worth trying, the kernel's own rule's first."""
    if name == "mosaic_gpu":
        from pallas_kernels.ragged_decode.mosaic_gpu import MosaicGpuConfig

        rule = MosaicGpuConfig.of(problem)
        return _grid(rule, pages=(2, 4, 8, 16, 32), stages=(2, 3, 4, 6))
    if name == "triton":
        from pallas_kernels.ragged_decode.triton import TritonConfig

        rule = TritonConfig.of(problem)
        pages = sorted({max(slots // problem.pages.shape[2], 1) for slots in (128, 256, 512, 1024, 2048)})
        return _grid(rule, pages=pages, block=(32, 64, 128), warps=(2, 4, 8), stages=(2, 3, 4))
    if name == "tpu":
        from pallas_kernels.ragged_decode.tpu import TpuConfig

        _, _, page_size, head_dim = problem.pages.shape
        rule = TpuConfig.default(jax.devices()[0].device_kind, page_size, head_dim, problem.pages.dtype)
        return _grid(rule, rows=(256, 512, 1024, 2048), buffers=(4, 8, 16))
    raise ValueError(f"{name} has no sizes to tune.")


def _grid(rule: Any, **choices: Iterable[int]) -> list[Any]:
    every = (dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
    return list(dict.fromkeys([rule, *(dataclasses.replace(rule, **values) for values in every)]))


def measure(problem: Problem, name: str, configs: list[Any], rounds: int = 5, **options: Any) -> Tuned:
    """Time each of these configurations; ``options`` are the implementation's, such as ``interpret``."""
    arrays = (problem.pages, problem.length, problem.k_scale, problem.v_scale)
    calls: dict[int, Callable[[], Any]] = {}
    steps: dict[int, int] = {}
    for i, config in enumerate(configs):

        def step(q: Any, pages: Any, length: Any, k_scale: Any, v_scale: Any, config: Any = config) -> Any:
            given = dict(q=q, pages=pages, length=length, k_scale=k_scale, v_scale=v_scale)
            return IMPLEMENTATIONS[name](dataclasses.replace(problem, **given), config=config, **options).out

        try:
            run = timing.loop(step, 10)
            jax.block_until_ready(run(problem.q, *arrays))
        except (NotImplementedError, RuntimeError, ValueError):  # too large for the chip's memories, mostly
            continue
        calls[i], steps[i] = (lambda run=run: run(problem.q, *arrays)), 10
    timed = timing.interleaved({str(i): call for i, call in calls.items()}, {str(i): steps[i] for i in calls}, rounds)
    kernel, key = f"ragged_decode.{name}", str(tuned.Key.of(problem))
    refused = len(configs) - len(calls)
    if not timed:
        return Tuned(kernel, key, None, 0.0, 0.0, 0, refused)
    best = min(timed, key=lambda i: timed[i].median)
    rule = 1e6 * timed["0"].median if "0" in timed else float("nan")
    sizes = dataclasses.asdict(configs[int(best)])
    return Tuned(kernel, key, sizes, 1e6 * timed[best].median, rule, len(calls), refused)


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 where there is nothing to tune, or it cannot be done."""
    default = Sizes()
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__)
    parser.add_argument("file", type=Path, help="where sizes are kept; what it holds of other problems stays")
    for name in ("batch", "heads", "group", "head_dim", "mean"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(default, name))
    parser.add_argument("--dtype", default=default.dtype)
    parser.add_argument("--page-size", type=int, default=None)
    given = vars(parser.parse_args(arguments))
    path = given.pop("file")
    try:
        run(path, (Sizes(**given),))
    except (NothingToTune, OSError, ValueError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
