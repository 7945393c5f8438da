"""Progress: stages of work that say what they do, and whom they tell.

Whoever works opens a :func:`stage`; whoever calls says with :func:`showing` where that is told: as a line on the
terminal or in the notebook, to a function, or nowhere. A line appears once a second has passed in silence.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, copy_context
from typing import Literal, Protocol, TypeVar

from kvjax.errors import UsageError, quoted

T = TypeVar("T")
Name = Literal["download", "load", "save", "compile", "prefill", "decode", "job"]
_VERBS = {"download": "downloading", "load": "loading", "save": "saving", "compile": "compiling"}
#: Seconds of silence before a line is drawn, and between two drawings.
SILENCE, _REDRAW = 1.0, 0.25


@dataclasses.dataclass(frozen=True)
class Event:
    """The state of a stage at a moment.

    Attributes:
      stage: "download", "load", "save", "compile", "prefill", "decode", or "job", all prompts of a batch job.
      what: the file, model, program or job.
      seconds: since the stage began, without compilation inside it.
      done, total: of ``unit``, None where unknown; of compiling, the program's number among those that the call needs.
      unit: of both, such as "bytes", "tokens", "programs" or "prompts".
      rate: of the unit a second. left: seconds to go. None where unknown.
      estimated: whether ``done``, ``rate`` and ``left`` come from the speed of earlier prompts rather than from this.
      note: what else is to be said. finished: whether the stage is over.
    """

    stage: Name
    what: str
    seconds: float
    done: float | None = None
    total: float | None = None
    unit: str = "tokens"
    rate: float | None = None
    left: float | None = None
    estimated: bool = False
    note: str = ""
    finished: bool = False

    def __str__(self) -> str:
        """One line without its end, such as ``prefill ~1,200 of 6,000 tokens, ~310 tokens/s, ~16 s left``."""
        mark = "~" if self.estimated else ""
        verb = "" if self.stage == "job" else _VERBS.get(self.stage, self.stage)
        # The colon of "kvjax batch:" comes before a number of prompts, which is not known from the first moment.
        began = " ".join(filter(None, (verb, self.what, self._count(mark)))).removesuffix(":")
        parts = [began, *filter(None, [self.note])]
        if self.rate and self.unit == "tokens":
            parts.append(f"{mark}{_number(self.rate)} tokens/s")
        parts.append(f"{int(self.seconds)} s" if self.left is None else f"{mark}{_duration(self.left)} left")
        return ", ".join(parts)

    def _count(self, mark: str) -> str:
        if self.unit == "programs":
            found = "" if self.done is None else f"{self.done:.0f}" + (f" of {self.total:.0f}" if self.total else "")
            return f"(program {found})" if found else ""
        if self.total is None and self.done is None:
            return ""
        if self.unit == "bytes":
            done, total = (None if x is None else x / 1e6 for x in (self.done, self.total))
            return f"{done or 0:,.0f}" + (f" of {total:,.0f} MB" if total else " MB")
        known = "" if self.total is None else f"{self.total:,.0f} {self.unit}"
        done = "" if self.done is None else f"{mark}{self.done:,.0f}"
        return " of ".join(filter(None, (done, known))) or ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _duration(seconds: float) -> str:
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02d} min" if whole < 3600 else f"{whole // 3600}:{whole // 60 % 60:02d} h"


#: As ``progress=``: see :func:`showing`.
Progress = bool | Callable[[Event], None] | None


class Display(Protocol):
    """One line that can be drawn anew and taken away."""

    def draw(self, events: Sequence[Event]) -> None:
        """Show what goes on, the innermost stage last."""
        ...

    def clear(self) -> None:
        """Take it away."""
        ...


class Stage:
    """A stage that is open; whoever works in it says how far it has come."""

    def __init__(
        self,
        name: Name,
        what: str,
        unit: str = "tokens",
        total: float | None = None,
        expected: float | None = None,
        done: float | None = None,
    ):
        self._now = Event(name, what, 0.0, done, total, unit)
        self.expected = expected  # seconds, where they can be estimated
        self._began, self._apart = time.perf_counter(), 0.0
        self._inside: float | None = None  # since when another stage runs inside it
        self._told = 0.0  # the seconds when something was last said to be done

    def update(self, done: float, total: float | None = None, note: str = "") -> None:
        """Say how far it has come."""
        self._now = dataclasses.replace(self._now, done=done, total=total or self._now.total, note=note)
        self._told = self.seconds
        tick()

    def counting(self, made: Iterable[T], sizes: Sequence[int]) -> Iterator[T]:
        """The same things, each of so many units, saying how far that is as they come."""
        done = 0
        for thing, size in zip(made, sizes, strict=True):
            done += size
            self.update(done, sum(sizes))
            yield thing

    @property
    def name(self) -> Name:
        """The kind of work."""
        return self._now.stage

    def advance(self, more: float) -> None:
        """Say that so much more is done."""
        self.update((self._now.done or 0.0) + more)

    def pause(self, inner: Stage) -> None:
        """Another stage begins inside it; compiling is no part of a prefill or of decoding."""
        if inner.name == "compile" and self.name in ("prefill", "decode"):
            self._inside = time.perf_counter()

    def go_on(self) -> None:
        """The other stage is over."""
        if self._inside is not None:
            self._apart += time.perf_counter() - self._inside
            self._inside = None

    @property
    def seconds(self) -> float:
        """Since it began, without compilation inside it."""
        now = time.perf_counter() if self._inside is None else self._inside
        return max(now - self._began - self._apart, 0.0)

    def event(self, finished: bool = False) -> Event:
        """The stage's state now."""
        now, seconds = dataclasses.replace(self._now, seconds=self.seconds, finished=finished), self.seconds
        if finished:
            return now
        if self.expected is not None and now.total and not now.done:
            if seconds >= self.expected:  # the estimate was too short, and says no more
                return now
            rate = now.total / self.expected
            left = self.expected - seconds
            return dataclasses.replace(now, done=rate * seconds, rate=rate, left=left, estimated=True)
        if now.done and now.unit != "programs" and seconds > 0:
            told = self._told or seconds
            rate = now.done / told
            left = 0.0 if now.total is None else (now.total - now.done) / rate - (seconds - told)
            # Where the next part takes longer than those before, the estimate was too short, and says no more.
            return dataclasses.replace(now, rate=rate, left=left if left > 0 else None)
        return now


class Reporter:
    """Receives the stages of a call.

    Attributes:
      programs: names of the programs that the call needs, in order, where that is known; one name may be of several.
    """

    def __init__(self, display: Display | None = None, function: Callable[[Event], None] | None = None):
        self.programs: Sequence[str] = ()
        self._compiled: Counter[str] = Counter()
        self._display, self._function = display, function
        self._stages: list[Stage] = []
        self._lock = threading.RLock()
        self._since = time.perf_counter()
        self._over: threading.Event | None = None
        self._told = 0.0

    @property
    def visible(self) -> bool:
        """Whether anybody looks."""
        return self._display is not None or self._function is not None

    @property
    def drawn(self) -> bool:
        """Whether it is a line that somebody sees."""
        return self._display is not None

    @property
    def innermost(self) -> Stage:
        """The stage that was opened last; one that tells nobody where there is none."""
        return self._stages[-1] if self._stages else Stage("load", "")

    def announce(self, programs: Sequence[str]) -> None:
        """Another call begins, which needs these programs."""
        self.programs = tuple(programs)
        self._compiled.clear()

    def number(self, program: str) -> int | None:
        """Which of the call's programs is compiled now that one of this name is; None where it was not announced."""
        places = [place for place, name in enumerate(self.programs, 1) if name == program]
        self._compiled[program] += 1
        return places[min(self._compiled[program], len(places)) - 1] if places else None

    def restart(self) -> None:
        """Something else was shown just now: silence begins anew."""
        self._since = time.perf_counter()

    def push(self, stage: Stage) -> None:
        with self._lock:
            if self._stages:
                self._stages[-1].pause(stage)
            self._stages.append(stage)
        self._tell(stage.event())
        if self._display is not None and self._over is None:
            self._over = threading.Event()
            # A notebook knows by the context which cell a thread draws for.
            loop = threading.Thread(target=copy_context().run, args=(self._draw_on, self._over), daemon=True)
            loop.start()

    def pop(self, stage: Stage) -> None:
        with self._lock:
            self._stages.remove(stage)
            if self._stages:
                self._stages[-1].go_on()
            elif self._over is not None and self._display is not None:
                self._over.set()
                self._over = None
                self._display.clear()
        self._tell(stage.event(finished=True))

    def tick(self) -> None:
        """Tell the function how far the innermost stage has come, where it was not told for a while."""
        if self._function is not None and self._stages and time.perf_counter() - self._told >= _REDRAW:
            self._tell(self._stages[-1].event())

    def _tell(self, event: Event) -> None:
        if self._function is not None:
            self._told = time.perf_counter()
            self._function(event)

    def _draw_on(self, over: threading.Event) -> None:
        while not over.wait(_REDRAW):
            with self._lock:
                if over.is_set() or self._display is None or time.perf_counter() - self._since < SILENCE:
                    continue
                self._display.draw([stage.event() for stage in self._stages])


_SILENT = Reporter()
_current: ContextVar[Reporter | None] = ContextVar("kvjax_progress", default=None)


def check(name: str, value: object) -> None:
    """Refuse what is no ``progress=`` (UsageError)."""
    if value is not None and not isinstance(value, bool) and not callable(value):
        raise UsageError(f"{name} is {quoted(value)}; give None, True, False or a function of events.")


def reporter(progress: Progress = None) -> Reporter:
    """Where a call tells what goes on; the caller's own place where there is one and ``progress`` is None.

    Args:
      progress: None draws a line on a terminal (standard error) and in a notebook, and nothing elsewhere; True also
        writes a line now and then where there is neither; False shows nothing; a function is called with every
        :class:`Event` in the thread that works.
    """
    check("progress", progress)
    found = _current.get()
    if progress is None and found is not None:
        return found
    if progress is False:
        return Reporter()
    if callable(progress):
        return Reporter(function=progress)
    from kvjax.live_line import display

    return Reporter(display(sys.stderr, log=progress is True))


@contextmanager
def telling(place: Reporter) -> Iterator[Reporter]:
    """Stages of this block are told there."""
    token = _current.set(place)
    try:
        yield place
    finally:
        _current.reset(token)


@contextmanager
def showing(progress: Progress = None) -> Iterator[Reporter]:
    """Tell the stages of this block as ``progress`` says; see :func:`reporter`."""
    with telling(reporter(progress)) as place:
        yield place


@contextmanager
def stage(
    name: Name,
    what: str = "",
    *,
    unit: str = "tokens",
    total: float | None = None,
    expected: float | None = None,
    done: float | None = None,
) -> Iterator[Stage]:
    """Work that may take more than a second, and what it is.

    Args:
      what: the file, model or program. unit, total, done: of what, where it can be counted.
      expected: seconds that it takes, where nothing tells how far it has come.
    """
    place, made = current(), Stage(name, what, unit, total, expected, done)
    if not place.visible:
        yield made
        return
    place.push(made)
    try:
        yield made
    finally:
        place.pop(made)


def compiling(program: str) -> AbstractContextManager[Stage]:
    """The stage in which a program is compiled, one of those that the call needs."""
    number = current().number(program)
    total = None if number is None else len(current().programs)
    return stage("compile", program.replace("_", " "), unit="programs", total=total, done=number)


def current_stage() -> Stage:
    """The innermost stage, for those who work in it and did not open it."""
    return current().innermost


def current() -> Reporter:
    """The current reporter."""
    return _current.get() or _SILENT


def advance(name: Name, more: float) -> None:
    """So much more of the innermost stage is done, if it is one of this name."""
    inner = current().innermost
    if inner.name == name:
        inner.advance(more)


def tick() -> None:
    """Time has passed: whoever is told by a function hears of it."""
    current().tick()
