"""``kvjax bench engine``: in-flight batching beside static batches, on the same requests in one run."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvjax.bench import machine
from kvjax.cache.buckets import prompt_bucket
from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import MOST_SLOTS
from kvjax.engine.core import EngineCore
from kvjax.engine.engine_report import EngineReport, report_of
from kvjax.engine.simulate import Arrival
from kvjax.errors import UsageError, quoted
from kvjax.generation import answer
from kvjax.options import GenerationOptions
from kvjax.policies import Policy, format_policy
from kvjax.policies.best import resolve
from kvjax.request import Request
from kvjax.tables import Column, Report, Table, human_bytes, human_rate


@dataclasses.dataclass(frozen=True)
class Measured:
    """One way to serve a trace.

    Attributes:
      name: of the way. policy: its text form. slots: rows of its batch. cache_bytes: of all of them.
      seconds: compilation apart. tokens: generated.
      ideal_seconds: those of slots that are always full: a step's seconds for each ``slots`` tokens, and the prompts
        read in full batches; no number where static batches were not measured.
    """

    name: str
    policy: str
    slots: int
    cache_bytes: int
    seconds: float
    tokens: int
    ideal_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def of_ideal(self) -> float:
        """The part of the ideal's throughput that was reached."""
        return self.ideal_seconds / self.seconds


def three_numbers(flag: str, text: str) -> list[float]:
    """Three numbers of a flag's text."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != 3 or not all(1 <= value <= MOST_SLOTS for value in found):
        upper = f" and at most {MOST_SLOTS}" if any(value > MOST_SLOTS for value in found) else ""
        raise UsageError(f"{flag} is {quoted(text)}; give three numbers of at least 1{upper}, such as 80,20,600.")
    return found


def facts(lm: LanguageModel, requests: int, trace: Sequence[Arrival]) -> str:
    """One sentence of what was measured, and on what."""
    prompt = np.median([arrival.prompt_tokens for arrival in trace])
    answer = np.mean([arrival.new_tokens for arrival in trace])
    about = machine.describe()
    return (
        f"{requests:,} requests to {lm.name} ({lm.params.number_format}), prompts of {prompt:.0f} tokens in the "
        f"median, answers of {answer:.0f} in the mean; {about['device']}, {about['cores']} cores, "
        f"jax {about['versions']['jax']}, {about['date'][:10]}."
    )


def prompts_of(lm: LanguageModel, trace: Sequence[Arrival], seed: int = 0) -> list[list[int]]:
    """Random ids, as many as each request of a trace has."""
    draw = np.random.default_rng(seed)
    most = min(lm.config.vocab_size, lm.tokenizer.vocab_size or lm.config.vocab_size)
    return [draw.integers(0, most, arrival.prompt_tokens).tolist() for arrival in trace]


def measure(
    lm: LanguageModel,
    policy: Policy,
    trace: Sequence[Arrival],
    *,
    slots: int,
    storage: str | None = None,
    static: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[list[Measured], EngineReport]:
    """Serve a trace by static batches and by an engine; every answer has the tokens that its request says.

    Static batches are those of equally many prompts of similar length, each of which ends with its longest answer:
    which one that will be is not known before.
    """
    lm = dataclasses.replace(lm, stop_token_ids=())
    policy = resolve(policy, lm.config, later=False).policy
    _check_lengths(lm, trace)
    prompts = prompts_of(lm, trace)
    options = GenerationOptions(
        policy=policy, storage=storage, max_new_tokens=max(a.new_tokens for a in trace), chat=False
    )
    say("the engine compiles")
    core = EngineCore(
        lm,
        policy,
        storage,
        slots=slots,
        prompt_tokens=max(arrival.prompt_tokens for arrival in trace),
        new_tokens=max(arrival.new_tokens for arrival in trace),
    )
    try:
        compiled_before = core.warm()
        # A machine's speed drifts over the minutes that a trace takes.
        before = core.step_seconds()
        say(f"{compiled_before} programs compiled; a step takes {before * 1000:.1f} ms")
        spent, found = _served(core, lm, prompts, trace, options, say)
        after = core.step_seconds()
        say(f"served; a step takes {after * 1000:.1f} ms")
        allocated = core.sizes.slots_bytes
    finally:
        core.close()
    tokens = sum(arrival.new_tokens for arrival in trace)
    name, reading, made = format_policy(policy.chosen), float("nan"), []
    if static:
        say("static batches")
        largest, seconds, reading = _static(lm, prompts, trace, options, slots)
        made = [Measured("static batches", name, slots, largest, seconds, tokens, 0.0)]
    made.append(Measured("engine", name, core.sizes.slots, allocated, spent, tokens, 0.0))
    ideal = (before + after) / 2 * (tokens - len(trace)) / core.sizes.slots + reading
    return [dataclasses.replace(one, ideal_seconds=ideal) for one in made], found


def _check_lengths(lm: LanguageModel, trace: Sequence[Arrival]) -> None:
    """Refuse (UsageError) a trace with requests beyond the model's context."""
    longest = max(arrival.prompt_tokens + arrival.new_tokens for arrival in trace)
    if longest > lm.config.max_position:
        raise UsageError(
            f"A request of the trace has {longest} tokens in the end, and this model's context is "
            f"{lm.config.max_position}; make --prompt or --new smaller."
        )


def _served(
    core: EngineCore,
    lm: LanguageModel,
    prompts: Sequence[list[int]],
    trace: Sequence[Arrival],
    options: GenerationOptions,
    say: Callable[[str], None],
) -> tuple[float, EngineReport]:
    """(seconds, the engine's report) of a trace whose requests are all there from the start."""
    rows = []
    for prompt, arrival in zip(prompts, trace, strict=True):
        request = Request(lm, prompt, options, exact=True)
        rows.append(core.slots.row_of(request, limit=arrival.new_tokens))
    say("the engine serves")
    began = time.perf_counter()
    for row in rows:
        row.times.arrived = began
        core.add(row)
    while not core.loop.idle:
        core.loop.iterate()
    spent = time.perf_counter() - began
    wrong = [row for row in rows if row.error is not None or len(row.tokens) != row.limit]
    assert not wrong, f"{len(wrong)} requests have other tokens than they were to have: {wrong[0]}"
    return spent, report_of([row.metrics() for row in rows], core.sizes.slots, began, began + spent)


def _static(
    lm: LanguageModel, prompts: Sequence[list[int]], trace: Sequence[Arrival], options: GenerationOptions, slots: int
) -> tuple[int, float, float]:
    """(bytes of the largest batch, seconds, seconds of them that prompts were read), compilation apart."""
    order = sorted(range(len(prompts)), key=lambda i: (-prompt_bucket(len(prompts[i])), -len(prompts[i])))
    batches = [order[i : i + slots] for i in range(0, len(order), slots)]
    seconds = reading = 0.0
    largest = 0
    for batch in batches:
        filled = batch + [batch[-1]] * (slots - len(batch))
        limits = [trace[i].new_tokens for i in batch] + [1] * (slots - len(batch))
        request = Request(lm, [prompts[i] for i in filled], options, limits=limits, exact=True)
        began = time.perf_counter()
        outputs = answer(request)
        stats = outputs[0].stats
        seconds += time.perf_counter() - began - stats.compile_seconds
        reading += stats.prompt_seconds
        largest = max(largest, stats.device_cache_bytes)
    return largest, seconds, reading


def report(measured: Sequence[Measured], found: EngineReport, facts: str) -> Report:
    """The table of what was measured, with the engine's own report."""
    base = measured[0].tokens_per_second
    columns = [
        Column("", "name"),
        Column("policy", "policy"),
        Column("slots", "slots", right=True),
        Column("cache", "cache_bytes", human_bytes, right=True),
        Column("seconds", "seconds", "{:.1f}".format, right=True),
        Column("tokens/s", "tokens_per_second", human_rate, right=True),
        Column("against the first", lambda row: row.tokens_per_second / base, "{:.2f}x".format, right=True),
        Column(
            "of the ideal", lambda row: row.of_ideal if row.of_ideal > 0 else None, "{:.0%}".format, "-", right=True
        ),
    ]
    own = found.report()
    data = [dataclasses.asdict(one) | {"tokens_per_second": one.tokens_per_second} for one in measured]
    for one in data:  # JSON has no NaN
        one["ideal_seconds"] = None if math.isnan(one["ideal_seconds"]) else one["ideal_seconds"]
    return Report([facts, Table(columns, measured), *own.parts], {"measured": data, "engine": found.data()})
