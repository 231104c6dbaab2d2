"""Stopping on request: SIGTERM or Ctrl-C ends a run at the end of a step, with a checkpoint, on all of its processes.

One signal to one process is enough: all agree on a step through the key-value store, without waiting for devices. A
second signal stops at once. What has not ended after `limit_seconds` is ended without a checkpoint: where a host is
gone, the others would wait for it for ever. Saving itself is the loop's.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from types import FrameType, TracebackType

import jax

from jaxtool.parallel import BARRIER_SECONDS, process_names, publish, published

_POLL_SECONDS = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether, and at which step, the run is asked to stop; a context manager around the loop and its last save.

    Within it, the first SIGTERM or SIGINT is a request. A second SIGTERM ends the process (status 143), a second
    SIGINT raises KeyboardInterrupt. It is for the main thread.

    Args:
        limit_seconds: the process ends with status 1 this long after a request, whatever it is doing. At least the
            time of a step and of a save.
    """

    def __init__(self, *, limit_seconds: float = BARRIER_SECONDS) -> None:
        self._limit = limit_seconds
        self._reason: str | None = None
        self._interrupted = False
        self._requested_at: float | None = None
        self._step = 0
        self._target: int | None = None
        self._lock = threading.Lock()
        self._before: dict[int, object] = {}
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._previous_wake = -1
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._own_requests = 0
        self._seen_interrupt = False

    @property
    def reason(self) -> str | None:
        """What asked for the stop, e.g. `SIGTERM` or `SIGTERM at process 1 (host-b)`; None as long as nothing did."""
        return self._reason

    @property
    def interrupted(self) -> bool:
        """Whether that was a Ctrl-C, of this process or another."""
        return self._interrupted

    def at(self, step: int) -> bool:
        """Whether the run stops after this step; all processes get the same answer for the same step.

        Call it once a step, on all processes, with the number of steps done so far.
        """
        with self._lock:  # held while the processes agree on a step, which takes a second or two
            self._step = step
            if self._target is None and self._reason is not None and jax.process_count() == 1:
                self._target = step
            return self._target is not None and step >= self._target

    def __enter__(self) -> StopRequest:
        receiving, sending = socket.socketpair()
        receiving.setblocking(False)
        sending.setblocking(False)
        self._wake = (receiving, sending)
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        # The interpreter writes the signal's number here even while the main thread waits for a device.
        self._previous_wake = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="stop requests", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.set()
        signal.set_wakeup_fd(self._previous_wake)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        assert self._wake is not None and self._thread is not None
        receiving, sending = self._wake
        sending.send(b"\0")
        self._thread.join()
        receiving.close()
        sending.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between two bytecodes: only a second Ctrl-C needs it."""
        if number == signal.SIGINT:
            if self._seen_interrupt:
                raise KeyboardInterrupt
            self._seen_interrupt = True

    # ---- the thread that watches -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._listen(self._patience())
            self._end_if_late()
            if jax.process_count() > 1 and self._target is None:
                if self._reason is None:
                    self._hear_others()
                if self._reason is not None:
                    self._agree()

    def _patience(self) -> float | None:
        if jax.process_count() > 1 and self._target is None:
            return _POLL_SECONDS
        if self._requested_at is not None:
            return max(0.0, self._requested_at + self._limit - time.monotonic())
        return None

    def _listen(self, seconds: float | None) -> None:
        """Waits that long for signals of this process, and takes them up."""
        assert self._wake is not None
        receiving = self._wake[0]
        if not select.select([receiving], [], [], seconds)[0]:
            return
        for number in receiving.recv(64):
            if number in _SIGNALS:
                self._take_up(signal.Signals(number))

    def _take_up(self, number: signal.Signals) -> None:
        self._own_requests += 1
        if self._own_requests > 1 and number == signal.SIGTERM:
            _say("SIGTERM again: stopped at once, without a checkpoint")
            os._exit(128 + number)
        if self._reason is None:
            self._request(number.name, number == signal.SIGINT)
            publish(f"stop/request/{jax.process_index()}", number.name)

    def _request(self, reason: str, interrupted: bool) -> None:
        self._interrupted = interrupted
        self._requested_at = time.monotonic()
        self._reason = reason
        again = "Ctrl-C again stops at once" if interrupted else "a second one stops at once"
        _say(f"{reason}: the run saves after this step and ends, within {self._limit:g} s; {again}")

    def _hear_others(self) -> None:
        for process, name in sorted(published("stop/request").items()):
            if int(process) != jax.process_index():
                self._request(f"{name} at {process_names([int(process)])}", name == signal.SIGINT.name)
                return

    def _agree(self) -> None:
        """Fixes the step: the one after the furthest that any process has reached, so that none has passed it."""
        with self._lock:  # no process goes on to another step before it knows
            publish(f"stop/reached/{jax.process_index()}", str(self._step))
            while not self._closing.is_set():
                reached = published("stop/reached")
                if len(reached) == jax.process_count():
                    self._target = max(map(int, reached.values())) + 1
                    return
                self._end_if_late()
                self._listen(_POLL_SECONDS / 5)

    def _end_if_late(self) -> None:
        if self._requested_at is not None and time.monotonic() >= self._requested_at + self._limit:
            missing = ""
            if jax.process_count() > 1 and self._target is None:
                came = published("stop/reached")
                absent = [process for process in range(jax.process_count()) if str(process) not in came]
                missing = f"; not heard from {process_names(absent)}" if absent else ""
            _say(f"{self._reason}: not saved within {self._limit:g} s{missing}; stopped without a checkpoint")
            os._exit(1)


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())
