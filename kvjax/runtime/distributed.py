"""Several processes as one job: who there is, what they tell one another, who does what, and the end of all on failure.

JAX's own distributed runtime does all of it: it finds the processes under SLURM, GKE or ``mpirun``, watches their
heartbeats, counts the tickets by which work is claimed, and keeps the few words they exchange. A process that fails
tells the others, and all end. One that is killed, or whose host is gone, is missed after ``HEARTBEAT`` seconds, and the
others go on; without process 0, which keeps the words, all end. Nothing here goes over the accelerators' links.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import jax

from kvjax.checks import whole_number
from kvjax.errors import KvjaxError, UsageError, quoted
from kvjax.sharding.mesh import MOST_DEVICES, Mesh

#: Seconds after which a silent process counts as dead; JAX's own default lets the others hang for 100.
HEARTBEAT = 30
#: Seconds of it at most: a month.
MOST_SECONDS = 31 * 24 * 60 * 60
#: Seconds in which all processes of a job must have started.
START = 300
_FAILED = "kvjax/failed/"
_POLL = 0.2
_CHECK = 1.0
_jobs = itertools.count()


class PeerFailed(KvjaxError):
    """Another process of the job failed; the sentence is its own."""


class Group:
    """The processes of one job, seen from one of them. A single process is a group of one.

    Attributes:
      process: this one's number. processes: how many there are.
    """

    def __init__(self, process: int = 0, processes: int = 1, client: Any = None):
        self.process, self.processes, self._client = process, processes, client
        # Every process makes its groups in the same order, so they share a name.
        self._name, self._checked = f"kvjax/{next(_jobs)}", 0.0

    def gather(self, what: str, value: str) -> dict[int, str]:
        """The value of each process, those of lost ones where they had told it; waits for all that live.

        Raises:
          PeerFailed: another process has failed.
        """
        if self.processes == 1:
            return {0: value}
        folder = f"{self._name}/{what}/"
        self._client.key_value_set(f"{folder}{self.process}", value)
        while True:
            live = self._live()
            found = self._told(folder)
            if live <= found.keys():
                return found
            self._checked = 0.0  # somebody has gone without telling: they may say why
            self.check()

    def tell(self, what: str, value: str) -> None:
        """Say something that may be said again, in its place, with another value."""
        if self.processes > 1:
            self._client.key_value_set(f"{self._name}/{what}/{self.process}", value, allow_overwrite=True)

    def told(self, what: str) -> dict[int, str]:
        """The words of each process about it so far, lost ones too; nothing in a group of one."""
        return {} if self.processes == 1 else self._told(f"{self._name}/{what}/")

    def _told(self, folder: str) -> dict[int, str]:
        return {int(key.rsplit("/", 1)[-1]): text for key, text in self._client.key_value_dir_get(folder)}

    def claims(self, what: str, count: int) -> Iterator[int]:
        """Numbers below ``count``: every process takes the next one when it asks, and no two take the same."""
        if self.processes == 1:
            yield from range(count)
            return
        while (ticket := self._client.key_value_increment(f"{self._name}/{what}", 1) - 1) < count:
            yield ticket

    def check_count(self, patience: float) -> None:
        """Refuse (UsageError) processes that were told of another number of them: JAX lets each go on with its own.

        No :meth:`gather`, in which those would wait for one another. One that has told nothing after ``patience``
        seconds is dead.
        """
        mine, end = str(self.processes), time.monotonic() + patience
        self.tell("processes", mine)
        while self.processes > 1 and time.monotonic() < end:
            told = self.told("processes")
            for process, count in sorted(told.items()):
                if count != mine:
                    raise UsageError(
                        f"Process {process} was told of {count} processes, and process {self.process} of {mine}; give "
                        "all the same --num-processes."
                    )
            if len(told) == self.processes:
                return
            time.sleep(_POLL)

    def wait_for_others_to_leave(self) -> None:
        """Wait until every other process has left the runtime or is lost, ``START`` seconds at most."""
        end = time.monotonic() + START
        while self.processes > 1 and (left := end - time.monotonic()) > 0:
            answer = self._asked()
            wait([answer], timeout=left)
            if answer.done() and answer.result() == {self.process}:
                return

    def _live(self) -> set[int]:
        """The processes that live; waits until each of them asks, or has gone."""
        answer = self._asked()
        while not answer.done():
            wait([answer], timeout=_POLL)
            self.check()
        return answer.result()

    def _asked(self) -> Future[set[int]]:
        """Ask the runtime who lives, in a thread: its own wait answers no Ctrl-C, and does not see that one failed."""
        answer: Future[set[int]] = Future()

        def ask() -> None:
            try:
                answer.set_result(set(self._client.get_live_nodes(list(range(self.processes)))))
            except Exception as error:  # noqa: BLE001  raised where it is waited for
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True, name="kvjax-live").start()
        return answer

    def check(self) -> None:
        """Raise PeerFailed if another process has failed; asks once a second at most."""
        now = time.monotonic()
        if self.processes == 1 or now - self._checked < _CHECK:
            return
        self._checked = now
        for _, sentence in self._client.key_value_dir_get(_FAILED):
            raise PeerFailed(sentence)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A failure in this block fails every process: each raises, none waits for one that has gone."""
        try:
            yield
        except PeerFailed:
            raise
        except BaseException as error:
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        if self.processes == 1:
            return
        what = "was interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {error or type(error).__name__}"
        sentence = f"Process {self.process} of {self.processes} ({socket.gethostname()}) {what}"
        self._client.key_value_set(f"{_FAILED}{self.process}", sentence.splitlines()[0], allow_overwrite=True)


def group() -> Group:
    """The group this process is in: of all processes once ``jax.distributed.initialize()`` was called, else of one."""
    if not jax.distributed.is_initialized():
        return Group()
    # The runtime's store of words has no public name yet; checkpoint libraries use the same one.
    from jax._src import distributed

    return Group(jax.process_index(), jax.process_count(), distributed.global_state.client)


def _joined_group() -> Group:
    """The group of all processes as this one was told of them: a backend may wait for as many as that."""
    from jax._src import distributed

    state = distributed.global_state
    return Group(state.process_id, state.num_processes or 1, state.client)


def _is_address(text: str) -> bool:
    """Whether text is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(re.fullmatch(r"[\w.:\[\]-]+", host) and re.fullmatch(r"[0-9]{1,5}", port)) and 0 < int(port) < 2**16


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The address at which a job's processes meet; without one JAX looks for SLURM, GKE, TPU pods or Open MPI.

    Attributes:
      coordinator: HOST:PORT of process 0, the same for all.
      num_processes, process_id: how many there are, and which this is, from 0. ``num_processes=1`` joins nobody.
      heartbeat: seconds after which a silent process counts as dead.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    heartbeat: int = HEARTBEAT

    def __post_init__(self) -> None:
        given = [value for value in (self.coordinator, self.num_processes, self.process_id) if value is not None]
        if 0 < len(given) < 3 and self.num_processes != 1:
            raise UsageError(
                "Of --coordinator, --num-processes and --process-id some are given and some are not; give all three, "
                "or none where SLURM, GKE or mpirun tell."
            )
        if self.num_processes is not None:
            whole_number("--num-processes", self.num_processes, 1, MOST_DEVICES)
        if self.process_id is not None:
            whole_number("--process-id", self.process_id, 0, (self.num_processes or 1) - 1)
        if self.coordinator is not None and not _is_address(self.coordinator):
            raise UsageError(f"--coordinator is {quoted(self.coordinator)}; give HOST:PORT of process 0.")
        whole_number("--heartbeat-timeout", self.heartbeat, 1, MOST_SECONDS)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Join the other processes for this block, which must come before JAX does anything else."""
        if not self._join():
            yield
            return
        everyone = _joined_group()
        try:
            everyone.check_count(self.heartbeat)
            yield
        finally:
            if everyone.process == 0:  # it keeps the others' words
                # All have ended or heard that one has not, so this waits for moments.
                everyone.wait_for_others_to_leave()
            jax.distributed.shutdown()

    def _join(self) -> bool:
        """Whether JAX's runtime was started here; not where it runs already, nor for a job of one process."""
        if self.num_processes == 1 or jax.distributed.is_initialized():
            return False
        try:
            # A process that is killed does not end the others.
            jax.config.update("jax_enable_recoverability", True)
            # It would take SIGTERM, with which schedulers end a job, for a notice that nobody here reads.
            jax.config.update("jax_enable_preemption_service", False)
            jax.distributed.initialize(
                self.coordinator,
                self.num_processes,
                self.process_id,
                initialization_timeout=START,
                heartbeat_timeout_seconds=self.heartbeat,
                shutdown_timeout_seconds=START,
            )
        except ValueError as error:
            # What JAX says where it recognises no cluster and was told of none.
            if self.coordinator is None and "coordinator_address" in str(error):
                return False
            raise
        return True


def local_mesh(mesh: Mesh) -> Mesh:
    """This process' part of a mesh over the devices of all: ``data`` is divided among processes, ``model`` is not.

    Each process answers rows of its own, so a step of decoding sends nothing between hosts.
    """
    processes, devices = jax.process_count(), jax.local_devices()
    if mesh.data % processes:
        raise UsageError(f"The mesh has data={mesh.data}, which {processes} processes do not divide; give a multiple.")
    here = mesh.data // processes
    if here * mesh.model > len(devices):
        raise UsageError(
            f"The mesh {mesh} needs {here * mesh.model} devices a process and this one has {len(devices)}; model is "
            "split over the devices of one process, data over those of all."
        )
    return Mesh(here, mesh.model, tuple(devices[: here * mesh.model]))
