"""The cost of a first hour: seconds until commands answer, and programs that conversations and requests compile.

Seconds are of whole processes of the command line, first with an empty folder of compiled programs and then with what
that run left. Programs are counted with a toy model: how many there are does not depend on a model's size.
"""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvjax.bench.cold_start import check_ended, compiling_into
from kvjax.tables import Column, Report, Table

#: What stands for a document, which with its question has 2,557 tokens, and the questions.
_SENTENCE = "The cache of keys and values grows with every token that a model reads, and so does the time of a step. "
_DOCUMENT, _QUESTION = _SENTENCE * 105, "What grows with every token?"
_SHORT = "What is the capital of France?"
#: The longest that a command may take.
_SECONDS = 1800


@dataclasses.dataclass(frozen=True)
class Seconds:
    """A command, and the seconds it takes from start to end: with nothing compiled, and at its best of several.

    Of both, those of tracing, lowering and compiling, or of reading back what was compiled; None of other commands.
    """

    command: str
    first: float | None
    best: float
    first_compiling: float | None = None
    best_compiling: float | None = None


@dataclasses.dataclass(frozen=True)
class Programs:
    """Counts of the programs that a policy compiled: in 20 turns, after the 8th of them, and for 40 random requests."""

    policy: str
    conversation: int
    late: int
    requests: int


def measure(model: str, policies: Sequence[str], *, repetitions: int, say: Callable[[str], None]) -> Report:
    """Time the commands and count the programs.

    Raises:
      KvjaxError: a command failed; the sentence is its own last line.
    """
    from kvjax.bench import machine

    facts = machine.describe()
    seconds = measure_seconds(model, repetitions, say)
    programs = []
    for policy in policies:
        say(f"programs of {policy}")
        programs.append(count_programs(policy))
    data = {"machine": facts, "model": model, "seconds": _as_dicts(seconds), "programs": _as_dicts(programs)}
    return Report([*tables(seconds, programs), f"{model}; {machine.sentence(facts)}."], data)


def tables(seconds: Sequence[Seconds], programs: Sequence[Programs]) -> list[Table]:
    """Both tables."""
    timed = (
        Column("command", "command"),
        Column("nothing compiled", "first", "{:.1f} s".format, missing="-", right=True),
        Column("compiling", "first_compiling", "{:.1f} s".format, missing="-", right=True),
        Column("next process", "best", "{:.2f} s".format, right=True),
        Column("compiling", "best_compiling", "{:.2f} s".format, missing="-", right=True),
    )
    counted = (
        Column("policy", "policy"),
        Column("20 turns", "conversation", right=True),
        Column("after turn 8", "late", right=True),
        Column("40 requests", "requests", right=True),
    )
    return [Table(timed, seconds, "Seconds, start to end", labels=1), Table(counted, programs, "Programs", labels=1)]


def measure_seconds(model: str, repetitions: int, say: Callable[[str], None]) -> list[Seconds]:
    """Seconds of the imports, ``kvjax --help``, and a long and a short first request."""
    python, kvjax = [sys.executable, "-c"], [sys.executable, "-m", "kvjax"]
    generate = ["generate", "--model", model, "--max-new-tokens", "32", "--no-progress", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder, "document.txt")
        document.write_text(_DOCUMENT, encoding="utf-8")
        asked = ["--context", f"@{document}", "--policy", "lagkv:ratio=0.5"]
        commands: list[tuple[str, list[str], bool]] = [
            ("import jax", [*python, "import jax"], False),
            ("import jax, kvjax; kvjax.generate", [*python, "import jax, kvjax; kvjax.generate"], False),
            ("kvjax --help", [*kvjax, "--help"], False),
            ("a question about a document, 2,557 tokens together", [*kvjax, *generate, _QUESTION, *asked], True),
            ("a short prompt", [*kvjax, *generate, _SHORT], True),
        ]
        found = []
        for name, command, compiles in commands:
            say(name)
            programs = Path(folder, name.replace(" ", "-").replace(",", ""))
            run = [_seconds(command, programs) for _ in range(repetitions + 1)]
            first, first_compiling = run[0] if compiles else (None, None)
            best, compiling = min(run[1:], key=lambda measured: measured[0])
            found.append(Seconds(name, first, best, first_compiling, compiling))
        return found


def _seconds(command: Sequence[str], programs: Path) -> tuple[float, float | None]:
    """Seconds of a command, and those of compiling where it says so in JSON."""
    environment = compiling_into(programs)
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    taken = time.perf_counter() - began
    check_ended(done)
    if "--json" not in command:
        return taken, None
    return taken, json.loads(done.stdout)["outputs"][0]["stats"]["compile_seconds"]


def count_programs(policy: str) -> Programs:
    """Count what a toy model compiles under a policy, in this process with nothing compiled before."""
    import jax

    from kvjax.generation import generate
    from kvjax.runtime.compilation import compile_clock

    lm, draw = _toy(), random.Random(0)
    jax.clear_caches()
    with compile_clock() as clock:
        cache, late = None, 0
        for turn in range(20):
            message = [draw.randrange(256) for _ in range(draw.randint(10, 200))]
            if turn == 8:
                late = clock.programs
            output = generate(lm, message, **_turn(policy, cache), max_new_tokens=16)
            cache = output.cache
        conversation = clock.programs
    jax.clear_caches()
    with compile_clock() as clock:
        for request in range(40):
            # Every other one is of short prompts alone: the sizes of batches meet both buckets of lengths.
            most, rows = (256, 1500)[request % 2], draw.randint(1, 8)
            prompts = [[draw.randrange(256) for _ in range(draw.randint(5, most))] for _ in range(rows)]
            generate(lm, prompts, policy=policy, max_new_tokens=2)
    return Programs(policy, conversation, conversation - late, clock.programs)


def _turn(policy: str, cache: Any) -> dict[str, Any]:
    """A first turn reserves what later ones need, as ``Chat`` does."""
    from kvjax.cache.buckets import RESERVE

    return {"policy": policy, "reserve_tokens": RESERVE} if cache is None else {"cache": cache}


def _toy() -> Any:
    import tokenizers

    from kvjax.bench.shapes import shapes
    from kvjax.checkpoints.load import LanguageModel
    from kvjax.committed import committed
    from kvjax.model.decoder import random_decoder
    from kvjax.text.tokenizer import Tokenizer, byte_level_alphabet

    # As many layers as are read by a program of one of them, as those of real models are.
    config = dataclasses.replace(shapes()["tiny"], max_position=8192, num_layers=8)
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_level_alphabet(), merges=[])))
    # Committed, as weights that are loaded are.
    return LanguageModel("toy", config, committed(random_decoder(config)), tokenizer, ())


def _as_dicts(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]
