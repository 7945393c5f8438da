"""The page of results: for every operation one table, a row a case and a column a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvjax.tables import Column, Table
from tools.aot.compile import Result

_EXPLANATION = """\
Every kernel, compiled ahead of time by each chip's own compiler on a machine without accelerators; `make aot` writes
this page. **Nothing here was timed on an accelerator.** A cell shows, where known:

- `327/280 cycles`: the scheduled length of one iteration of the kernel's loop, and the cycles in which HBM delivers
  what that iteration reads. The kernel is bound by memory bandwidth if the first is smaller. An iteration of
  `ragged_decode` is one block, on tpu7x by default two, where a head has fewer than 32 queries and is not float32.
- `134 b`: bundles, the VLIW instructions of that iteration; the other cycles are stalls.
- `96 r`: registers per thread, on GPUs. `spills`: register spills, if there are any. A TPU has 64 vector registers of
  4 KB. `prefill` and `attention_mass` keep their scores, and the bfloat16 parts of float32 numbers, in scratch buffers
  on the chip; JAX's own splash attention, listed beside them, spills. An iteration of `prefill` is 512 rows of queries
  against 2,048 keys. The number counts the code for masked and for unmasked scores, of which an iteration runs one,
  and the code of the first and the last iteration: of the 2,835 cycles of a window of 32 queries of 4 heads on v5e,
  713 are a block below the diagonal. Where masses are summed, a block that the diagonal crosses is an inner loop of 1
  to 8 iterations, counted once: of the main case's 3,520 cycles on v5e, 2,251 are a block below the diagonal; a block
  that it crosses takes 332, and 462 per inner iteration.
- `0.2 %`: temporary memory, in percent of the cache's bytes, for `quantised_matmul` of the weights'. Below 1 % the
  cache is not copied, and no weights are floats in memory. Cases with more hold something else: queries, outputs and
  masses of a chunk or of a whole layer, padded to a TPU's 128 lanes (on v5p in HBM, where the other chips use on-chip
  memory) or copied by GPUs, an int8 cache's scales, partial results of many query heads, on v5p the result of one row
  of activations, as 8 rows, and of a decode step logits over a shared cache, or positions and scores of every slot.
- `—`: the case does not apply to that target.
"""


def render(results: Sequence[Result], versions: Mapping[str, str], date: str) -> str:
    """Markdown."""
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts = [f"# Kernels, compiled ahead of time\n\n{date}; {listed}.\n\n{_EXPLANATION}"]
    for operation in dict.fromkeys(result.operation for result in results):
        parts.append(f"## {operation}\n\n{_table([x for x in results if x.operation == operation])}")
    wrong = [result for result in results if not result.ok]
    if wrong:
        lines = (f"- {x.operation}, {x.case}, {x.target}: {x.error or '; '.join(x.broken)}" for x in wrong)
        parts.append("## What fails\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def with_section(page: str, heading: str, text: str) -> str:
    """The page with this section: in the place of the one of that heading, or at its end."""
    before, found, rest = page.partition(f"## {heading}\n")
    _, more, after = rest.partition("\n## ")
    made = f"{before.rstrip()}\n\n## {heading}\n\n{text.strip()}\n"
    return made + more + after if found else made


def deliver(page: Path | None, heading: str, text: str) -> None:
    """Write a section to a page, or print it where there is none."""
    if page is None:
        print(text)
    else:
        page.write_text(with_section(page.read_text(), heading, text))


def _table(results: Sequence[Result]) -> str:
    names = list(dict.fromkeys(result.target for result in results))
    by = {(result.case, result.target): result for result in results}
    targets = [Column(name, lambda case, name=name: by.get((case, name)), _cell, missing="—") for name in names]
    cases = list(dict.fromkeys(result.case for result in results))
    return Table([Column("case", str), *targets], cases).markdown() + "\n"


def _cell(result: Result) -> str:
    if result.error:
        return "**fails**"
    parts = []
    if result.cycles:
        parts.append(f"{result.cycles}{f'/{result.memory_cycles}' if result.memory_cycles else ''} cycles")
        parts.append(f"{result.bundles} b")
    if result.registers:
        parts.append(f"{result.registers} r")
    if result.spills:
        parts.append(f"{result.spills} spills")
    parts.append(f"{100 * result.temp_bytes / max(result.cache_bytes, 1):.1f} %")
    text = ", ".join(parts)
    return f"**{text}**" if result.broken else text
