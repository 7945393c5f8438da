"""Round Attention on dialogues: which rounds a question brings, and whether the answer is the full cache's.

A dialogue's history is read once, whole, and its rounds are put where they belong; then every policy answers every
question from the same rounds, and so does the full cache. Nothing needs a judge: gold rounds and the full cache's own
tokens are what answers are compared with.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kvjax
from kvjax.errors import KvjaxError, UsageError
from kvjax.eval.dialogues import Dialogue, Question
from kvjax.files import write_atomically
from kvjax.model.load import LanguageModel
from kvjax.output import Output
from kvjax.policies import RoundAttention, parse
from kvjax.rounds.history import history_ids, read_history

FULL = "full"
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
      device_bytes, full_bytes: live in device memory while it answered, and of a full cache.
      host_bytes, moved_bytes: in host memory, and brought from there for this question.
      seconds: from the question to the last token, compilation apart.
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
    device_bytes: int
    full_bytes: int
    host_bytes: int
    moved_bytes: int
    seconds: float

    @property
    def key(self) -> tuple[str, int, str]:
        return self.dialogue, self.asked, self.policy


@dataclasses.dataclass(frozen=True)
class Settings:
    """What makes answers comparable: an earlier run with others is not continued."""

    model: str
    dtype: str
    dialogues: str
    tokens: int
    max_new_tokens: int


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
            policy.check(lm.config)
        self._save, self._say = save, say

    def run(self, dialogues: Sequence[Dialogue]) -> None:
        """Every question of every dialogue, by every policy.

        Raises:
          KeyboardInterrupt: after Ctrl-C; what was answered is saved.
        """
        for done, dialogue in enumerate(dialogues, 1):
            known = {answer.key for answer in self.answers}
            names = (FULL, *self.policies)
            wanted = [(dialogue.name, i, name) for i in range(len(dialogue.questions)) for name in names]
            if not set(wanted) <= known:
                try:
                    self._ask(dialogue, known)
                finally:
                    self._save(self.answers)
            self._say(f"dialogue {done} of {len(dialogues)}: {dialogue.name}, {len(dialogue.rounds)} rounds")

    def _ask(self, dialogue: Dialogue, known: set[tuple[str, int, str]]) -> None:
        lm, messages = self.lm, dialogue.messages()
        ids, _ = history_ids(lm, messages)
        whole = kvjax.generate(lm, ids, max_new_tokens=0).cache
        first = next(iter(self.policies.values()))
        rounds = read_history(lm, messages, policy=first)
        earlier = {answer.key: answer for answer in self.answers}
        for i, question in enumerate(dialogue.questions):
            reference = earlier.get((dialogue.name, i, FULL))
            if reference is None:
                reference = self._answer(dialogue, i, FULL, question, whole, None)
            for name, policy in self.policies.items():
                if (dialogue.name, i, name) not in known:
                    self._answer(dialogue, i, name, question, rounds.replace(policy=policy), reference)

    def _answer(
        self, dialogue: Dialogue, asked: int, name: str, question: Question, cache: Any, reference: Answer | None
    ) -> Answer:
        message = [{"role": "user", "content": question.text}]
        output: Output = kvjax.generate(self.lm, message, cache=cache, max_new_tokens=self.settings.max_new_tokens)
        if output.finish_reason == "interrupted":
            raise KeyboardInterrupt
        stats, found = output.stats, output.stats.rounds
        wanted = output.tokens if reference is None else reference.tokens
        same = next((i for i, pair in enumerate(zip(wanted, output.tokens, strict=False)) if pair[0] != pair[1]), None)
        answer = Answer(
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
            device_bytes=stats.live_cache_bytes,
            full_bytes=stats.full_cache_bytes,
            host_bytes=0 if found is None else found.host_bytes,
            moved_bytes=0 if found is None else found.moved_bytes,
            seconds=stats.time_to_first_token + stats.decode_seconds,
        )
        self.answers.append(answer)
        return answer


def round_policy(name: str) -> RoundAttention:
    """A policy to compare; UsageError for one that is not Round Attention, or compresses within rounds."""
    policy = parse(name)
    if not isinstance(policy, RoundAttention) or policy.inner is not None:
        raise UsageError(f"{name!r} is not RoundAttention without inner; give forms of it such as round:top=0.3.")
    return policy


def to_json(settings: Settings, answers: Sequence[Answer], machine: dict[str, Any]) -> str:
    """Everything that was measured."""
    content = {
        "settings": dataclasses.asdict(settings),
        "machine": machine,
        "answers": [dataclasses.asdict(answer) for answer in answers],
    }
    return json.dumps(content, indent=1) + "\n"


def _answer_of(values: dict[str, Any]) -> Answer:
    """JSON has no tuples."""
    found: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Answer(**found)


def read_answers(path: Path, settings: Settings) -> list[Answer]:
    """Answers of an earlier run with the same settings; none when there is no file.

    Raises:
      KvjaxError: the file is of other settings, or not one of these.
    """
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["settings"] != dataclasses.asdict(settings):
            raise KvjaxError(f"{path} holds answers of another model, file or length; give another --out.")
        return [_answer_of(answer) for answer in content["answers"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise KvjaxError(f"{path} is not what compare-rounds writes; give another --out ({error}).") from error


COLUMNS = (
    "policy",
    "rounds selected",
    "gold found",
    "gold recall",
    "first token",
    "tokens agree",
    "tokens used",
    "device",
    "of full",
    "host",
    "moved",
    "turn",
)


def summary(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Means by policy, the full cache first, of the questions that every policy answered."""
    names = [FULL, *dict.fromkeys(answer.policy for answer in answers if answer.policy != FULL)]
    by_question: dict[tuple[str, int], set[str]] = {}
    for answer in answers:
        by_question.setdefault(answer.key[:2], set()).add(answer.policy)
    return [
        _means(name, [a for a in answers if a.policy == name and by_question[a.key[:2]] >= set(names)])
        for name in names
    ]


def _means(name: str, answers: Sequence[Answer]) -> dict[str, Any]:
    judged = [answer for answer in answers if answer.gold]

    def mean(values: Sequence[float]) -> float | None:
        return math.fsum(values) / len(values) if values else None

    return {
        "policy": name,
        "questions": len(answers),
        "rounds": mean([a.rounds for a in answers]),
        "selected": mean([len(a.selected) for a in answers]),
        "gold found": mean([float(bool(set(a.gold) & set(a.selected))) for a in judged]),
        "gold recall": mean([len(set(a.gold) & set(a.selected)) / len(a.gold) for a in judged]),
        "first token": mean([float(a.agrees > 0 or not a.tokens) for a in answers]),
        "tokens agree": mean([a.agrees / max(len(a.tokens), 1) for a in answers]),
        "used": mean([a.used for a in answers]),
        "used share": mean([a.used / a.seen for a in answers]),
        "device": mean([a.device_bytes for a in answers]),
        "of full": mean([a.device_bytes / a.full_bytes for a in answers]),
        "host": mean([a.host_bytes for a in answers]),
        "moved": mean([a.moved_bytes for a in answers]),
        "turn": mean([a.seconds for a in answers]),
    }


def table(answers: Sequence[Answer]) -> list[list[str]]:
    """Cells under ``COLUMNS``."""
    from kvjax.cli.render import human_bytes

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return [
        [
            found["policy"],
            f"{found['selected']:.1f} of {found['rounds']:.1f}",
            share(found["gold found"]),
            share(found["gold recall"]),
            share(found["first token"]),
            share(found["tokens agree"]),
            f"{found['used']:.0f} ({found['used share']:.0%})",
            human_bytes(found["device"]),
            f"{found['of full']:.1%}",
            human_bytes(found["host"]),
            human_bytes(found["moved"]),
            f"{found['turn']:.2f} s",
        ]
        for found in summary(answers)
        if found["questions"]
    ]


def footnote(settings: Settings, answers: Sequence[Answer], machine: dict[str, Any]) -> str:
    """What the numbers are, and where they come from."""
    questions = {answer.key[:2] for answer in answers}
    judged = {answer.key[:2] for answer in answers if answer.gold}
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return (
        f"{settings.model}, {settings.dtype}; {len(questions)} questions after {len({name for name, _ in questions})} "
        f"dialogues of {settings.dialogues}, cut to {settings.tokens} tokens, {settings.max_new_tokens} tokens "
        "answered; means. Rounds selected: of the earlier ones. Gold found: questions that brought at least one round "
        f"that holds the answer; gold recall: share of such rounds that came ({len(judged)} questions have them). "
        "First token, tokens agree: as the full cache's, and the share of the answer before the first difference. "
        "Tokens used: what the layers above the watershed attended to. Device: live bytes while answering; moved: from "
        f"host memory for the question. Turn: from the question to its last token. {machine['processor']}, "
        f"{machine['cores']} cores; {versions}; {machine['date'][:10]}."
    )


def markdown(settings: Settings, answers: Sequence[Answer], machine: dict[str, Any]) -> str:
    """The table and what it says, as Markdown."""
    from kvjax.eval.report import markdown_table

    return f"{markdown_table(COLUMNS, table(answers))}\n\n{footnote(settings, answers, machine)}\n"


def save(out: Path, settings: Settings, answers: Sequence[Answer], machine: dict[str, Any]) -> None:
    """Numbers and table in the folder ``out``, each whole or not at all."""
    write_atomically(out / "answers.json", to_json(settings, answers, machine))
    write_atomically(out / "rounds.md", markdown(settings, answers, machine))
