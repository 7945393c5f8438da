"""``kvjax.Engine``: requests come and go at any time, and every slot of one compiled batch stays busy."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self, Unpack

from kvjax.cache.cache import Cache
from kvjax.cache.host_memory import as_numpy
from kvjax.cache.quantisation import Storage
from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import number, true_or_false, whole_number
from kvjax.engine.common_context import check_common
from kvjax.engine.core import EngineCore, engine_policy
from kvjax.engine.engine_report import EngineReport, RequestMetrics, Totals, report_of
from kvjax.engine.engine_sizes import EngineSizes
from kvjax.engine.handle import Handle, check_timeout
from kvjax.engine.loop import MOST_STEPS
from kvjax.engine.row import Row
from kvjax.errors import KvjaxError, UsageError
from kvjax.options import FIELDS, GenerationOptions, RequestKeywords, merged, shows_options
from kvjax.policies import Policy
from kvjax.prompts import Prompt
from kvjax.request import Request
from kvjax.waiting import end_at_exit, forget

#: Tokens of the longest prompt, where nothing else is said.
_PROMPT_TOKENS = 2048
#: Tokens between two pieces of a stream.
_STREAM_STEPS = 8
#: Requests of which a report has each one's times; of those before it has the sums.
_REMEMBERED = 10_000
_CLOSED = "The engine was closed before this had ended."
#: Options of an engine, which its requests do not have.
_OF_THE_ENGINE = ("policy", "storage", "memory_limit", "reserve_tokens", "progress")


class QueueFull(KvjaxError):
    """The engine's queue holds as many requests as it may; try again later."""


class Engine:
    """A batch of slots of equal size through which requests pass: in-flight batching under any policy of tokens.

    A request that ends gives its slot to the next at once, so no row waits for the longest. What a request answers is,
    token for token, what :func:`kvjax.generate` answers to it alone, over an int8 cache up to rounding::

        with kvjax.Engine(lm, policy="lagkv:ratio=0.25", slots=16, prompt_tokens=4096) as engine:
            handles = [engine.submit(prompt, max_new_tokens=200) for prompt in prompts]
            for handle in handles:
                print(handle.result().text)

    Memory is planned once, here. A thread of its own runs the model; ``submit`` and the handles may be used from
    any thread.
    """

    def __init__(
        self,
        lm: LanguageModel,
        policy: Policy | str | None = None,
        storage: Storage | str | None = None,
        *,
        slots: int | None = None,
        prompt_tokens: int | None = None,
        new_tokens: int = 512,
        memory_limit: int | None = None,
        max_pause: float = 0.5,
        queue: int = 1024,
        context: Cache | None = None,
    ):
        """Plan everything, and allocate the slots.

        Args:
          lm: a model from :func:`kvjax.load`, on the devices of this process.
          policy, storage: of all requests, as for :func:`kvjax.generate`.
          slots: requests that run at the same time; None for as many as ``memory_limit`` has room for, or 8.
          prompt_tokens: of the longest prompt, with its context or what its cache has seen; by default 2,048, or the
            model's context where that is less.
          new_tokens: that a row of such a prompt may generate; a shorter prompt may have more. A row whose slot is full
            ends by "memory". Policies that keep a fixed size need no room for them.
          memory_limit: refuse more bytes than this, by default what the device has.
          max_pause: seconds that reading prompts may keep running rows from their next token; prompts above 256 tokens
            are read layer by layer, and left between two when it has passed. In one piece are read those under a policy
            that treats most layers differently or, on a mesh, chooses in all of them together or reads prompts twice,
            and those whose own log-probabilities are asked for.
          queue: requests that may wait.
          context: a cache of one row that every request goes on with, such as :func:`kvjax.read` gives; all slots share
            it, and hold what comes after it. ``prompt_tokens`` are then those beside it, and policy and storage are its
            own. For policies under which rows share a context, and those that chose ``once``.

        Raises:
          UsageError: a policy of rounds, or numbers that make no sense.
          DoesNotFit: the planned bytes exceed the limit; the sentence says how many slots would fit.
        """
        before = 0
        if context is None:
            engine_policy(lm, policy)
        else:
            check_common(context)
            before = int(as_numpy(context.seen).max())
        if slots is not None:
            whole_number("slots", slots, 1, 2**16)
        if prompt_tokens is None:
            prompt_tokens = max(min(_PROMPT_TOKENS, lm.config.max_position - before), 1)
        whole_number("prompt_tokens", prompt_tokens, 1)
        whole_number("new_tokens", new_tokens, 1)
        whole_number("queue", queue, 1)
        number("max_pause", max_pause, 0.0)
        sizes = {"slots": slots, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
        self._core = EngineCore(
            lm, policy, storage, **sizes, memory_limit=memory_limit, max_pause=max_pause, context=context
        )
        self._lm, self._queue = lm, queue
        self._wake = threading.Condition()
        self._inbox: deque[Row] = deque()
        self._cancelled: deque[Row] = deque()
        self._warming: deque[Future[int]] = deque()
        self._handles: dict[int, Handle] = {}
        self._served: deque[RequestMetrics] = deque()
        self._before = Totals()  # of those that were served before these
        self._closing = self._ended = self._left = False
        self._broken: BaseException | None = None
        self._began = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="kvjax-engine", daemon=True)
        end_at_exit(self._thread, self._stop)
        try:
            self._thread.start()
        except BaseException:
            forget(self._thread)
            raise

    @property
    def sizes(self) -> EngineSizes:
        """The allocated sizes, and their bytes."""
        return self._core.sizes

    @shows_options(_OF_THE_ENGINE)
    def submit(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        cache: Cache | None = None,
        context: str | Sequence[int] | None = None,
        keep_cache: bool = False,
        **keywords: Unpack[RequestKeywords],
    ) -> Handle:
        """Queue one prompt and return at once.

        Args:
          prompt, cache, context: as for :func:`kvjax.generate`. A cache stays a value; what was read by
            :func:`kvjax.read` may be asked any number of questions.
          options: how to answer this one.
          keep_cache: give the output a cache to go on with; a copy of the slot.
          keywords: fields of :class:`kvjax.GenerationOptions`, in place of those of ``options``:

        Raises:
          UsageError: a request that makes no sense, or a prompt that is longer than the slots.
          DoesNotFit: a cache to go on with is in host memory, and has no room beside the engine.
          QueueFull: as many wait as may.
        """
        chosen = merged("submit", options, keywords, also=("cache", "context", "keep_cache"), without=_OF_THE_ENGINE)
        true_or_false("keep_cache", keep_cache)
        for name in () if options is None else _OF_THE_ENGINE:
            if getattr(options, name) != FIELDS[name].default:
                raise UsageError(f"The options have {name}, which is the engine's for all requests; leave it out.")
        self._check_open()
        if cache is None:
            chosen = dataclasses.replace(chosen, policy=self._core.policy.named, storage=self._core.storage)
        if (common := self._core.slots.common) is not None:
            if cache is not None or context is not None:
                raise UsageError("All requests of this engine go on with its context; leave cache= and context= out.")
            cache = common
        request = Request(self._lm, prompt, chosen, cache=cache, context=context, exact=True)
        if not request.tokens.single:
            raise UsageError("submit takes one prompt; call it for each of a list.")
        row = self._core.slots.row_of(request, limit=chosen.max_new_tokens, keep_cache=keep_cache)
        row.times.arrived = time.perf_counter()
        handle = Handle(row, self._cancel)
        with self._wake:
            self._check_open()
            scheduler = self._core.loop.scheduler
            if scheduler.waiting + len(self._inbox) - scheduler.free >= self._queue:  # free slots take them at once
                raise QueueFull(
                    f"As many requests wait as this engine's queue holds ({self._queue}); try again later, or make an "
                    "engine with a larger queue=."
                )
            self._inbox.append(row)
            self._handles[id(row)] = handle
            self._wake.notify_all()
        return handle

    def warm(self) -> int:
        """Compile, before the first request, what requests without a cache or context need; how many programs it was.

        It waits until the engine has nothing else to do.
        """
        asked: Future[int] = Future()
        with self._wake:
            self._check_open()
            self._warming.append(asked)
            self._wake.notify_all()
        return asked.result()

    def _check_open(self) -> None:
        if self._broken is not None:
            raise KvjaxError(f"The engine has stopped: {self._broken}") from self._broken
        if self._closing:
            raise UsageError("The engine is closed; make another.")

    def _cancel(self, row: Row) -> None:
        with self._wake:
            self._cancelled.append(row)
            self._wake.notify_all()

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take():
                with self._wake:
                    streams = any(handle.streaming for handle in self._handles.values())
                self._core.loop.most_steps = _STREAM_STEPS if streams else MOST_STEPS
                self._core.loop.iterate()
                self._forget()
        except BaseException as error:  # noqa: BLE001  told to everybody who waits
            self._broken = error
            self._fail(error)
        else:
            self._fail(UsageError(_CLOSED))
        finally:
            with self._wake:
                self._ended, left = True, self._left
            if left:
                self._core.close()
            forget(self._thread)

    def _take(self) -> bool:
        """Take over what was submitted and called off, waiting for it if there is nothing to do; False at the end."""
        with self._wake:
            while not (self._inbox or self._cancelled or self._closing or self._warming) and self._core.loop.idle:
                self._wake.wait()
            if self._closing:
                return False
            warming = self._warming.popleft() if self._warming and self._core.loop.idle else None
            new, cancelled = list(self._inbox), list(self._cancelled)
            if warming is None:
                for row in new:
                    self._core.add(row)
            self._inbox.clear()
            self._cancelled.clear()
        if warming is not None:
            try:
                made = self._core.warm(then=new, going_on=lambda: not self._closing)
                if made is None:
                    warming.set_exception(UsageError(_CLOSED))
                else:
                    warming.set_result(made)
            except BaseException as error:
                warming.set_exception(_as_told(error))
                raise
        for row in cancelled:
            self._core.cancel(row)
        return True

    def _forget(self) -> None:
        with self._wake:
            ended = [key for key, handle in self._handles.items() if handle.done]
            self._served += [self._handles.pop(key).row.metrics() for key in ended]
            while len(self._served) > _REMEMBERED:
                self._before = self._before.plus(self._served.popleft(), time.perf_counter())
            self._wake.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            handles = list(self._handles.values())
            self._handles.clear()
            warming = list(self._warming)
        for asked in warming:
            asked.set_exception(_as_told(error))
        for handle in handles:
            if not handle.row.ended:
                handle.row.fail(_as_told(error))
        with self._wake:
            self._wake.notify_all()

    # --- the engine's end --------------------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until everything that was submitted has ended; False after ``timeout`` seconds."""
        check_timeout(timeout)
        with self._wake:
            return self._wake.wait_for(lambda: not self._handles or not self._thread.is_alive(), timeout)

    def close(self) -> None:
        """Stop, and free the slots; what has not ended ends by an error.

        It waits for the program that is compiled or runs; Ctrl-C leaves that, and the slots, to the engine's thread.
        """
        self._stop()
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self._leave()
            raise
        self._core.close()

    def _stop(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def _leave(self) -> None:
        """Stop without waiting; the engine's thread frees the slots when it ends."""
        self._stop()
        with self._wake:
            self._left, ended = True, self._ended
        if ended:
            self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pressed = kind is not None and issubclass(kind, KeyboardInterrupt)
        try:
            if kind is None:
                self.drain()
        except KeyboardInterrupt:
            pressed = True
            raise
        finally:
            if pressed:
                self._leave()
            else:
                self.close()

    def report(self) -> EngineReport:
        """Statistics so far: tokens per second, slot utilisation, waiting times."""
        with self._wake:
            rows = [*self._served, *(handle.row.metrics() for handle in self._handles.values())]
            before = self._before
        return report_of(rows, self.sizes.slots, self._began, time.perf_counter(), before)


def _as_told(error: BaseException) -> KvjaxError:
    """The error that a request gets when another error has ended the engine."""
    if isinstance(error, KvjaxError):
        return type(error)(str(error))
    told = KvjaxError(f"The engine has stopped: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
