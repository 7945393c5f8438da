"""Compile every kernel for every chip without having one, and write the page of results: ``make aot``.

    python -m tools.aot --targets v5e,v6e --operations ragged_decode --out docs/kernels.md

Run it from the repository's root. It exits with 1 if a case does not compile or exceeds a limit: temporary memory,
spilled registers, bundles. Targets of a platform are compiled by that platform's Python (``--tpu-python``,
``--gpu-python``), which has its compiler installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.fetch_libtpu import compiler_path
from tools.aot import kernels_page
from tools.aot.cases import MODULES
from tools.aot.compile import AGAIN, Result
from tools.aot.processes import OPTIMISED, ROOT, versions
from tools.aot.targets import Target, platform, targets

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")


def compile_target(target: Target, python: str, chosen: dict[str, str]) -> list[Result]:
    """Results of one target; a case that ends the compiler's process is a failure, and the rest go on after it."""
    with tempfile.TemporaryDirectory() as folder:
        dump, out = Path(folder) / "dump", Path(folder) / "results"
        out.touch()
        path = os.pathsep.join([str(ROOT), *compiler_path(python)])
        environment = os.environ | {"PYTHONPATH": path} | OPTIMISED | platform(target.platform).environment(dump)
        results: list[Result] = []
        while True:
            command = [python, "-m", "tools.aot.compile", "--target", target.name]
            command += [x for name, value in chosen.items() for x in (f"--{name}", value)]
            command += ["--skip", str(len(results)), "--dump", str(dump), "--out", str(out)]
            out.write_text("")
            ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
            lines = [json.loads(line) for line in out.read_text().splitlines()]
            done = [Result(**line) for line in lines if "seconds" in line]
            results += done
            if ended.returncode == 0:
                return results
            if ended.returncode == AGAIN:
                continue
            if len(lines) == 2 * len(done):  # It ended before a case began.
                raise SystemExit(f"{target.name}: {ended.stderr[-2000:]}")
            said = [line for line in ended.stderr.splitlines() if line.strip()]
            results.append(Result(**lines[-1], error=f"the compiler's process ended: {said[-1] if said else ''}"))


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="", help="comma-separated; all by default")
    parser.add_argument("--operations", default="", help="comma-separated; all by default")
    parser.add_argument("--named", default="", help="part of the cases' names, a regular expression")
    parser.add_argument("--modules", default=",".join(MODULES), help="modules with a function cases(), comma-separated")
    parser.add_argument("--out", type=Path, help="the page; printed if not given")
    parser.add_argument("--results", type=Path, help="a file of the targets that were compiled already, to go on from")
    parser.add_argument("--tpu-python", default=str(ROOT / ".venv-aot-tpu/bin/python"))
    parser.add_argument("--gpu-python", default=str(ROOT / ".venv-aot-gpu/bin/python"))
    options = parser.parse_args()
    known = targets()
    names = [name for name in options.targets.split(",") if name] or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"No target {', '.join(unknown)}; there are {', '.join(known)}.")
    chosen = {name: getattr(options, name) for name in ("modules", "operations", "named")}
    kept: Path | None = options.results
    held = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    results: list[Result] = []
    found: dict[str, str] = {}
    for name in names:
        python = getattr(options, f"{known[name].platform}_python")
        found |= versions(python, *PACKAGES)
        if name not in held:
            held[name] = [dataclasses.asdict(result) for result in compile_target(known[name], python, chosen)]
        if kept is not None:
            kept.write_text(json.dumps(held))
        results += [Result(**result) for result in held[name]]
        wrong = [result for result in results if result.target == name and not result.ok]
        print(f"{name}: {sum(x.target == name for x in results)} cases, {len(wrong)} fail", file=sys.stderr)
        for result in wrong:
            print(f"  {result.operation}, {result.case}: {result.error or result.broken}", file=sys.stderr)
    page = kernels_page.render(results, found, datetime.date.today().isoformat())
    if options.out is None:
        print(page)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(page)
    raise SystemExit(any(not result.ok for result in results))


if __name__ == "__main__":
    main()
