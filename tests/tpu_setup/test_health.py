"""health.py on real processes: two with 4 fake devices each, a host that doesn't come, expectations that aren't met."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.tpu_setup.conftest import ROOT, World, git

HEALTH = ROOT / "tpu_setup/health.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def start(*options: str, devices: int = 4) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "TPU_SKIP_MDS_QUERY": "1",
    }
    command = [sys.executable, str(HEALTH), "--matmul-size", "64", *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def record(output: str) -> dict[str, Any]:
    """The line of JSON, among what libraries print."""
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.multiprocess
def test_two_hosts_with_four_devices_each() -> None:
    address = f"localhost:{free_port()}"
    expected = ("--expect-hosts", "2", "--expect-devices", "8", "--max-skew", "60")
    hosts = [
        start("--coordinator", address, "--processes", "2", "--process", str(process), *expected) for process in (0, 1)
    ]
    outputs = [host.communicate(timeout=300) for host in hosts]
    for process, (output, errors) in enumerate(outputs):
        assert hosts[process].returncode == 0, output + errors
        found = record(output)
        assert found["ok"] and found["problems"] == []
        assert (found["process"], found["processes"], found["local_devices"], found["devices"]) == (process, 2, 4, 8)
        assert found["sum"] == 36  # 1 + 2 + ... + 8
        assert len(found["matmul_tflops"]) == 4 and min(found["matmul_tflops"]) > 0
        assert found["memory_gb_per_s"] > 0 and found["allreduce_gb_per_s"] > 0
    assert record(outputs[0][0])["clock_skew_s"] == 0
    assert "2 hosts, 8 devices: all sound" in outputs[0][0] and "all sound" not in outputs[1][0]
    table = [line.split() for line in outputs[0][0].splitlines() if line[:1] in "01" and "4 of 8" in line]
    assert [(row[0], row[-1]) for row in table] == [("0", "ok"), ("1", "ok")]


@pytest.mark.multiprocess
def test_hosts_that_do_not_come_are_named() -> None:
    lonely = start(
        "--coordinator", f"localhost:{free_port()}", "--processes", "3", "--process", "0", "--time-limit", "3"
    )
    lost = start("--coordinator", f"localhost:{free_port()}", "--processes", "2", "--process", "1", "--time-limit", "3")
    output, _ = lonely.communicate(timeout=200)
    (problem,) = record(output)["problems"]
    assert lonely.returncode == 1 and not record(output)["ok"]
    assert "2 of 3" in problem and "1, 2" in problem and socket.gethostname() in problem
    output, _ = lost.communicate(timeout=200)
    (problem,) = record(output)["problems"]
    assert lost.returncode == 1 and "process 1" in problem and "process 0 at localhost:" in problem


def test_expectations_that_are_not_met() -> None:
    host = start("--expect-hosts", "2", "--expect-devices", "4", "--peak-tflops", "1e6", devices=2)
    output, errors = host.communicate(timeout=300)
    assert host.returncode == 1, errors
    problems = record(output)["problems"]
    assert [problem.partition(":")[0] for problem in problems] == ["processes", "devices", "matmul"]
    assert "processes: 1, expected 2" in problems and "devices: 2, expected 4" in problems
    assert "NOT sound" in output


def test_a_step_that_hangs_is_named() -> None:
    program = "import health, time\nwith health.limited('all-reduce', 0.2, {'problems': []}): time.sleep(60)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT / "tpu_setup", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and record(done.stdout)["problems"] == ["all-reduce: no end within 0.2 s"]


def test_wrong_options() -> None:
    for options in (("--time-limit", "0"), ("--bogus",), ("--process", "x")):
        done = subprocess.run([sys.executable, str(HEALTH), *options], capture_output=True, text=True)
        assert done.returncode == 2 and "Traceback" not in done.stderr


def test_the_script_expects_what_the_table_says(pod: World) -> None:
    stub = "import os, sys\nprint(*sys.argv[1:])\nsys.exit(os.environ['JAXTOOL_WORKER'] == '3')\n"
    (pod.repo / "tpu_setup/health.py").write_text(stub)
    git(pod.repo, "commit", "-q", "-a", "-m", "stub")
    assert pod.run("sync.sh", "pod").returncode == 0
    done = pod.run("health.sh", "pod", "--poll-seconds", "0.2", "--time-limit", "7")
    assert done.returncode == 1, done.stderr
    expected = "--expect-hosts 4 --expect-devices 16 --expect-memory-gib 30.75 --peak-tflops 275"  # v4-32
    assert f"--time-limit 7 {expected}" in done.stdout
    assert "\n3       1 " in done.stdout and "\n0       0 " in done.stdout
