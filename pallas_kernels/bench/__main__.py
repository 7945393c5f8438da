"""``python -m pallas_kernels.bench``: see ``--help``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pallas_kernels import dispatch
from pallas_kernels.bench import decode
from pallas_kernels.bench.decode_inputs import Sizes


def main(arguments: list[str] | None = None) -> int:
    """Measure each mean length and print its table."""
    default, means = Sizes(), [2048, 16384]
    if dispatch.platform() not in ("gpu", "tpu"):  # what a CPU reads in a second
        default, means = Sizes(batch=2, mean=256), [256]
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("--mean", type=int, nargs="+", default=means, help="slots a head, on average")
    parser.add_argument("--sigma", type=float, default=default.sigma, help="log-normal spread of heads' lengths")
    for name in ("batch", "heads", "group", "head_dim", "seed"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(default, name))
    parser.add_argument("--page-size", type=int, default=None, help="slots of a page; the platform's by default")
    parser.add_argument("--dtype", default=default.dtype, help="of rows, such as bfloat16, int8, float8_e4m3fn")
    parser.add_argument("--live", type=float, default=default.live, help="fraction of each head's pages that is filled")
    parser.add_argument("--rounds", type=int, default=10, help="times each implementation is timed, in turn")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    given = parser.parse_args(arguments)
    sizes = {f: getattr(given, f) for f in ("batch", "heads", "group", "head_dim", "seed", "sigma", "dtype", "live")}
    try:
        problems = [Sizes(mean=mean, page_size=given.page_size, **sizes) for mean in given.mean]
    except ValueError as error:
        parser.error(str(error))
    if given.rounds < 1:
        parser.error(f"rounds is {given.rounds}; give at least 1.")
    reports = []
    for problem in problems:
        report = decode.run(problem, rounds=given.rounds)
        print(report.markdown(), flush=True)
        reports.append(report)
    if given.json:
        given.json.write_text("[" + ",\n".join(report.json() for report in reports) + "]\n")
    if given.markdown:
        given.markdown.write_text("\n".join(report.markdown() for report in reports))
    return 0


if __name__ == "__main__":
    sys.exit(main())
