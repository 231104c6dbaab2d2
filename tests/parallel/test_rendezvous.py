"""Processes that meet before jax starts: threads of this process stand for them."""

import json
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from jaxtool.parallel import rendezvous
from jaxtool.parallel.cluster import ProcessPlace
from jaxtool.parallel.rendezvous import meet

HERE = socket.gethostname()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def start(
    pool: ThreadPoolExecutor,
    port: int,
    index: int,
    count: int,
    *,
    timeout: float = 20,
    version: str = "1",
    hosts: Any = (),
) -> "Future[tuple[str, ...]]":
    place = ProcessPlace(address=f"localhost:{port}", count=count, index=index, source="arguments", hosts=hosts)
    return pool.submit(meet, place, timeout=timeout, version=version)


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(16) as executor:
        yield executor


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0)])
def test_all_learn_the_hosts(pool: ThreadPoolExecutor, order: tuple[int, ...]) -> None:
    port, found = free_port(), []
    for index in order:
        found.append(start(pool, port, index, 4))
        time.sleep(0.05)
    assert [future.result() for future in found] == [(HERE,) * 4] * 4
    with socket.create_server(("", port)):  # the port is free for jax at once
        pass


def test_strangers_are_passed_over(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.3)
    port = free_port()
    first = start(pool, port, 0, 2)
    deadline = time.monotonic() + 10
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"index": "1"}\n', b'{"index": 5, "count": 2}\n', b"", None):
        while True:
            try:
                stranger = socket.create_connection(("localhost", port))
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        if text is not None:  # the last one says nothing and stays
            stranger.sendall(text)
            stranger.close()
    assert start(pool, port, 1, 2).result() == first.result() == (HERE, HERE)
    stranger.close()


def test_who_did_not_come_is_named_everywhere(pool: ThreadPoolExecutor) -> None:
    port, hosts = free_port(), ("a", "b", "c", "d", "e")
    came = [start(pool, port, index, 5, timeout=1.5, hosts=hosts) for index in (0, 2)]
    for future in came:
        with pytest.raises(
            ValueError, match=r"3 of 5 processes did not start within 1\.5 s: 1 \(b\), 3 \(d\), 4 \(e\)"
        ):
            future.result()
    with pytest.raises(ValueError, match=rf"; started have 0 \({HERE}\), 2 \({HERE}\)"):
        came[0].result()


def test_process_0_did_not_come(pool: ThreadPoolExecutor) -> None:
    port = free_port()
    with pytest.raises(
        ValueError, match=rf"process 1 \({HERE}\) did not reach process 0 at localhost:{port} within 0\.5 s"
    ):
        start(pool, port, 1, 2, timeout=0.5).result()


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([{"index": 1, "count": 3}], "was started as one of 3 processes, process 0 as one of 2"),
        ([{"index": 1, "count": 2, "version": "2"}], r"has jax 2, process 0 \(.*\) has 1"),
    ],
)
def test_processes_that_do_not_fit(pool: ThreadPoolExecutor, others: list[dict[str, Any]], said: str) -> None:
    port = free_port()
    futures = [start(pool, port, 0, 2), *(start(pool, port, **other) for other in others)]
    for future in futures:
        with pytest.raises(ValueError, match=said):
            future.result()


@pytest.mark.parametrize("index", [0, 1])
def test_one_number_for_two_processes(pool: ThreadPoolExecutor, index: int) -> None:
    port = free_port()
    first = start(pool, port, 0, 3)
    answers = []
    connections = []
    for pid in (1, 2):
        while True:
            try:
                connections.append(socket.create_connection(("localhost", port)))
                break
            except OSError:
                time.sleep(0.02)
        line = {"index": index, "count": 3, "host": f"host{pid}", "pid": pid, "version": "1"}
        connections[-1].sendall(json.dumps(line).encode() + b"\n")
        if index == 0:
            break
    with pytest.raises(ValueError, match=f"were both started as process {index}"):
        first.result()
    for connection in connections:
        answers.append(connection.makefile().readline())
        connection.close()
    assert all("both started" in answer for answer in answers)


def test_a_port_in_use(pool: ThreadPoolExecutor) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"can't listen at port {port} .*give the coordinator another one"):
            start(pool, port, 0, 2).result()
