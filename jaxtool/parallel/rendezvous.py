"""Where the processes of a run meet before jax joins them: one exchange over TCP at the coordinator's port.

Process 0 listens, the others say who they are, and all get the same answer: the hosts, or who is missing. The port is
free again afterwards, so that jax's own service takes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import Any

from jaxtool.parallel.cluster import ProcessPlace

_LONGEST = 1 << 20  # bytes of a message: host names of thousands of processes
_PATIENCE = 5.0  # seconds for a connection to be made, or to say its line


def meet(place: ProcessPlace, *, timeout: float, version: str) -> tuple[str, ...]:
    """Waits for all processes; returns their host names in order.

    Args:
        place: this process's place among the others.
        timeout: seconds in which all must have come.
        version: what all must have in common.

    Raises:
        ValueError: some didn't come (the message names them), process 0 can't be reached or can't listen, or the
            processes don't fit together.
    """
    own = {"index": place.index, "count": place.count, "host": socket.gethostname()}
    own |= {"pid": os.getpid(), "version": version}
    deadline = time.monotonic() + timeout
    answer = _receive_all(place, own, deadline, timeout) if place.index == 0 else _report(place, own, deadline, timeout)
    if "error" in answer:
        raise ValueError(answer["error"])
    return tuple(str(host) for host in answer["hosts"])


def _receive_all(place: ProcessPlace, own: dict[str, Any], deadline: float, timeout: float) -> dict[str, Any]:
    """Process 0: collects what the others say, and answers all of them."""
    port = int(place.address.rsplit(":", 1)[1])
    came: dict[int, tuple[dict[str, Any], socket.socket | None]] = {0: (own, None)}
    answer: dict[str, Any] = {}
    try:
        listener = _listener(port)
    except OSError as error:
        raise ValueError(
            f"process 0 ({own['host']}) can't listen at port {port} ({error}); another run may use it, "
            "give the coordinator another one as host:port"
        ) from error
    with listener:
        while len(came) < place.count and not answer:
            left = deadline - time.monotonic()
            if left <= 0:
                answer = {
                    "error": _who_is_missing(place, {index: said["host"] for index, (said, _) in came.items()}, timeout)
                }
                break
            listener.settimeout(left)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            said = _read_line(connection)
            if said is None:  # not one of us: a port scanner, a health check
                connection.close()
                continue
            answer = _mismatch(own, said, came)
            index = said["index"]
            if index in came and not answer:  # it lost its connection and came again
                old = came[index][1]
                if old is not None:
                    old.close()
            came[-1 if answer else index] = (said, connection)
        answer = answer or {"hosts": [came[index][0]["host"] for index in range(place.count)]}
        for _, connection_ in came.values():
            if connection_ is not None:
                _send_line(connection_, answer)
        for _, connection_ in came.values():
            if connection_ is not None:
                _finish(connection_)
    return answer


def _report(place: ProcessPlace, own: dict[str, Any], deadline: float, timeout: float) -> dict[str, Any]:
    """Any other process: tries until process 0 answers."""
    host, port = place.address.rsplit(":", 1)
    reason = "no answer"
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ValueError(
                f"process {place.index} ({own['host']}) did not reach process 0 at {place.address} within "
                f"{timeout:g} s ({reason}): is it started, and may its port be reached from here?"
            )
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=min(_PATIENCE, left)) as connection:
                _send_line(connection, own)
                # Process 0 says at its own deadline who is missing; it may have started later.
                answer = _read_line(connection, deadline + timeout - time.monotonic())
            if answer is not None and ("hosts" in answer or "error" in answer):
                return answer
            reason = "it closed the connection"
        except OSError as error:
            reason = str(error)
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))


def _listener(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError:
            pass  # IPv6 is compiled in, but switched off
    return socket.create_server(("", port), backlog=1024)


def _who_is_missing(place: ProcessPlace, came: dict[int, str], timeout: float) -> str:
    missing = [index for index in range(place.count) if index not in came]

    def named(index: int) -> str:
        host = came.get(index) or (place.hosts[index] if index < len(place.hosts) else "")
        return f"{index} ({host})" if host else str(index)

    return (
        f"{len(missing)} of {place.count} processes did not start within {timeout:g} s: "
        f"{', '.join(map(named, missing))}; started have {', '.join(map(named, sorted(came)))}"
    )


def _mismatch(own: dict[str, Any], said: dict[str, Any], came: dict[int, Any]) -> dict[str, Any]:
    """An error where a process doesn't belong to this run, else nothing."""
    who = f"process {said['index']} ({said['host']})"
    if said["count"] != own["count"]:
        return {"error": f"{who} was started as one of {said['count']} processes, process 0 as one of {own['count']}"}
    if said["version"] != own["version"]:
        return {"error": f"{who} has jax {said['version']}, process 0 ({own['host']}) has {own['version']}"}
    if said["index"] == 0:
        return {"error": f"{said['host']} and {own['host']} were both started as process 0"}
    before = came.get(said["index"])
    if before is not None and (before[0]["host"], before[0]["pid"]) != (said["host"], said["pid"]):
        return {"error": f"{before[0]['host']} and {said['host']} were both started as process {said['index']}"}
    return {}


def _send_line(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it is gone; jax's own start will miss it
        connection.sendall(json.dumps(message).encode() + b"\n")


def _read_line(connection: socket.socket, patience: float = _PATIENCE) -> dict[str, Any] | None:
    """One message; None if what comes is none, or nothing comes within `patience` seconds."""
    text, deadline = b"", time.monotonic() + patience
    while not text.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or len(text) > _LONGEST:
            return None
        connection.settimeout(left)
        try:
            part = connection.recv(1 << 16)
        except OSError:
            return None
        if not part:
            return None
        text += part
    try:
        message = json.loads(text)
    except ValueError:
        return None
    if not isinstance(message, dict):
        return None
    if "hosts" in message or "error" in message:
        return message
    fits = all(type(message.get(name)) is int for name in ("index", "count", "pid"))
    fits = fits and all(type(message.get(name)) is str for name in ("host", "version"))
    return message if fits and 0 <= message["index"] < message["count"] else None


def _finish(connection: socket.socket) -> None:
    """Lets the other side close first, so that the port isn't kept back for a connection that is over."""
    try:
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(1.0)
        while connection.recv(1 << 10):
            pass
    except OSError:
        pass
    connection.close()
