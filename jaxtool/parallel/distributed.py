"""Several processes as one run: how they find one another, and how they agree on something.

`start_processes` comes before anything that touches a device. `barrier`, `gather` and `from_first` go through the
key-value store of `jax.distributed`, not through devices: they have time limits and name who is missing. With a single
process all of them return at once. How processes stop together is in `jaxtool.training.preemption`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jax._src import distributed as _jax_distributed

from jaxtool.parallel.cluster import find_place
from jaxtool.parallel.rendezvous import meet

BARRIER_SECONDS = 300.0
_LAST_WORDS_SECONDS = 5.0
_HEAD_START_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of a run.

    Attributes:
        count: how many there are.
        index: which one this is, from 0 on. Process 0 writes the files that exist once.
        hosts: host name of each.
    """

    count: int
    index: int
    hosts: tuple[str, ...]


def start_processes(
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    timeout: float = BARRIER_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> Processes:
    """Joins this process with the others of its run; returns at once where there are none.

    What is not given comes from the environment: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, the
    tasks of a Slurm step, or the workers of a TPU pod (see `find_place`). The processes meet at the coordinator's port
    before jax does, because jax itself ends a process with a stack trace, and without a name, when another is absent.

    Args:
        coordinator: host of process 0, with or without `:port` (8476).
        count: number of processes.
        index: this process's number, from 0 on.
        timeout: seconds in which all must have started.
        environment: environment variables (None: this process's).

    Raises:
        ValueError: not all processes came within `timeout` (the message names those that are missing), they don't
            agree on how many they are or on jax's version, or jax has used its devices already.
    """
    place = find_place(os.environ if environment is None else environment, coordinator, count, index)
    if place is None or place.count == 1:
        return Processes(count=1, index=0, hosts=("localhost",))
    if jax.distributed.is_initialized():
        raise ValueError("the processes of this run are joined already: start_processes is called once")
    started = time.monotonic()
    hosts = meet(place, timeout=timeout, version=jax.__version__)
    # jax's own preemption service would take over SIGTERM; `jaxtool.training.preemption` does that, for SIGINT too.
    jax.config.update("jax_enable_preemption_service", False)
    left = max(10, round(timeout - (time.monotonic() - started)))
    try:
        jax.distributed.initialize(
            place.address,
            place.count,
            place.index,
            initialization_timeout=left,
            # Slurm says which of the node's GPUs belong to a task.
            cluster_detection_method="slurm" if place.source == "slurm" else "deactivate",
        )
    except RuntimeError as error:
        raise ValueError(f"process {place.index} of {place.count} could not join ({error})") from error
    _client().key_value_set(f"{_HOSTS}{place.index}", hosts[place.index], allow_overwrite=True)
    return Processes(count=place.count, index=place.index, hosts=hosts)


def end_process(status: int) -> NoReturn:
    """Ends this process; one of several that failed does so without waiting for what waits for the others.

    A thread of orbax may wait for a process that has failed already, and jax lets no process end before all do; either
    takes minutes, in which accelerators are idle and nothing restarts the run.
    """
    if status and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        # When the first process ends, jax aborts the others: those that failed as well may first say so and end.
        with contextlib.suppress(ValueError, RuntimeError):
            barrier("end of a failed run", timeout=_LAST_WORDS_SECONDS)
            if jax.process_index() == 0:
                time.sleep(_HEAD_START_SECONDS)
        os._exit(status)
    sys.exit(status)


def barrier(name: str, *, timeout: float = BARRIER_SECONDS) -> None:
    """Waits until all processes have called it with this name; names may be used again.

    Raises:
        ValueError: they have not within `timeout` seconds; the message names those that are missing.
    """
    gather(name, "", timeout=timeout)


def gather(name: str, text: str, *, timeout: float = BARRIER_SECONDS) -> list[str]:
    """The texts of all processes, in their order. Calls with one name must come in the same order everywhere.

    Raises:
        ValueError: not all processes came within `timeout` seconds; the message names those that are missing.
    """
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return [text]
    client = _client()
    with _LOCK:
        turn = _turns[name] = _turns.get(name, 0) + 1
    folder = f"jaxtool/gather/{name}/{turn}/"
    client.key_value_set(f"{folder}{index}", text)
    try:
        client.wait_at_barrier(f"jaxtool/{name}/{turn}", round(timeout * 1000))
    except RuntimeError as error:
        came = {int(key.rsplit("/", 1)[1]) for key, _ in client.key_value_dir_get(folder)}
        missing = [process for process in range(count) if process not in came]
        if not missing:
            raise ValueError(f"{name}: the processes could not wait for one another ({_first_line(error)})") from error
        raise ValueError(f"{name}: waited {timeout:g} s for {process_names(missing)}") from error
    texts = {int(key.rsplit("/", 1)[1]): value for key, value in client.key_value_dir_get(folder)}
    if turn > 1:  # all have come to this turn, so all have read the one before
        client.key_value_delete(f"jaxtool/gather/{name}/{turn - 1}/{index}")
    return [texts[process] for process in range(count)]


def from_first(name: str, make: Callable[[], Any], *, timeout: float = BARRIER_SECONDS) -> Any:
    """What process 0 makes (a JSON value), on all processes; an error that it meets is raised on all of them.

    Raises:
        ValueError: `make` raised it, or not all processes came within `timeout` seconds.
        FileNotFoundError: `make` raised it.
    """
    if jax.process_count() == 1:
        return make()
    answer: dict[str, Any] = {}
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            answer = {"value": make()}
        except (ValueError, OSError) as error:
            failure = error
            answer = {"error": str(error), "absent": isinstance(error, FileNotFoundError)}
    found = json.loads(gather(name, json.dumps(answer), timeout=timeout)[0])
    if failure is not None:
        raise failure
    if "error" in found:
        raise (FileNotFoundError if found["absent"] else ValueError)(found["error"])
    return found["value"]


def process_names(processes: list[int]) -> str:
    """`process 1 (host-b), process 3 (host-d)`, as far as the hosts are known."""
    hosts = {int(key.rsplit("/", 1)[1]): host for key, host in _client().key_value_dir_get(_HOSTS)}
    return ", ".join(
        f"process {process} ({hosts[process]})" if process in hosts else f"process {process}" for process in processes
    )


def publish(key: str, text: str) -> None:
    """Sets a key that any process may look for with `published`; setting it again replaces it."""
    if jax.process_count() > 1:
        _client().key_value_set(f"jaxtool/published/{key}", text, allow_overwrite=True)


def published(folder: str) -> dict[str, str]:
    """What processes have published below `folder`, by the rest of the key; empty with a single process."""
    if jax.process_count() == 1:
        return {}
    prefix = f"jaxtool/published/{folder}/"
    return {key.split(prefix, 1)[1]: text for key, text in _client().key_value_dir_get(prefix)}


_HOSTS = "jaxtool/hosts/"
# How often each name has been waited at: the store is one per process, and so is this.
_turns: dict[str, int] = {}
_LOCK = threading.Lock()


def _client() -> Any:
    # jax has no public way to its key-value store; orbax reaches it in the same manner.
    client = _jax_distributed.global_state.client
    if client is None:
        raise ValueError(f"{jax.process_count()} processes are not joined: call start_processes first")
    return client


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
