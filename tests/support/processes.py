"""Processes of one command on the tiny model, which find one another on the loopback interface."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support import quick

TESTS = Path(__file__).resolve().parent.parent
#: Seconds until a killed process is missed, and those in which every wait of these tests must end.
HEARTBEAT, PATIENCE = 10, 400


class Processes:
    """Starts the processes of a command; whatever still runs at the end of the test is killed."""

    def __init__(self, home: Path, command: str, devices: int = 4):
        self.home, self._command, self.started = home, command, []
        # Optimised as here, so that the same seed gives the same weights.
        self._environment = (
            os.environ
            | quick.on_devices(devices)
            | {
                "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
                "JAX_COMPILATION_CACHE_DIR": str(home / "xla"),
                "PYTHONUNBUFFERED": "1",
                "TF_CPP_MIN_LOG_LEVEL": "2",  # as the command does, before it loads JAX
            }
        )

    def start(self, number: int, count: int, port: int, *arguments: str) -> subprocess.Popen:
        where = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count), "--process-id", str(number)]
        return self._begin([*arguments, *where], {})

    def _begin(self, arguments: list[str], more: dict[str, str]) -> subprocess.Popen:
        words = [self._command, *arguments, "--heartbeat-timeout", str(HEARTBEAT)]
        command = [sys.executable, "-m", "support.peer", *words]
        log = (self.home / f"log-{len(self.started)}.txt").open("w+")
        process = subprocess.Popen(command, env=self._environment | more, stdout=log, stderr=subprocess.STDOUT)
        self.started.append((process, log))
        return process

    def told(self, launcher: Callable[[int], dict[str, str]], *arguments: str) -> list[subprocess.Popen]:
        """A pair that finds one another by what a launcher says in their environment."""
        return [self._begin([*arguments], launcher(number)) for number in range(2)]

    def pair(self, *arguments: str) -> list[subprocess.Popen]:
        port = free_port()
        return [self.start(number, 2, port, *arguments) for number in range(2)]

    def said(self, process: subprocess.Popen) -> str:
        (log,) = (log for started, log in self.started if started is process)
        log.seek(0)
        return log.read()

    def end(self) -> None:
        for process, log in self.started:
            process.kill()
            process.wait()
            log.close()


def free_port(first: int = 0, ports: int = 1) -> int:
    """A free one of those from ``first``; any, by default."""
    for port in range(first, first + ports):
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return found.getsockname()[1]
    raise AssertionError("no port is free")


def wait_for(condition, running) -> None:
    """Until it is so, or all have ended."""
    end = time.monotonic() + PATIENCE
    while not condition() and any(process.poll() is None for process in running):
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.02)
