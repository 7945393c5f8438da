"""The page that ``tools.aot.mesh`` writes, and what on it breaks a limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvjax.tables import Column, Heading, Report, Table
from tools.aot.mesh_sizes import BATCH, QUESTION, ROUND, SEEN, SELECTED

#: And prefill alone, of policies that the cases above have not.
PREFILLS = (
    "streamingllm:ratio=0.25",
    "compensated:budget=8192",
    "snapkv:ratio=0.25",
    "pyramidkv:ratio=0.25",
    "slimkv:ratio=0.25",
    "nacl:ratio=0.25",
    "keydiff:ratio=0.25",
    "expected_attention:ratio=0.25",
    "tova:ratio=0.25",
    "ahakv:ratio=0.25",
)
PREFILLS_ON, PREFILL_MESHES, PREFILL_LAYERS = "v5e:4x4", ((2, 8), (4, 4)), 4
PROMPT, NEW = 32768, 256
TOLERANCE = 0.03

Case = Mapping[str, Any]


def _gib(size: float) -> str:
    return f"{size / 2**30:.3f}"


def peak_off(case: Case) -> float:
    """How far XLA's peak memory of prefill is from the plan's total."""
    return case["prefill"]["peak"] / case["plan"]["total_bytes"] - 1


def judged(case: Case) -> dict[str, Any]:
    """XLA's totals beside the plan's, and what breaks a limit."""
    plan, decode, prefill = case["plan"], case["decode"], case["prefill"]
    steady = decode["arguments"] + decode["results"] - decode["aliased"]
    peak = prefill["peak"]
    off = {
        "decode": steady / (plan["weights_bytes"] + plan["cache_bytes"]) - 1,
        "prefill": peak_off(case),
    }
    # What is planned and not needed refuses too much; what is needed and not planned ends a job.
    least = {"decode": -TOLERANCE, "prefill": -0.25}
    broken = [
        f"{name} {value:+.1%} beside the plan" for name, value in off.items() if not least[name] <= value <= TOLERANCE
    ]
    # The logits are gathered in every step, whatever the cache; nothing else may be a tenth of one layer's.
    large = [c for c in decode["collectives"] if c[3] >= case["layer_bytes"] / 10 and c[3] != case["logits_bytes"]]
    broken += [f"a decode step's {kind} of {size} bytes" for kind, _, _, size in large]
    return {"steady": steady, "peak": peak, "off": off, "broken": broken}


_ABOUT = f"""\
Llama 3.1 8B's shape, {{layers}} layers, bfloat16, batch {BATCH}, prompts of {PROMPT:,} tokens and {NEW} new
ones, compiled ahead of time for real topologies; nothing here was run. GiB per device. Steady: the arguments
and results of a decode program, donated buffers counted once; off compares it with the plan's weights and
cache. Peak: XLA's peak memory of prefill; off compares it with the plan's total. Where prompts are read by
programs of one layer it is that of the largest, with the weights and caches of the other layers; plans are
of a program of all layers, and so ask for more than RazorAttention needs. Even: the cache's bytes on a
device divided by an even share of a single device's cache.
The plan's model of prefill on TPUs was fitted to the first of these rows and to h2o's; what RazorAttention
packs, and what LagKV computes for every token, are counted with factors fitted to their rows."""

_ROUNDS = f"""\
A question of {QUESTION} tokens a row, {BATCH} rows, after {SEEN:,} tokens each, that selects rounds of
{SELECTED:,} in all; half of the {{layers}} layers are below the watershed. Bytes are per device. A round, one
row's {ROUND} tokens, is an array in `pinned_host` memory, sharded over the devices of its row; each device copies
its own shard.
Where the number of heads is not divisible by that of devices (1 x 16), a head's slots are sharded, and
gathered on the devices."""


def _of(*keys: str) -> Callable[[Case], Any]:
    """The value under these keys, one within the other."""

    def value(case: Case) -> Any:
        for key in keys:
            case = case[key]
        return case

    return value


_WHERE = (Column("topology", "topology"), Column("data x model", lambda case: f"{case['data']} x {case['model']}"))
_MEMORY = (
    *_WHERE,
    Column("policy", "policy"),
    Column("weights", _of("plan", "weights_bytes"), _gib),
    Column("cache", _of("plan", "cache_bytes"), _gib),
    Column("even", _of("plan", "cache_over_even"), "{:.3f}".format),
    Column("steady, XLA", _of("judged", "steady"), _gib),
    Column("off", _of("judged", "off", "decode"), "{:+.2%}".format),
    Column("peak, XLA", _of("judged", "peak"), _gib),
    Column("off", _of("judged", "off", "prefill"), "{:+.2%}".format),
    Column("temporary, decode", _of("decode", "temporary"), _gib),
)
_COLLECTIVES = (
    Column("collective", lambda found: found[0]),
    Column("result", lambda found: found[1], "`{}`".format),
    Column("in the program", lambda found: found[2]),
    Column("bytes", lambda found: found[3], "{:,}".format),
)


def _memory(cases: Sequence[Case]) -> Table:
    return Table(_MEMORY, [{**case, "judged": judged(case)} for case in cases])


def _collectives(cases: Sequence[Case]) -> list[str | Table]:
    parts: list[str | Table] = []
    for case in cases:
        where = f"{case['topology']}, {case['data']} x {case['model']}, {case['policy']}"
        parts.append(f"{where}; one layer's cache on a device is {case['layer_bytes']:,} bytes:")
        parts.append(Table(_COLLECTIVES, case["decode"]["collectives"]))
    return parts


def _prefills(cases: Sequence[Case]) -> list[Heading | str | Table]:
    if not cases:
        return []
    off = {(case["policy"], case["data"], case["model"]): peak_off(case) for case in cases}
    meshes = [
        Column(f"{data} x {model}", lambda policy, on=(data, model): off[policy, *on], "{:+.2%}".format)
        for data, model in PREFILL_MESHES
    ]
    return [
        Heading("Prefill of every policy"),
        f"XLA's peak memory of prefill compared with the plan's total, {PREFILL_LAYERS} layers, {PREFILLS_ON}.",
        Table([Column("policy", str), *meshes], PREFILLS),
    ]


def _largest(found: Case) -> str:
    return "{} `{}`".format(*found["collectives"][0]) if found["collectives"] else "none"


def _rounds(cases: Sequence[Case]) -> Table:
    sizes = {"in host memory": "host", "arguments": "arguments", "results": "results", "donated": "aliased"}
    sizes["temporary"] = "temporary"
    columns = [
        *_WHERE,
        Column("program", "program"),
        *(Column(title, name, "{:,}".format) for title, name in sizes.items()),
        Column("largest collective", _largest),
    ]
    programs = [{**case, "program": name, **found} for case in cases for name, found in case["programs"].items()]
    return Table(columns, programs)


def render(
    results: Sequence[Case],
    prefills: Sequence[Case],
    rounds: Sequence[Case],
    options: str,
    layers: int,
    versions: str,
) -> str:
    """The page."""
    return Report(
        [
            "# A model on many devices, as XLA's TPU compiler sees it",
            _ABOUT.format(layers=layers),
            _memory(results),
            Heading("Collectives of a decode step"),
            *_collectives(results),
            *_prefills(prefills),
            Heading("Round Attention"),
            _ROUNDS.format(layers=layers),
            _rounds(rounds),
            f"{versions}. `python -m tools.aot.mesh {options}` writes this page.",
        ]
    ).markdown()
