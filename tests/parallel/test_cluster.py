"""Where a process finds out which one of how many it is."""

import http.server
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest

from jaxtool.parallel import cluster
from jaxtool.parallel.cluster import ProcessPlace, find_place

SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"}


def place(address: str, count: int, index: int, source: str, hosts: tuple[str, ...] = ()) -> ProcessPlace:
    return ProcessPlace(address=address, count=count, index=index, source=source, hosts=hosts)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"JAX_NUM_PROCESSES": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script, not a step
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "node1"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    ],
)
def test_alone(environment: dict[str, str]) -> None:
    assert find_place(environment) is None


@pytest.mark.parametrize(
    ("coordinator", "address"),
    [
        ("host", "host:8476"),
        ("host-1.a.b:99", "host-1.a.b:99"),
        ("10.0.0.1", "10.0.0.1:8476"),
        ("[::1]", "[::1]:8476"),
        ("[fe80::1]:5", "[fe80::1]:5"),
    ],
)
def test_arguments_and_jax_variables(coordinator: str, address: str) -> None:
    assert find_place({}, coordinator, 3, 1) == place(address, 3, 1, "arguments")
    variables = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "1"}
    assert find_place(variables) == place(address, 3, 1, "jax")
    assert find_place(variables, "other", 5, 0) == place("other:8476", 5, 0, "arguments")
    found = find_place(variables | {"JAX_COORDINATOR_PORT": "1234"})
    assert found is not None and found.address == (address if address[-5:] != ":8476" else address[:-4] + "1234")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node7,node9", "node7"),
        ("node[07-09,12]", "node07"),
        ("node[3,7-9]-ib,other", "node3-ib"),
        ("rack[1-2]n[03-04]", "rack1n03"),
    ],
)
def test_slurm_step(nodes: str, first: str) -> None:
    step = SLURM | {"SLURM_STEP_NODELIST": nodes}
    assert find_place(step) == place(f"{first}:8476", 4, 2, "slurm")
    # Its own port, for two jobs on one node; count and index still come from Slurm.
    assert find_place(step, f"{first}:9000") == place(f"{first}:9000", 4, 2, "slurm")


def test_tpu_pods() -> None:
    pod = {"TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_WORKER_ID": "2"}
    assert find_place(pod) == place("a:8476", 3, 2, "tpu", ("a", "b", "c"))
    ports = {"TPU_PROCESS_ADDRESSES": "a:8471,b:8471", "TPU_WORKER_ID": "0"}
    assert find_place(ports) == place("a:8476", 2, 0, "tpu", ("a:8471", "b:8471"))
    slices = pod | {
        "MEGASCALE_COORDINATOR_ADDRESS": "z:8080",
        "MEGASCALE_NUM_SLICES": "4",
        "MEGASCALE_SLICE_ID": "3",
    }
    assert find_place(slices) == place("z:8476", 12, 11, "tpu")


@pytest.fixture
def metadata_server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        answers: ClassVar = {
            "worker-network-endpoints": "unknown:unknown:10.1.0.3,unknown:unknown:10.1.0.4",
            "agent-worker-number": "1",
        }

        def do_GET(self) -> None:
            answer = self.answers.get(self.path.rsplit("/", 1)[1])
            allowed = self.headers["Metadata-Flavor"] == "Google" and answer is not None
            self.send_response(200 if allowed else 404)
            self.end_headers()
            self.wfile.write((answer or "").encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_tpu_machines_ask_their_metadata_server(metadata_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"GCE_METADATA_IP": metadata_server}
    assert find_place(environment) is None  # no TPU here
    monkeypatch.setattr(cluster.glob, "glob", lambda path: [path] if "accel" in path else [])
    assert find_place(environment) == place("10.1.0.3:8476", 2, 1, "tpu", ("10.1.0.3", "10.1.0.4"))
    assert find_place(environment | {"TPU_SKIP_MDS_QUERY": "1"}) is None
    assert find_place({"GCE_METADATA_IP": "127.0.0.1:1"}) is None


@pytest.mark.parametrize(
    ("environment", "arguments", "said"),
    [
        (
            {"JAX_NUM_PROCESSES": "2"},
            (None, None, None),
            r"JAX_COORDINATOR_ADDRESS\) and .*JAX_PROCESS_ID\) is not set",
        ),
        ({}, ("host", None, None), r"JAX_NUM_PROCESSES\) and .*JAX_PROCESS_ID\) is not set"),
        ({}, ("host", 2, 2), "process index is 2, expected 0 to 1"),
        ({}, ("host", 0, 0), "their number is 0"),
        ({}, ("host:port", 2, 0), "'host:port', expected host or host:port"),
        ({}, ("host:99999", 2, 0), "99999 is no port"),
        ({"JAX_NUM_PROCESSES": "two"}, ("host", None, 1), "JAX_NUM_PROCESSES is 'two', expected a number"),
    ],
)
def test_mistakes(environment: dict[str, str], arguments: tuple[str | None, int | None, int | None], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find_place(environment, *arguments)
