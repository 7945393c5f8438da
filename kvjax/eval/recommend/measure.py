"""Measures entries on passages: needles found, and the next-token loss of what follows, after compression."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache.quantisation import Storage
from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import MOST_BYTES, number, whole_number
from kvjax.errors import DoesNotFit, KvjaxError, UsageError, quoted
from kvjax.eval.asking import Asker
from kvjax.eval.entries import REFERENCE, Entry, check_name, profile_of
from kvjax.eval.material import check_record
from kvjax.eval.recommend.passages import ANSWER_TOKENS, Passage
from kvjax.eval.recorded import RecordedDecoder, can_replay, record
from kvjax.eval.ruler import match_all
from kvjax.eval.suites import estimate as suites_estimate
from kvjax.interrupt import interruptible
from kvjax.planning import plan
from kvjax.policies import Full, format_policy
from kvjax.policies.base import Policy
from kvjax.policies.best import resolve
from kvjax.policies.window_layers import for_model
from kvjax.progress import Stage
from kvjax.runtime.compilation import compile_clock
from kvjax.scoring import score
from kvjax.tables import counted, human_bytes

#: Seconds that the programs of one cache take to compile, about.
_COMPILING = 20.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """The needles found and the loss measured with one cache.

    Attributes:
      policy: its text form, which ``--policy`` takes.
      cache_bytes: of a cache at the length that is asked for, as planned, all rows.
      found: of each needle, whether the answer has its number. losses: of each passage, the mean negative
        log-likelihood of the tokens that follow, in nats.
      refused: why it was not measured, or None.
      profile: a digest of the policy's profiles, see :func:`kvjax.eval.entries.profile_of`.
      notice: what the policy says that it cannot do at these lengths, or None.
    """

    policy: str
    cache_bytes: int = 0
    found: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    refused: str | None = None
    profile: str = ""
    notice: str | None = None

    def __post_init__(self) -> None:
        check_name(self.policy)
        whole_number("cache_bytes", self.cache_bytes, int(self.refused is None), MOST_BYTES)
        for name in ("found", "losses"):
            if not getattr(self, name) and self.refused is None:
                raise UsageError(f"{name} of {quoted(self.policy)} is empty; give a number of each that was measured.")
        for value in self.found:
            number("a needle of found", value, 0, 1)
        for value in self.losses:
            number("a loss of losses", value, 0, open_below=True)

    @property
    def accuracy(self) -> float:
        return float(np.mean(self.found))

    @property
    def loss(self) -> float:
        return float(np.mean(self.losses))


@dataclasses.dataclass(frozen=True)
class Request:
    """The request that a policy is looked for.

    Attributes:
      context: tokens of its prompt. batch: rows. storage: of the cache.
    """

    context: int
    batch: int
    storage: Storage


def cache_bytes(lm: LanguageModel, policy: Policy, request: Request) -> int:
    """Bytes of the cache that a policy makes of the request, whatever the device has."""
    planned = plan(
        lm,
        prompt_tokens=request.context,
        batch=request.batch,
        policy=policy,
        storage=request.storage,
        memory_limit=MOST_BYTES,
        max_new_tokens=1,
    )
    return planned.cache_bytes


def within(
    lm: LanguageModel, entries: Sequence[Entry], request: Request, budget: int, fractions: Sequence[float]
) -> list[Entry]:
    """Each entry without a size of its own, at the largest fraction whose cache is within ``budget`` bytes.

    Raises:
      UsageError: no cache is, so that nothing would be measured but the full one; it names the smallest.
    """
    found: list[Entry] = []
    beyond: list[tuple[int, Entry]] = []
    for entry in entries:
        if entry.retained is None:
            found.append(entry)
            continue
        for fraction in sorted(fractions, reverse=True):
            sized = dataclasses.replace(entry, retained=fraction)
            try:
                size = cache_bytes(lm, _policy_of(lm, sized), request)
            except KvjaxError:  # it is refused, with its sentence, when it is measured
                size = 0
            if size <= budget:
                found.append(sized)
                break
            beyond.append((size, sized))
    if beyond and all(entry.name == REFERENCE for entry in found):
        size, entry = min(beyond, key=lambda one: one[0])
        if cache_bytes(lm, Full(), request) > budget:
            raise UsageError(
                f"No cache of {request.context:,} tokens that would be measured is within {human_bytes(budget)}; the "
                f"smallest, {name_of(entry)}, takes {human_bytes(size)}. Give a larger --budget, or smaller --retained."
            )
    return list(dict.fromkeys(found))


def measure(
    lm: LanguageModel,
    passages: Sequence[Passage],
    entries: Sequence[Entry],
    request: Request,
    *,
    done: Sequence[Measured] = (),
    save: Callable[[list[Measured]], None] = lambda rows: None,
    shown: Stage | None = None,
) -> list[Measured]:
    """Every entry that has no row yet, beside those that have; the passages are run through the model once.

    Raises:
      KvjaxError: the full cache cannot be measured.
      KeyboardInterrupt: Ctrl-C; what was measured before was given to ``save``.
    """
    profiles = {name_of(entry): profile_of(entry) for entry in entries}
    rows = [row for row in done if profiles.get(row.policy, row.profile) == row.profile]
    known = {row.policy for row in rows}
    made: RecordedDecoder | None = None
    with interruptible() as interrupt, compile_clock() as clock:
        asker = Asker(lm, request.storage, clock, interrupt)
        for number, entry in enumerate(entries):
            if shown is not None:
                shown.update(number, len(entries), note=name_of(entry))
            if name_of(entry) in known:
                continue
            if made is None:
                check_record(lm, len(passages), max(len(passage.context) for passage in passages))
                made = record(lm.params, [passage.context for passage in passages])
                asker.check()
            row = _measured(asker, made, passages, entry, request)
            row = dataclasses.replace(row, profile=profiles[row.policy])
            if row.refused is not None and row.policy == REFERENCE:
                raise KvjaxError(row.refused)  # there is nothing to compare with
            rows.append(row)
            save(rows)
            jax.clear_caches()  # a policy's programs serve no other, and those of many caches take gigabytes
    return rows


def name_of(entry: Entry) -> str:
    """The text form of a entry's policy; as it was typed where it is refused."""
    try:
        return format_policy(entry.policy())
    except KvjaxError:
        return entry.name


def _policy_of(lm: LanguageModel, entry: Entry) -> Policy:
    """The policy of contexts that are asked about later."""
    return resolve(entry.policy(), lm.config, later=True).policy


def _measured(
    asker: Asker, made: RecordedDecoder, passages: Sequence[Passage], entry: Entry, request: Request
) -> Measured:
    lm, name = asker.lm, name_of(entry)
    try:
        policy = _policy_of(lm, entry)
        full = for_model(policy, lm.config)
        full.check(lm.config)
        longest = max(len(passage.context) for passage in passages)
        lengths = longest, request.context
        for tokens in lengths:
            if full.useless(lm.config, tokens):
                return Measured(name, refused=full.notice(lm.config, tokens))
        caution = next(filter(None, (full.notice(lm.config, tokens) for tokens in lengths)), None)
        planned = cache_bytes(lm, policy, request)
        cache = asker.compress(
            made if can_replay(full, lm.config) else None, [passage.context for passage in passages], policy
        )
        losses = _losses(lm, cache, passages)
        rows = [i for i, passage in enumerate(passages) for _ in passage.questions]
        answers = asker.ask_onto(
            cache.take(rows), [ids for passage in passages for ids in passage.questions], ANSWER_TOKENS
        )
        wanted = [value for passage in passages for value in passage.outputs]
        found = tuple(match_all(text, (value,)) for text, value in zip(answers.texts, wanted, strict=True))
        return Measured(name, planned, found, losses, notice=caution)  # a loss that is no number is refused
    except DoesNotFit:
        raise
    except KvjaxError as error:
        return Measured(name, refused=str(error))


def _losses(lm: LanguageModel, cache: Any, passages: Sequence[Passage]) -> tuple[float, ...]:
    """The mean loss of each continuation after its first token, which is read."""
    firsts = [passage.continuation[:1] for passage in passages]
    rests = [passage.continuation[1:] for passage in passages]
    scores = score(lm, firsts, rests, cache=cache, chat=False)
    return tuple(-float(np.mean(found.logprobs)) for found in scores)


def expected_seconds(lm: LanguageModel, passages: Sequence[Passage], chosen: Sequence[Entry]) -> float:
    """About how long these caches take, with what is compiled for each."""
    reading = [(len(passages), max(len(passage.context) for passage in passages))]
    once, twice = (suites_estimate.work_seconds(lm, reading, steps=0, repeats=repeats) for repeats in (False, True))
    answering = suites_estimate.work_seconds(lm, [], steps=len(chosen) * ANSWER_TOKENS)
    # Prompts are read for all caches at once, but for policies that have the model repeat them.
    repeating = sum(_repeats(lm, entry) for entry in chosen)
    return once + repeating * twice + answering + len(chosen) * _COMPILING


def _repeats(lm: LanguageModel, entry: Entry) -> bool:
    """Whether an entry's policy has the model repeat each prompt; False where it is refused."""
    try:
        return resolve(entry.policy(), lm.config, later=True).policy.signals.repeat is not None
    except KvjaxError:
        return False


def facts(lm: LanguageModel, passages: Sequence[Passage], request: Request, about: dict[str, Any]) -> list[str]:
    """How it was measured, in sentences; ``about`` describes the machine."""
    needles = sum(len(passage.questions) for passage in passages)
    longest = max(len(passage.context) for passage in passages)
    return [
        f"{lm.name} ({lm.params.number_format}); bytes are those of {request.batch} x {request.context:,} tokens. "
        f"Loss and needles were measured on {counted(len(passages), 'passage')} of at most {longest:,} tokens, with "
        f"{counted(needles, 'needle that was', 'needles that were')} asked for after the compression, "
        f"and {len(passages[0].continuation)} tokens that follow; "
        f"{about['device']}, jax {about['versions']['jax']}, {about['date'][:10]}.",
        f"One needle is {1 / needles:.0%}; differences of a few needles mean little.",
    ]
