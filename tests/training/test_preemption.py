"""Signals to a run: the first one is a request that is answered at a step, the second one ends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtool.training import preemption
from jaxtool.training.preemption import StopRequest

ROOT = Path(__file__).parents[2]


def ask(number: signal.Signals, stop: StopRequest) -> None:
    os.kill(os.getpid(), number)
    deadline = time.monotonic() + 20
    while stop.reason is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_run_stops_after_the_step(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with StopRequest(limit_seconds=60) as stop:
        assert not stop.at(1) and stop.reason is None
        ask(number, stop)
        assert stop.at(2) and stop.at(3)
        assert (stop.reason, stop.interrupted) == (number.name, number == signal.SIGINT)
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    said = capfd.readouterr().err
    assert said.startswith(f"{number.name}: the run saves after this step and ends, within 60 s; ")
    assert said.count("\n") == 1


def test_without_a_request() -> None:
    with StopRequest() as stop:
        assert not any(stop.at(step) for step in range(5))
    assert stop.reason is None


def test_a_second_interrupt_is_one() -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        ask(signal.SIGINT, stop)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        pytest.fail("went on")


# The main thread is stuck in C, deaf to Python's handlers: as if it waited for devices for ever.
WAITS = """
import ctypes, sys
from jaxtool.training.preemption import StopRequest
mutex = ctypes.create_string_buffer(256)
with StopRequest(limit_seconds=float(sys.argv[1])) as stop:
    assert not stop.at(1)
    print("ready", flush=True)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize(
    ("limit", "signals", "status", "said"),
    [
        (50.0, 2, 143, "SIGTERM again: stopped at once, without a checkpoint\n"),
        (0.5, 1, 1, "SIGTERM: not saved within 0.5 s; stopped without a checkpoint\n"),
    ],
)
def test_a_process_that_hangs_ends_all_the_same(limit: float, signals: int, status: int, said: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(limit)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        began = time.monotonic()
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        _, error = process.communicate(timeout=40)
    finally:
        process.kill()
    assert time.monotonic() - began < 40
    assert process.returncode == status
    first = f"SIGTERM: the run saves after this step and ends, within {limit:g} s; a second one stops at once\n"
    assert error == first + said


def test_all_agree_on_a_step_that_none_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process stands for number 1 of 3; the others are entries of a fake store."""
    store: dict[str, str] = {}

    def published(folder: str) -> dict[str, str]:
        return {key.removeprefix(folder + "/"): text for key, text in store.items() if key.startswith(folder + "/")}

    monkeypatch.setattr(preemption.jax, "process_count", lambda: 3)
    monkeypatch.setattr(preemption.jax, "process_index", lambda: 1)
    monkeypatch.setattr(preemption, "publish", store.__setitem__)
    monkeypatch.setattr(preemption, "published", published)
    monkeypatch.setattr(preemption, "process_names", lambda processes: f"process {processes[0]} (host)")
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.02)
    with StopRequest() as stop:
        assert not stop.at(6) and not stop.at(7)
        store["stop/request/2"] = "SIGTERM"
        deadline = time.monotonic() + 20
        while "stop/reached/1" not in store:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert store["stop/reached/1"] == "7"
        store["stop/reached/0"] = "6"
        store["stop/reached/2"] = "8"
        # It waits here until all have said where they are; then 8 is the furthest, and has been passed.
        assert [stop.at(step) for step in (8, 9, 10)] == [False, True, True]
        assert (stop.reason, stop.interrupted) == ("SIGTERM at process 2 (host)", False)
    # The one that gets the signal tells the others.
    store.clear()
    with StopRequest() as stop:
        ask(signal.SIGINT, stop)
        while "stop/reached/1" not in store:
            time.sleep(0.01)
        assert store["stop/request/1"] == "SIGINT"
