"""Dialogues from files: what people really asked, in the forms that data sets come in.

* messages: a JSON list (or a line each) of dialogues, each a list of ``{"role", "content"}`` or an object with it as
  "messages", or ShareGPT's "conversations" of ``{"from", "value"}``. The last user message is the question.
* LongChat topics (LongEval): ``{"prompt", "topics"}``, a record of a conversation in one prompt. Its own question asks
  for the first topic; one more a topic asks what was said about it, so that every place of the record is asked for.
* LongMemEval: ``{"question", "haystack_sessions", "answer_session_ids", ...}`` (or lists of questions over one
  haystack). Evidence sessions and as many others before and after as fit make the history.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import whole_number
from kvjax.documents import NotADocument, parse_json
from kvjax.errors import UsageError, quoted
from kvjax.files import reason

Message = dict[str, str]
#: A question and its answer.
Exchange = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question after a history.

    Attributes:
      text: the user's message. gold: rounds of the history that hold the answer; () when nobody said.
      answer: a string that a right answer contains, or None. kind: of question, for tables by kind.
    """

    text: str
    gold: tuple[int, ...] = ()
    answer: str | None = None
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """Rounds, and what may be asked after them.

    Attributes:
      name: where it is from. rounds: questions and answers in order. system: the system message, if it had one.
    """

    name: str
    rounds: tuple[Exchange, ...]
    questions: tuple[Question, ...]
    system: str | None = None

    def messages(self) -> list[Message]:
        """The history as messages."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        turns = [
            {"role": role, "content": text}
            for exchange in self.rounds
            for role, text in zip(("user", "assistant"), exchange, strict=True)
        ]
        return system + turns

    def without(self, first: int, last: int) -> Dialogue:
        """Only rounds ``first .. last - 1``, and the questions whose gold rounds are among them."""
        questions = tuple(
            dataclasses.replace(question, gold=tuple(i - first for i in question.gold))
            for question in self.questions
            if all(first <= i < last for i in question.gold)
        )
        return dataclasses.replace(self, rounds=self.rounds[first:last], questions=questions)

    @property
    def asks_for_its_beginning(self) -> bool:
        """Whether a question is about the first round: then a shorter history is its first rounds, else its last."""
        return any(0 in question.gold for question in self.questions)

    def shortened(self, rounds: int) -> Dialogue:
        """Only so many rounds (all of them where it has no more), and the questions that can still be answered."""
        whole = len(self.rounds)
        first = 0 if self.asks_for_its_beginning else max(whole - rounds, 0)
        return self.without(first, min(first + rounds, whole))


def read_dialogues(path: Path, count: Callable[[str], int], tokens: int) -> list[Dialogue]:
    """The dialogues of a file, each cut to at most ``tokens`` tokens of history.

    Args:
      count: tokens of a text, about.

    Raises:
      UsageError: the file cannot be read, or holds none of the known forms.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # with or without a byte-order mark
    except (OSError, ValueError) as error:
        raise UsageError(f"--dialogues names a file that cannot be read: {path} ({reason(error)}).") from error
    found: list[Dialogue] = []
    for i, item in enumerate(_records(text, path)):
        name = f"{path.stem}-{i}"
        try:
            if isinstance(item, dict) and "haystack_sessions" in item:
                found += _long_mem_eval(name, item, count, tokens)
            elif isinstance(item, dict) and {"prompt", "topics"} <= set(item):
                found.append(_kept_last(_long_chat(name, item), count, tokens))
            else:
                found.append(_kept_last(_messages(name, item, path), count, tokens))
        except UsageError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            lacks = f"{type(error).__name__}: {quoted(str(error))}"
            raise UsageError(f"Record {i} of {path} has not all that its data set's records have ({lacks}).") from error
    kept = [dialogue for dialogue in found if dialogue.rounds and dialogue.questions]
    if not kept:
        raise UsageError(f"{path} holds no dialogue with a round before its question that fits {tokens} tokens.")
    return kept


def history_capacity(lm: LanguageModel, tokens: int | None) -> int:
    """Tokens that a history may have: ``tokens``, or three quarters of the context; the rest is for what follows it."""
    room = lm.config.max_position * 3 // 4 if tokens is None else tokens
    whole_number("tokens", room, 1, lm.config.max_position)
    return room


def long_dialogues(
    lm: LanguageModel, path: Path, *, most: int, least_rounds: int, tokens: int | None
) -> list[Dialogue]:
    """The first ``most`` dialogues of a file with at least so many rounds, cut to ``tokens`` tokens of this model's.

    Raises:
      UsageError: numbers that make no sense, a file that cannot be read, or without such a dialogue; a model without
        a chat template.
    """
    whole_number("most", most, 1)
    if not lm.tokenizer.has_chat_template:
        raise UsageError("Dialogues are told in a model's chat template, and this model has none; choose a chat model.")
    room = history_capacity(lm, tokens)
    read = read_dialogues(path, lambda text: len(lm.tokenizer.encode(text)), room)
    found = [dialogue for dialogue in read if len(dialogue.rounds) >= least_rounds][:most]
    if not found:
        raise UsageError(f"No dialogue of {path} has {least_rounds} rounds before its question that fit {room} tokens.")
    return found


def _records(text: str, path: Path) -> list[Any]:
    try:
        whole = parse_json(text)
    except NotADocument:
        try:
            # Not splitlines(): JSON may hold line separators of Unicode as they are.
            return [parse_json(line) for line in text.split("\n") if line.strip()]
        except NotADocument as error:
            raise UsageError(f"{path} is neither JSON nor JSON lines: {error}.") from error
    if isinstance(whole, dict):
        return [whole]
    if isinstance(whole, list) and whole and isinstance(whole[0], dict) and {"role", "content"} <= set(whole[0]):
        return [whole]
    return whole if isinstance(whole, list) else []


_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "bard": "assistant", "chatgpt": "assistant"}


def _messages(name: str, item: Any, path: Path) -> Dialogue:
    turns: Any = item.get("messages", item.get("conversations")) if isinstance(item, dict) else item
    try:
        pairs = [(str(turn.get("role") or turn["from"]), _text(turn)) for turn in turns]
    except (TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f'{path} holds a dialogue that is no list of {{"role", "content"}} messages, nor one of the data sets '
            "that are known: ShareGPT, LongChat topics, LongMemEval."
        ) from error
    pairs = [(_ROLES.get(role, role), text) for role, text in pairs]
    system = next((text for role, text in pairs if role == "system"), None)
    last = max((i for i, (role, _) in enumerate(pairs) if role == "user"), default=-1)
    question = (Question(pairs[last][1], kind="last message"),) if last >= 0 and pairs[last][1].strip() else ()
    return Dialogue(name, tuple(_exchanges(pairs[: max(last, 0)])), question, system)


def _text(turn: dict[str, Any]) -> str:
    """The text of a message; empty where it has none, such as a call of a tool."""
    text = turn["content"] if "content" in turn else turn["value"]
    if text is not None and not isinstance(text, str):
        raise TypeError(f"a message of type {type(text).__name__}")
    return text or ""


def _exchanges(pairs: Sequence[tuple[str, str]]) -> list[Exchange]:
    """User and assistant in turns: what one says in a row is one message, an answer without a question is left out."""
    merged: list[list[str]] = []
    for role, text in pairs:
        if role not in ("user", "assistant") or not text.strip():
            continue
        if merged and merged[-1][0] == role:
            merged[-1][1] += "\n" + text
        else:
            merged.append([role, text])
    start = 0 if merged and merged[0][0] == "user" else 1
    return [(merged[i][1], merged[i + 1][1]) for i in range(start, len(merged) - 1, 2)]


def _long_chat(name: str, item: dict[str, Any]) -> Dialogue:
    record, _, ending = item["prompt"].partition("Now the record start.")[2].rpartition("Now the record ends.")
    turns = re.findall(r"(USER|ASSISTANT):(.*?)(?=USER:|ASSISTANT:|$)", record, flags=re.DOTALL)
    rounds = _exchanges([("user" if role == "USER" else "assistant", text.strip()) for role, text in turns])
    starts = [i for i, (asked, _) in enumerate(rounds) if "would like to discuss the topic of" in asked]
    ends = [*starts[1:], len(rounds)]
    questions = [Question(ending.strip(), tuple(starts[:1]), item["topics"][0], "first topic")]
    for first, last, topic in zip(starts, ends, item["topics"], strict=False):
        text = f"Earlier we discussed {topic[0].lower() + topic[1:]}. What did you tell me about it?"
        questions.append(Question(text, tuple(range(first, last)), None, "a topic"))
    return Dialogue(name, tuple(rounds), tuple(questions))


def _long_mem_eval(name: str, item: dict[str, Any], count: Callable[[str], int], tokens: int) -> list[Dialogue]:
    many = "questions" in item
    asked = item["questions"] if many else [item["question"]]
    answers = item["answers"] if many else [item["answer"]]
    evidence = item["answer_session_ids"] if many else [item["answer_session_ids"]]
    sessions = list(zip(item["haystack_session_ids"], item["haystack_sessions"], strict=True))
    kind = str(item.get("question_type", ""))
    found = []
    for i, (text, answer, wanted) in enumerate(zip(asked, answers, evidence, strict=True)):
        history: list[tuple[int, Exchange, bool]] = []  # place in the haystack, exchange, whether it is gold
        spent = 0
        gold = [place for place, (session, _) in enumerate(sessions) if session in wanted]
        # Evidence first, then the sessions nearest to it, whole, while they fit; in the end all by date.
        for place in sorted(
            range(len(sessions)), key=lambda p: (p not in gold, min((abs(p - g) for g in gold), default=p))
        ):
            turns = sessions[place][1]
            cost = sum(count(turn["content"]) + 6 for turn in turns)
            if spent + cost > tokens:
                continue
            spent += cost
            history += [(place, *pair) for pair in _marked(turns, place in gold)]
        history.sort(key=lambda entry: entry[0])
        golden = tuple(j for j, entry in enumerate(history) if entry[2])
        if set(gold) <= {entry[0] for entry in history} and golden:
            question = Question(text, golden, str(answer), kind)
            found.append(Dialogue(f"{name}-{i}", tuple(entry[1] for entry in history), (question,)))
    return found


def _marked(turns: Sequence[dict[str, Any]], evidence: bool) -> list[tuple[Exchange, bool]]:
    """A session's exchanges, and which are gold: those with a turn that has the answer, else all of the evidence."""
    pairs = _exchanges([(turn["role"], turn["content"]) for turn in turns])
    told = [turn["content"] for turn in turns if turn.get("has_answer")]
    if not evidence:
        return [(pair, False) for pair in pairs]
    return [(pair, not told or any(text in pair[0] or text in pair[1] for text in told)) for pair in pairs]


def _kept_last(dialogue: Dialogue, count: Callable[[str], int], tokens: int) -> Dialogue:
    """The last rounds that fit; a record that begins with what is asked for keeps its first ones instead."""
    costs = [count(asked) + count(said) + 12 for asked, said in dialogue.rounds]
    if sum(costs) <= tokens:
        return dialogue
    fits, spent = 0, 0
    for cost in costs if dialogue.asks_for_its_beginning else costs[::-1]:
        if spent + cost > tokens:
            break
        fits, spent = fits + 1, spent + cost
    return dialogue.shortened(fits)
