"""Checks that the hosts of a job meet, see the devices they should, and compute and communicate at a plausible speed.

    python tpu_setup/health.py                                   # on each host of a pod, or on one machine
    python tpu_setup/health.py --coordinator HOST:8476 --processes 2 --process 0

Every process prints one line of JSON, process 0 a table of all. Ends with 0 only when all hosts are sound. For TPU, GPU
and CPU. A host that doesn't come is named (`jaxtool.parallel`), and so is a step that takes too long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

STRAGGLER = 0.8  # of the median matmul speed


@contextlib.contextmanager
def limited(step: str, seconds: float, record: dict[str, Any]) -> Iterator[None]:
    """Ends the process with the step's name when it takes longer: collectives of JAX can't be interrupted."""

    def give_up() -> None:
        record["problems"].append(f"{step}: no end within {seconds:g} s")
        print(json.dumps({**record, "ok": False}), flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def fastest(function: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds of the fastest of some calls, after one that compiles."""
    import jax

    jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - begin)
    return min(times)


def matmul_tflops(device: Any, size: int, repeats: int = 8) -> float:
    """bf16 TFLOP/s of one device, multiplying square matrices."""
    import jax
    import jax.numpy as jnp

    x = jax.device_put(jnp.full((size, size), 1 / size, jnp.bfloat16), device)
    step = jax.jit(lambda x, w: jax.lax.fori_loop(0, repeats, lambda _, y: y @ w, x))
    return float(2 * size**3 * repeats / fastest(lambda: step(x, x)) / 1e12)


def memory_gb_per_s(device: Any, size: int) -> float:
    """GB/s of memory traffic of one device, reading and writing `size` bytes."""
    import jax
    import jax.numpy as jnp

    x = jax.device_put(jnp.zeros(size // 4, jnp.float32), device)
    step = jax.jit(lambda x: x + 1)
    return float(2 * size / fastest(lambda: step(x)) / 1e9)


def sum_over_devices(size: int) -> tuple[float, float]:
    """The devices' numbers (1, 2, ...) summed, and GB/s on the bus while summing `size` bytes of each device."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    count, length = jax.device_count(), size // 4
    mesh = jax.make_mesh((count,), ("devices",))
    split, whole = PartitionSpec("devices"), PartitionSpec()

    def part(index: Any) -> Any:
        return np.full((1, length), 1 + (index[0].start or 0), np.float32)

    x = jax.make_array_from_callback((count, length), NamedSharding(mesh, split), part)
    step = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "devices"), mesh=mesh, in_specs=split, out_specs=whole))
    total = float(np.asarray(step(x).addressable_shards[0].data).max())
    seconds = fastest(lambda: step(x))
    return total, 2 * (count - 1) / count * size / seconds / 1e9


def examine(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Fills the record of this host: what it sees and how fast it is."""
    import jax

    problems = record["problems"]
    local = jax.local_devices()
    small = local[0].platform == "cpu"
    record.update(
        platform=local[0].platform,
        device=local[0].device_kind,
        jax=jax.__version__,
        processes=jax.process_count(),
        local_devices=len(local),
        devices=jax.device_count(),
    )
    for what, found, expected in (
        ("processes", jax.process_count(), options.expect_hosts),
        ("devices", jax.device_count(), options.expect_devices),
        ("local devices", len(local) * jax.process_count(), jax.device_count()),
    ):
        if expected and found != expected:
            counted = " x processes" if what == "local devices" else ""
            problems.append(f"{what}{counted}: {found}, expected {expected}")

    stats = [device.memory_stats() or {} for device in local]
    limits = [stat["bytes_limit"] / 2**30 for stat in stats if "bytes_limit" in stat]
    record["memory_gib"] = round(min(limits), 2) if limits else None
    if options.expect_memory_gib and limits and min(limits) < 0.9 * options.expect_memory_gib:
        problems.append(f"memory: {min(limits):.2f} GiB per device, expected {options.expect_memory_gib:g}")

    with limited("matmul", options.time_limit, record):
        size = options.matmul_size or (256 if small else 8192)
        record["matmul_tflops"] = [round(matmul_tflops(device, size), 4) for device in local]
    with limited("memory bandwidth", options.time_limit, record):
        speeds = [memory_gb_per_s(device, 2**22 if small else 2**29) for device in local]
        record["memory_gb_per_s"] = round(min(speeds), 2)
    with limited("all-reduce over all devices", options.time_limit, record):
        total, speed = sum_over_devices(2**18 if small else 2**26)
    record.update(sum=total, allreduce_gb_per_s=round(speed, 3))
    count = jax.device_count()
    if not math.isclose(total, count * (count + 1) / 2):
        problems.append(f"sum over devices: {total:g}, expected {count * (count + 1) // 2}")
    if options.peak_tflops and (slowest := min(record["matmul_tflops"])) < options.min_share * options.peak_tflops:
        problems.append(f"matmul: {slowest:g} TFLOP/s, expected {options.min_share:.0%} of {options.peak_tflops:g}")
    if abs(record["clock_skew_s"]) > options.max_skew:
        problems.append(f"clock: {record['clock_skew_s']:+.3f} s from process 0's")


def compare(records: list[dict[str, Any]]) -> None:
    """Adds the problems that only a comparison of the hosts shows."""
    middle = statistics.median(speed for record in records for speed in record["matmul_tflops"])
    for record in records:
        for number, speed in enumerate(record["matmul_tflops"]):
            if record["platform"] != "cpu" and speed < STRAGGLER * middle:
                record["problems"].append(f"local device {number}: {speed:g} TFLOP/s, the median is {middle:g}")
        for field in ("jax", "device"):
            if record[field] != records[0][field]:
                record["problems"].append(f"{field} {record[field]}, process 0 has {records[0][field]}")


def table(records: list[dict[str, Any]]) -> str:
    """What process 0 prints."""
    header = ("process", "host", "devices", "GiB", "TFLOP/s", "memory GB/s", "all-reduce GB/s", "clock s", "verdict")
    rows = [header]
    for record in records:
        memory = record["memory_gib"]
        rows.append(
            (
                str(record["process"]),
                record["host"],
                f"{record['local_devices']} of {record['devices']}",
                "-" if memory is None else f"{memory:g}",
                f"{min(record['matmul_tflops']):g}",
                f"{record['memory_gb_per_s']:g}",
                f"{record['allreduce_gb_per_s']:g}",
                f"{record['clock_skew_s']:+.3f}",
                "; ".join(record["problems"]) or "ok",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def check_host(options: argparse.Namespace, record: dict[str, Any]) -> bool:
    """All checks of this host; true when all hosts are sound.

    Raises:
        ValueError: not all processes have come in time, or they don't fit together.
    """
    # Imported here: a failing import shall be a line of JSON as well.
    import jax

    from jaxtool.parallel import barrier, gather, start_processes

    with limited("starting JAX on all hosts", 2 * options.time_limit + 30, record):
        processes = start_processes(options.coordinator, options.processes, options.process, timeout=options.time_limit)
        record.update(process=processes.index)
        jax.devices()
    # All leave a barrier at nearly the same moment.
    barrier("clock", timeout=options.time_limit)
    clocks = [float(text) for text in gather("clock", repr(time.time()), timeout=options.time_limit)]
    record["clock_skew_s"] = round(clocks[processes.index] - clocks[0], 3)
    examine(options, record)
    texts = gather("health", json.dumps(record), timeout=options.time_limit)
    records = [json.loads(text) for text in texts]
    compare(records)
    record["problems"] = records[processes.index]["problems"]
    sound = not any(other["problems"] for other in records)
    print(json.dumps({**record, "ok": not record["problems"]}), flush=True)
    if processes.index == 0:
        print(table(records), flush=True)
        print(f"{len(records)} hosts, {record['devices']} devices: {'all sound' if sound else 'NOT sound'}", flush=True)
    if processes.count > 1:
        with limited("leaving", options.time_limit, record):
            jax.distributed.shutdown()
    return sound


def main() -> None:
    """Parses the options and runs the checks."""
    parser = argparse.ArgumentParser(description="Checks the hosts and devices of a job.", allow_abbrev=False)
    parser.add_argument("--coordinator", help="HOST:PORT of process 0 (default: from the environment)")
    parser.add_argument("--processes", type=int, help="number of processes (default: from the environment)")
    parser.add_argument("--process", type=int, help="this process's number (default: from the environment)")
    parser.add_argument("--time-limit", type=float, default=120, help="seconds for all to come, and for each check")
    parser.add_argument("--expect-hosts", type=int, help="how many processes there should be")
    parser.add_argument("--expect-devices", type=int, help="how many devices there should be")
    parser.add_argument("--expect-memory-gib", type=float, help="GiB that each device should have")
    parser.add_argument("--peak-tflops", type=float, help="bf16 peak of a device, to judge the matmul by")
    parser.add_argument("--min-share", type=float, default=0.4, help="of the peak that a matmul should reach")
    parser.add_argument("--max-skew", type=float, default=1.0, help="seconds that clocks may differ")
    parser.add_argument("--matmul-size", type=int, help="rows of the matrices (default 8192, on CPU 256)")
    options = parser.parse_args()
    if not options.time_limit > 0:
        parser.error(f"--time-limit is {options.time_limit:g}, expected more than 0 seconds")
    record: dict[str, Any] = {"host": socket.gethostname(), "process": None, "problems": []}
    try:
        sound = check_host(options, record)
    except Exception as error:  # whatever it comes from: one line of JSON
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        record["problems"].append(f"{kind}{error}")
        print(json.dumps({**record, "ok": False}), flush=True)
        os._exit(1)  # JAX's own exit handlers would wait for hosts that are not there
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
