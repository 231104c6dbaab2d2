"""Which process of how many this is: read from arguments and the environment, nothing is started here.

Known are jax's own variables, Slurm steps, and TPU pods (GKE by variables, TPU VMs by their metadata server).
"""

from __future__ import annotations

import glob
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

# Pinned, so that a firewall can have a rule for it: jax's own default differs by version and cluster.
PORT = 8476


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """A process's place among the others.

    Attributes:
        address: `host:port` of process 0.
        count: number of processes.
        index: this one, from 0 on.
        source: where that was found: "arguments", "jax", "slurm" or "tpu".
        hosts: host names in the order of the processes where the environment lists them, else empty.
    """

    address: str
    count: int
    index: int
    source: str
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"process index is {self.index}, expected 0 to {self.count - 1} ({self.count} processes)")


def find_place(
    environment: Mapping[str, str], coordinator: str | None = None, count: int | None = None, index: int | None = None
) -> ProcessPlace | None:
    """This process's place; None where nothing says that there are others.

    Looked at in this order: arguments and JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID; a Slurm step of
    several tasks (`srun`); a TPU pod. JAX_COORDINATOR_PORT replaces the default port.

    Raises:
        ValueError: some of coordinator, count and index are known but not all, or they make no sense.
    """
    given = coordinator is not None or count is not None or index is not None
    coordinator = coordinator or environment.get("JAX_COORDINATOR_ADDRESS") or None
    count = _number(environment, "JAX_NUM_PROCESSES") if count is None else count
    index = _number(environment, "JAX_PROCESS_ID") if index is None else index
    if count == 1 and coordinator is None:
        return None
    cluster = _slurm_step(environment) or _tpu_pod(environment)
    if coordinator is None and count is None and index is None:
        return cluster
    if cluster is not None:
        coordinator = coordinator or cluster.address
        count, index = cluster.count if count is None else count, cluster.index if index is None else index
    missing = [
        name
        for name, value in (
            ("the coordinator's address (JAX_COORDINATOR_ADDRESS)", coordinator),
            ("the number of processes (JAX_NUM_PROCESSES)", count),
            ("this process's index (JAX_PROCESS_ID)", index),
        )
        if value is None
    ]
    if missing or coordinator is None or count is None or index is None:
        raise ValueError(f"several processes: {' and '.join(missing)} is not set, expected all three or none")
    if count < 1:
        raise ValueError(f"several processes: their number is {count}, expected 1 or more")
    same = cluster is not None and (cluster.count, cluster.index) == (count, index)
    return ProcessPlace(
        address=_with_port(coordinator, environment),
        count=count,
        index=index,
        source="slurm"
        if same and cluster is not None and cluster.source == "slurm"
        else "arguments"
        if given
        else "jax",
        hosts=cluster.hosts if same and cluster is not None else (),
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError(f"{name} is {text!r}, expected a number")
    return int(text)


def _with_port(coordinator: str, environment: Mapping[str, str]) -> str:
    """`host`, `host:port` or `[v6]:port` with a port; the host may be a name or an address."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]/]+)(?::(\d{1,5}))?", coordinator)
    if not found:
        raise ValueError(f"coordinator is {coordinator!r}, expected host or host:port")
    port = int(found[2]) if found[2] else _number(environment, "JAX_COORDINATOR_PORT") or PORT
    if not 0 < port < 2**16:
        raise ValueError(f"coordinator is {coordinator!r}: {port} is no port")
    return f"{found[1]}:{port}"


def _slurm_step(environment: Mapping[str, str]) -> ProcessPlace | None:
    # A batch script or an interactive shell has some of these; only tasks that srun started have them all.
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")
    if any(name not in environment for name in names):
        return None
    count, index = _number(environment, "SLURM_NTASKS"), _number(environment, "SLURM_PROCID")
    if count is None or index is None or count == 1:
        return None
    nodes = environment["SLURM_STEP_NODELIST"]
    # The first of `node7`, `node7,node9`, `node[07-09,12]` or `rack[1-2]n[3-4]`.
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST is {nodes!r}, expected a list of nodes")
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])
    return ProcessPlace(address=_with_port(host, environment), count=count, index=index, source="slurm")


def _tpu_pod(environment: Mapping[str, str]) -> ProcessPlace | None:
    """Workers of all slices of a TPU job, slice by slice."""
    names = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    worker = _number(environment, "TPU_WORKER_ID")
    if (
        names is None
        and "TPU_SKIP_MDS_QUERY" not in environment
        and glob.glob("/dev/accel0") + glob.glob("/dev/vfio/0")
    ):
        endpoints = _metadata(environment, "worker-network-endpoints")
        number = _metadata(environment, "agent-worker-number")
        if endpoints and number and number.isdigit():
            names, worker = ",".join(entry.split(":")[-1] for entry in endpoints.split(",")), int(number)
    if not names or worker is None:
        return None
    workers = tuple(name.strip() for name in names.split(",") if name.strip())
    slices = _number(environment, "MEGASCALE_NUM_SLICES") or 1
    place = _number(environment, "MEGASCALE_SLICE_ID") or 0
    if len(workers) * slices == 1:
        return None
    host = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "").split(":")[0] or workers[0].split(":")[0]
    return ProcessPlace(
        address=_with_port(host, environment),
        count=len(workers) * slices,
        index=worker + place * len(workers),
        source="tpu",
        hosts=workers if slices == 1 else (),  # a slice knows its own workers only
    )


def _metadata(environment: Mapping[str, str], name: str) -> str | None:
    """An attribute of a Google Cloud machine; None elsewhere."""
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{name}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return str(answer.read(1 << 20).decode())
    except (urllib.error.URLError, OSError, UnicodeDecodeError):
        return None
