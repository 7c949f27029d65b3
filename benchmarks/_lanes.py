"""Processes that use one GPU side by side, and what the device has less for each of them."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cudagraph_pool._worker_process import failure


class Answer(NamedTuple):
    """What a process printed, as JSON, and the bytes that the device has more since it is gone."""

    printed: Any
    held_bytes: int


class Lanes:
    """Asks processes that print one line and then wait until they are killed.

    That happens while all others are stopped, so that whatever becomes free then was its own.
    ``ask`` may be called by several threads.

    Arguments:
        used: Returns the bytes of the device that are not free.
    """

    def __init__(self, used: Callable[[], int]) -> None:
        self._used = used
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()  # held while nothing may begin to use the device

    def ask(
        self, command: Sequence[str], environment: Mapping[str, str], seconds: float
    ) -> Answer | str:
        """What a process answers and holds, or a text that says what went wrong."""
        with tempfile.TemporaryFile("w+") as errors:
            with self._lock:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
                self._running.add(process)
            alarm = threading.Timer(seconds, process.kill)
            alarm.start()
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
            finally:
                alarm.cancel()
            with self._lock, process:
                self._running.remove(process)
                held = self._freed_by_end_of(process)
            if line:
                return Answer(json.loads(line), held)
            errors.seek(0)
            return failure(process.returncode, errors.read())

    def _freed_by_end_of(self, process: subprocess.Popen[str]) -> int:
        self._signal_all(signal.SIGSTOP)
        try:
            before = self._settled()
            process.kill()
            process.wait()
            return before - self._settled()
        finally:
            self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._running:
            process.send_signal(number)

    def _settled(self) -> int:
        """Once calls to the driver that were under way are over."""
        now, before = self._used(), -1
        while now != before:
            time.sleep(0.05)
            now, before = self._used(), now
        return now
