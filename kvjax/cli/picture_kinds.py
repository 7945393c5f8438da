"""The pictures of ``kvjax picture``: each checks its own options, and draws itself on a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvjax.checks import whole_number
from kvjax.cli import first_steps
from kvjax.cli.app import INTERRUPTED
from kvjax.errors import UsageError
from kvjax.files import is_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvjax.checkpoints.load import LanguageModel
    from kvjax.eval.results import Settings

_say = functools.partial(first_steps.say, "picture")

POSITIONS, ALIKE, LONG = "retained-positions", "question-answer", "long-generation"
#: Policies whose kept positions are shown; the paper gives every method a recent window of 32 tokens.
KEEPING = ("h2o:recent=32", "ahakv:recent=32")


class Picture(Protocol):
    """One of the pictures, with its options as they were given."""

    def check(self) -> None:
        """Refuse (UsageError), before a model is loaded, options that this picture cannot be drawn with."""
        ...

    def draw(self, lm: LanguageModel, out: Path) -> int:
        """Measure, and draw into ``out``; returns the command's exit status."""
        ...


@dataclasses.dataclass(frozen=True)
class RetainedPositions:
    """The tokens that policies keep of one prompt: the first ``length`` of ``text``, or of Python's reference."""

    ratio: float
    text: str | None
    length: int

    @property
    def policies(self) -> list[str]:
        return [f"{policy},ratio={self.ratio}" for policy in KEEPING]

    def check(self) -> None:
        _parse_all(self.policies)

    def draw(self, lm: LanguageModel, out: Path) -> int:
        from kvjax.eval.positions import documentation, positions_figure, retained_positions

        ids = lm.tokenizer.encode(documentation() if self.text is None else self.text)[: self.length]
        found = []
        for policy in self.policies:
            _say(f"{policy} reads {len(ids)} tokens")
            found.append(retained_positions(lm, ids, policy))
        _save(out, positions_figure(found))
        return 0


@dataclasses.dataclass(frozen=True)
class QuestionAnswer:
    """Draws how questions and answers of real dialogues attend to earlier rounds; prints the numbers of its title.

    Attributes:
      dialogues: a file of them. most: how many to read. least_rounds: of a dialogue.
      tokens: to which each is cut; None for the context.
    """

    dialogues: Path | None
    most: int
    least_rounds: int
    tokens: int | None

    def check(self) -> None:
        if self.dialogues is None or not is_file(self.dialogues):
            given = "" if self.dialogues is None else f", and {self.dialogues} is none"
            raise UsageError(f"{ALIKE} is drawn of real dialogues; give --dialogues a file of them{given}.")

    def draw(self, lm: LanguageModel, out: Path) -> int:
        from kvjax.eval.dialogues import long_dialogues
        from kvjax.eval.question_answer import alike_figure, last_round, means
        from kvjax.policies.profile import WatershedProfile
        from kvjax.policies.profile_files import packaged

        assert self.dialogues is not None
        chosen = long_dialogues(lm, self.dialogues, most=self.most, least_rounds=self.least_rounds, tokens=self.tokens)
        found = []
        for done, dialogue in enumerate(chosen, 1):
            found.append(last_round(lm, dialogue))
            _say(f"dialogue {done} of {len(chosen)}: {dialogue.name}, {len(dialogue.rounds)} rounds")
        profile = packaged(WatershedProfile, lm.config)
        alike, _, as_lengths = means(found)
        print(
            f"Dialogues: {len(found)}. Question and answer correlate {alike.min():.2f} to {alike.max():.2f} by layer, "
            f"mean {alike.mean():.2f}; question and the rounds' lengths {as_lengths.mean():.2f}."
        )
        _save(out, alike_figure(found, None if profile is None else profile.watershed, lm.name))
        return 0


@dataclasses.dataclass(frozen=True)
class LongGeneration:
    """Next-token loss along a long answer under policies that evict; the means are printed.

    What the numbers beside the picture hold already is not measured again.

    Attributes:
      slots: of each head. evicting: the policies as they were typed; None for those of the picture.
      text: the answer, None for a made-up solution, drawn by ``seed``. tokens: of the answer, None for 2,000.
    """

    slots: int
    evicting: str | None
    text: str | None
    tokens: int | None
    seed: int

    @property
    def policies(self) -> list[str]:
        from kvjax.eval import long_generation

        return long_generation.policies(self.slots, self.evicting)

    def check(self) -> None:
        whole_number("--slots", self.slots, 1)
        _parse_all(self.policies)

    def draw(self, lm: LanguageModel, out: Path) -> int:
        import hashlib
        import json

        from kvjax.checkpoints.digest import weights_digest
        from kvjax.eval import long_generation

        ids = long_generation.answer_ids(lm, self.text, 2000 if self.tokens is None else self.tokens, self.seed)
        digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
        own = weights_digest(lm.params)
        settings = long_generation.Settings(lm.name, lm.params.number_format, self.slots, digest, own)
        rows = long_generation.measure(lm, ids, settings, out.with_suffix(".json"), _say, self.policies)
        _save(out, long_generation.long_generation_figure(rows, settings))
        long_generation.report(rows).print()
        return 0


@dataclasses.dataclass(frozen=True)
class StudyPicture:
    """Draws the answers of policies by one option of one system: a study of ``kvjax.eval.studies``.

    What the numbers beside the picture hold already is not measured again.
    """

    name: str
    settings: Settings
    length: int

    def check(self) -> None:
        """Its settings were checked when they were made."""

    def draw(self, lm: LanguageModel, out: Path) -> int:
        from kvjax.bench import machine
        from kvjax.checkpoints.digest import weights_digest
        from kvjax.eval import results
        from kvjax.eval.compare import Comparison
        from kvjax.eval.comparison_report import report
        from kvjax.eval.studies import STUDIES, study_figure
        from kvjax.files import write_atomically

        settings = dataclasses.replace(
            self.settings, model=lm.name, dtype=lm.params.number_format, parameters=weights_digest(lm.params)
        )
        numbers, facts = out.with_suffix(".json"), machine.describe()

        def save(rows) -> None:
            write_atomically(numbers, report(settings, rows, facts).json())

        earlier = results.read_rows(numbers, settings)
        comparison = Comparison(lm, settings, rows=earlier, save=save, say=_say, speed=False)
        code = 0
        try:
            comparison.run(STUDIES[self.name].entries, [self.length])
        except KeyboardInterrupt:
            kept = f"what was measured so far is in {numbers}" if comparison.rows else "nothing was measured yet"
            _say(f"{kept}; the same command goes on from there")
            code = INTERRUPTED
        # The file keeps the rows of other lengths too.
        rows = [row for row in comparison.rows if row.length == self.length]
        refused = [row.refused for row in rows if row.refused is not None]
        if refused and not code and len(rows) - len(refused) <= 1:
            raise UsageError(f"The full cache alone could be measured. {refused[0]}")
        if rows:
            _save(out, study_figure(STUDIES[self.name], rows))
        return code


def _parse_all(policies: Sequence[str]) -> None:
    from kvjax.policies import parse

    for policy in policies:
        parse(policy)


def _save(out: Path, figure: Figure) -> None:
    from kvjax.figures import png
    from kvjax.files import write_atomically

    write_atomically(out, png(figure))
    print(f"Saved: {out}.")
