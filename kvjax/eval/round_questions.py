"""Round Attention on dialogues: which rounds a question brings, and whether the answer is the full cache's.

A dialogue's history is read once, whole, and its rounds are put where they belong; then every policy answers every
question from the same rounds, and so does the full cache. Nothing needs a judge: gold rounds and the full cache's own
tokens are what answers are compared with.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import MOST, MOST_BYTES, number, whole_number
from kvjax.documents import NotADocument, parse_json, same, validated
from kvjax.errors import KvjaxError, UsageError, cut, quoted
from kvjax.eval.dialogues import Dialogue
from kvjax.generation import generate
from kvjax.history import history_ids, read_history
from kvjax.output import Output
from kvjax.policies import RoundAttention, parse
from kvjax.policies.parsing import class_named
from kvjax.policies.window_layers import for_model

FULL = "full"
#: Seconds that an answer may take: what lies beyond was not measured, and ratios of these stay numbers.
_SECONDS = 1e-9, 1e9
DEFAULT = (
    "round",
    "round:strategy=fixed",
    "round:strategy=adaptive",
    "round:strategy=above_mean",
    "round:granularity=token",
    "round:strategy=above_mean,granularity=token",
    "round:top=0.3",
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """One question answered under one policy.

    Attributes:
      dialogue, kind, policy: what was asked, and how. asked: the question's place among the dialogue's.
      rounds: earlier rounds. selected: of them, those it saw. gold: those that hold the answer.
      tokens: that were generated. agrees: of them, how many are the full cache's before the first that is not.
      right: whether the text contains the answer; None where none is known.
      used, seen: tokens that the upper layers attended to, and all.
      live_bytes, allocated_bytes: on the device while it answered, of slots that hold a token and of all slots.
      peak_bytes: most that was held on the device for the conversation at once during the turn, the one that it
        continues included; None, as allocated_bytes, in answers of version 0.1.
      full_bytes: of a full cache, what every token seen would take.
      host_bytes, moved_bytes: in host memory, and brought from there for this question.
      seconds: from the question to the last token, compilation apart; one for each time it was timed.
      full_seconds: the same of the full cache, timed just before.
    """

    dialogue: str
    kind: str
    asked: int
    policy: str
    rounds: int
    selected: tuple[int, ...]
    gold: tuple[int, ...]
    tokens: tuple[int, ...]
    agrees: int
    right: bool | None
    used: int
    seen: int
    live_bytes: int
    full_bytes: int
    host_bytes: int
    moved_bytes: int
    seconds: tuple[float, ...]
    full_seconds: tuple[float, ...]
    allocated_bytes: int | None = None
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        # Of a policy's text the name alone: the profile that an option names may be gone since.
        named = class_named(self.policy)
        if self.policy != FULL and (named is None or not issubclass(named, RoundAttention)):
            raise UsageError(f"policy is {quoted(self.policy)}; give {FULL} or a form of round.")
        for name in ("asked", "rounds", "used"):
            whole_number(name, getattr(self, name), 0)
        whole_number("seen", self.seen, 1)
        if self.used > self.seen:
            raise UsageError(f"used is {self.used}; give no more than the {self.seen} seen.")
        for name in ("live_bytes", "full_bytes", "host_bytes", "moved_bytes"):
            whole_number(name, getattr(self, name), int(name == "full_bytes"), MOST_BYTES)
        for name in ("allocated_bytes", "peak_bytes"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 0, MOST_BYTES)
        for name in ("selected", "gold"):
            for place in getattr(self, name):
                whole_number(f"a round of {name}", place, 0, self.rounds - 1)
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise UsageError(f"{name} has a round twice; give each once.")
        for token in self.tokens:
            whole_number("a token", token, 0)
        whole_number("agrees", self.agrees, 0, len(self.tokens))
        for name in ("seconds", "full_seconds"):
            for value in getattr(self, name):
                number(f"a time of {name}", value, *_SECONDS)

    @property
    def turn(self) -> float:
        """Time as a multiple of the full cache's: the median of the times it was asked."""
        return statistics.median(a / b for a, b in zip(self.seconds, self.full_seconds, strict=True))

    @property
    def key(self) -> tuple[str, int, str]:
        return self.dialogue, self.asked, self.policy


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that make answers comparable: an earlier run with others is not continued.

    Attributes:
      dialogues: the name of the file. digest: of its bytes. parameters: a digest of the weights. Runs of earlier
        versions did not keep either.
    """

    model: str
    dtype: str
    dialogues: str
    tokens: int
    max_new_tokens: int
    repeats: int
    digest: str = ""
    parameters: str = ""


@dataclasses.dataclass(frozen=True)
class Saved:
    """The schema with which ``answers.json`` is read."""

    settings: Settings
    answers: list[Answer]

    def __post_init__(self) -> None:
        for answer in self.answers:
            if not answer.seconds or len(answer.seconds) != len(answer.full_seconds):
                raise ValueError(f"the answer to {cut(answer.dialogue)} has not been timed beside the full cache")
        if len({answer.key for answer in self.answers}) < len(self.answers):
            raise ValueError("a question is answered twice under one policy")


class RoundComparison:
    """Asks what is not answered yet; every answer is saved at once.

    Args:
      policies: text forms of RoundAttention without inner.
      answers: of an earlier run. save: called with all answers after every dialogue. say: told what goes on.
    """

    def __init__(
        self,
        lm: LanguageModel,
        policies: Sequence[str],
        settings: Settings,
        *,
        answers: Sequence[Answer],
        save: Callable[[Sequence[Answer]], None],
        say: Callable[[str], None],
    ):
        self.lm, self.settings, self.answers = lm, settings, list(answers)
        self.policies = {name: round_policy(name) for name in policies}
        for policy in self.policies.values():
            for_model(policy, lm.config).check(lm.config)
        self._save, self._say = save, say

    def run(self, dialogues: Sequence[Dialogue]) -> None:
        """Every question of every dialogue, by every policy.

        Raises:
          KvjaxError: an earlier answer is to a question that its dialogue has not.
          KeyboardInterrupt: after Ctrl-C; what was answered is saved.
        """
        questions = {dialogue.name: len(dialogue.questions) for dialogue in dialogues}
        for answer in self.answers:
            if answer.asked >= questions.get(answer.dialogue, MOST):
                raise KvjaxError(
                    f"An earlier answer is to question {answer.asked} of {cut(answer.dialogue)}, which counts "
                    f"{questions[answer.dialogue]} from 0; give another --out."
                )
        for done, dialogue in enumerate(dialogues, 1):
            known = {answer.key for answer in self.answers}
            names = (FULL, *self.policies)
            wanted = [(dialogue.name, i, name) for i in range(len(dialogue.questions)) for name in names]
            if not set(wanted) <= known:
                try:
                    self._ask(dialogue, known)
                finally:
                    if self.answers:  # a report of none has nothing to say
                        self._save(self.answers)
            self._say(f"dialogue {done} of {len(dialogues)}: {dialogue.name}, {len(dialogue.rounds)} rounds")

    def _ask(self, dialogue: Dialogue, known: set[tuple[str, int, str]]) -> None:
        lm, messages = self.lm, dialogue.messages()
        ids, _ = history_ids(lm, messages)
        whole = generate(lm, ids, max_new_tokens=0).cache
        # Where the rounds are follows from the watershed; policies that share it start from the same ones.
        rounds = {policy.layers_below(lm.config): policy for policy in self.policies.values()}
        rounds = {below: read_history(lm, messages, policy=policy) for below, policy in rounds.items()}
        earlier = {answer.key: answer for answer in self.answers}
        for i in range(len(dialogue.questions)):
            caches: dict[str, Any] = {FULL: whole}
            for name, policy in self.policies.items():
                if (dialogue.name, i, name) not in known:
                    caches[name] = rounds[policy.layers_below(lm.config)].replace(policy=policy)
            reference = earlier.get((dialogue.name, i, FULL))
            if reference is None or len(caches) > 1:
                asked = self._answers(dialogue, i, caches, reference)
                self.answers += asked if reference is None else asked[1:]

    def _answers(
        self, dialogue: Dialogue, asked: int, caches: Mapping[str, Any], reference: Answer | None
    ) -> list[Answer]:
        """The answer from each cache, the full one first; they are asked in turn, so that all are timed alike."""
        message = [{"role": "user", "content": dialogue.questions[asked].text}]
        found: dict[str, Answer] = {}
        seconds: dict[str, list[float]] = {name: [] for name in caches}
        for done in range(1 + self.settings.repeats):
            for name, cache in caches.items():
                output = generate(self.lm, message, cache=cache, max_new_tokens=self.settings.max_new_tokens)
                if output.finish_reason == "interrupted":
                    raise KeyboardInterrupt
                # The first time is not counted: it waits for what reading the history left to do.
                if done:
                    seconds[name].append(output.stats.time_to_first_token + output.stats.decode_seconds)
                else:
                    wanted = output.tokens if name == FULL and reference is None else (reference or found[FULL]).tokens
                    found[name] = _answer(dialogue, asked, name, output, wanted)
        full = tuple(seconds[FULL])
        return [
            dataclasses.replace(answer, seconds=tuple(seconds[name]), full_seconds=full)
            for name, answer in found.items()
        ]


def _answer(dialogue: Dialogue, asked: int, name: str, output: Output, wanted: Sequence[int]) -> Answer:
    """An output as it is kept, its times apart; ``wanted`` are the full cache's tokens."""
    question, stats, found = dialogue.questions[asked], output.stats, output.stats.rounds
    same = next((i for i, pair in enumerate(zip(wanted, output.tokens, strict=False)) if pair[0] != pair[1]), None)
    return Answer(
        dialogue=dialogue.name,
        kind=question.kind,
        asked=asked,
        policy=name,
        rounds=len(dialogue.rounds),
        selected=tuple(range(len(dialogue.rounds))) if found is None else found.selected,
        gold=question.gold,
        tokens=output.tokens,
        agrees=min(len(wanted), len(output.tokens)) if same is None else same,
        right=None if question.answer is None else question.answer.lower() in output.text.lower(),
        used=stats.seen if found is None else found.tokens_used,
        seen=stats.seen,
        live_bytes=stats.live_cache_bytes,
        allocated_bytes=stats.cache_bytes,
        peak_bytes=stats.device_peak_bytes,
        full_bytes=stats.full_cache_bytes,
        host_bytes=0 if found is None else found.host_bytes,
        moved_bytes=0 if found is None else found.moved_bytes,
        seconds=(),
        full_seconds=(),
    )


def round_policy(name: str) -> RoundAttention:
    """A policy to compare; UsageError for one that is not Round Attention, or compresses within rounds."""
    policy = parse(name)
    if not isinstance(policy, RoundAttention) or policy.inner is not None:
        raise UsageError(f"{quoted(name)} is not RoundAttention without inner; give forms of it such as round:top=0.3.")
    return policy


def _renamed(value: Any) -> Any:
    """The content of the file with the names of today: version 0.1 wrote live bytes as "device_bytes"."""
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {"live_bytes" if name == "device_bytes" else name: _renamed(item) for name, item in value.items()}


def _check_settings(path: Path, found: Any, settings: Settings) -> None:
    """Refuse (UsageError) an earlier run of other settings; it may not have kept digests."""
    held = {"digest": settings.digest, "parameters": settings.parameters, **(found if isinstance(found, dict) else {})}
    for name, value in dataclasses.asdict(settings).items():
        if not same(held.get(name), value):
            other = f"with {name} {quoted(held.get(name))}, and {quoted(value)} is asked for"
            what = {"digest": "of another file of dialogues", "parameters": "of other weights"}.get(name, other)
            raise UsageError(f"{path} holds answers {what}; choose another --out.")


def read_answers(path: Path, settings: Settings) -> list[Answer]:
    """Answers of an earlier run with the same settings; none when there is no file.

    Raises:
      UsageError: the file is of other settings.
      KvjaxError: it is none of these.
    """
    if not path.exists():
        return []
    try:
        content = parse_json(path.read_bytes())
        if isinstance(content, dict):
            _check_settings(path, content.get("settings"), settings)
        return validated(Saved, _renamed(content)).answers
    except OSError as error:
        raise KvjaxError(f"{path} cannot be read: {error.strerror}.") from error
    except NotADocument as error:
        raise KvjaxError(f"{path} is not what compare-rounds writes; give another --out ({error}).") from error
