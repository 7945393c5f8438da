"""Later turns of a conversation over one compressed context: on the first question's theme, and off it.

RazorAttention's second figure, made measurable: a policy that keeps what the first question needs answers that one
and may have dropped what the next ones ask for. A conversation is defined so:

* The context is RULER's noise haystack with three needles "The special magic {kind} for {key} is: {value}." at
  random lines: two about key A, one about key B, of three different kinds (a number, a color, an animal).
* Turn 1 is the context followed by a question about A: it is in view of the compression, and is answered.
* Turn 2 asks for the other fact about A: *on* the first question's theme, since both name the same key.
* Turn 3 asks for the fact about B: *off* it.

Every turn goes onto the cache the turn before left, the model's own answers included, right or wrong; what a policy
does on a later turn (select again, go on with its ring) is its own affair, and dropped tokens never return. The three
kinds take turns in the three places from sample to sample, so that no turn is the easier one; a color or an animal is
one of 13, so guessing scores about 1 in 20 over all kinds. A turn's score is 1 when the answer holds the value.
"""

from __future__ import annotations

import dataclasses
import random

from kvjax.checks import whole_number
from kvjax.errors import UsageError
from kvjax.eval.ruler import NOISE
from kvjax.eval.words import word_pairs
from kvjax.halving import largest
from kvjax.prompts import Prompt
from kvjax.text.tokenizer import Tokenizer

TURNS = ("first turn", "on theme", "off theme")
#: Tokens an answer may have: a number's seven digits and a few words around them.
ANSWER_TOKENS = 16

# None of these is in the noise (grass, sky and sun have colors there) and none is part of another.
_COLORS = "orange purple pink brown black white silver violet crimson turquoise magenta beige maroon".split()
_ANIMALS = "tiger horse lion wolf eagle shark whale rabbit monkey elephant giraffe zebra penguin".split()
KINDS = ("number", "color", "animal")

_INTRODUCTION = (
    "Some special magic things are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about them afterwards.\n"
)
_NEEDLE = "The special magic {kind} for {key} is: {value}."
_QUESTION = "What is the special magic {kind} for {key} mentioned in the provided text?"
_PREFIX = "The special magic {kind} for {key} mentioned in the provided text is"


@dataclasses.dataclass(frozen=True)
class FollowUps:
    """One context and three questions about it.

    Attributes:
      context: everything before the first question, ending in a newline.
      questions, prefixes: of each turn, the question and the beginning of its answer, which is given to the model.
      outputs: of each turn, the string a right answer contains.
      length: tokens of the three prompts and of three answers of ``ANSWER_TOKENS``.
    """

    context: str
    questions: tuple[str, ...]
    prefixes: tuple[str, ...]
    outputs: tuple[str, ...]
    length: int = 0

    def prompt(self, turn: int, chat: bool) -> Prompt:
        """The prompt of this turn for ``generate``: messages with the answer's beginning, or plain text."""
        question = self.questions[turn] if turn else self.context + self.questions[turn]
        if chat:
            return [{"role": "user", "content": question}, {"role": "assistant", "content": self.prefixes[turn]}]
        return f"{question} {self.prefixes[turn]}" if turn == 0 else f"\n{question} {self.prefixes[turn]}"


def make_conversations(tokenizer: Tokenizer, *, length: int, samples: int, seed: int = 42) -> list[FollowUps]:
    """Conversations that fill ``length`` tokens, answers included, as far as whole lines allow.

    Args:
      tokenizer: the model's own; with a chat template, its tokens count.
      length: tokens of all three turns and their answers.
      samples: how many.
      seed: of every draw; the same samples are made whatever their number.

    Raises:
      UsageError: no sample, or a length too short for three needles.
    """
    whole_number("samples", samples, 1)
    return [_filled(tokenizer, length, index, seed) for index in range(samples)]


def _filled(tokenizer: Tokenizer, length: int, index: int, seed: int) -> FollowUps:
    """The sample of this number with as many lines as fit."""

    def drawn(lines: int) -> FollowUps:
        found = _draw(random.Random(f"{seed} {index}"), index, lines)
        return dataclasses.replace(found, length=_tokens(tokenizer, found))

    lines = largest(3, max(3, length), lambda count: drawn(count).length <= length)  # a line is more than a token
    if not lines:
        raise UsageError(f"{length} tokens are too few for a conversation of three questions; it needs more.")
    return drawn(lines)


def _draw(rng: random.Random, index: int, lines: int) -> FollowUps:
    kinds = [KINDS[(index + place) % len(KINDS)] for place in range(3)]
    first, other = rng.choice(word_pairs()), rng.choice(word_pairs())
    keys = [first, first, other]
    pools = {"color": _COLORS, "animal": _ANIMALS}
    values = [str(rng.randint(1_000_000, 9_999_999)) if k == "number" else rng.choice(pools[k]) for k in kinds]
    facts = [dict(kind=kind, key=key, value=value) for kind, key, value in zip(kinds, keys, values, strict=True)]
    needles = [_NEEDLE.format(**fact) for fact in rng.sample(facts, len(facts))]
    text = [NOISE] * lines
    for place, needle in zip(sorted(rng.sample(range(lines), len(needles)), reverse=True), needles, strict=True):
        text.insert(place, needle)
    return FollowUps(
        context=_INTRODUCTION + "\n".join(text) + "\n",
        questions=tuple(_QUESTION.format(**fact) for fact in facts),
        prefixes=tuple(_PREFIX.format(**fact) for fact in facts),
        outputs=tuple(values),
    )


def _tokens(tokenizer: Tokenizer, drawn: FollowUps) -> int:
    """Tokens of a whole conversation: what its longest cache has seen."""
    asked, first = zip(drawn.questions, drawn.prefixes, strict=True), len(tokenizer.prefix_ids)
    text = drawn.context + "\n".join(f"{question} {prefix}" for question, prefix in asked)
    if tokenizer.has_chat_template:
        messages = [{"role": "user", "content": drawn.context + drawn.questions[0]}]
        for turn in range(1, len(drawn.questions)):
            messages.append({"role": "assistant", "content": drawn.prefixes[turn - 1]})
            messages.append({"role": "user", "content": drawn.questions[turn]})
        text, first = tokenizer.render(messages) + drawn.prefixes[-1], 0
    return first + len(tokenizer.encode(text)) + len(drawn.questions) * ANSWER_TOKENS
