"""What a worker does by itself: ending runs, the lock file of libtpu, mounts, the environment of runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tpu_setup.conftest import ROOT, World, wait_until


def test_kill_ends_the_process_group_and_nothing_else(pod: World) -> None:
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        # A child and a grandchild; one of them ignores SIGTERM.
        program = "trap '' TERM; sleep 601 & bash -c 'sleep 602 & wait' & wait; while true; do sleep 1; done"
        done = pod.run("run.sh", "pod", "--hosts", "1", "--run-id", "r1", "--detach", "--", "bash", "-c", program)
        assert done.returncode == 0, done.stderr
        assert len(pod.pids()) == 1
        done = pod.run("kill.sh", "pod", "--hosts", "1", "--run-id", "r1", "--grace", "1")
        assert done.returncode == 0 and "killed (it ignored SIGTERM for 1 s)" in done.stdout, done.stdout
        assert pod.pids() == [] and bystander.poll() is None
        done = pod.run("kill.sh", "pod", "--hosts", "1")
        assert "no run is active" in done.stdout
    finally:
        bystander.kill()
        bystander.wait()


def test_a_process_that_has_the_number_of_an_old_run_is_left_alone(pod: World) -> None:
    done = pod.run("run.sh", "pod", "--hosts", "1", "--run-id", "r1", "--poll-seconds", "0.2", "--", "true")
    assert done.returncode == 0
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        folder = pod.home(0) / "jaxtool-tpu/runs/r1"
        started = folder.joinpath("pid").read_text().split()[1]
        folder.joinpath("pid").write_text(f"{stranger.pid} {started}\n")  # as if the kernel had counted around
        folder.joinpath("exit").unlink()
        done = pod.run("kill.sh", "pod", "--hosts", "1", "--run-id", "r1")
        assert done.returncode == 0 and "not running" in done.stdout
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_the_lock_file_goes_only_when_nobody_holds_it(pod: World) -> None:
    lock = pod.home(0) / "libtpu_lockfile"
    lock.touch()
    hold = "import sys, time; f = open(sys.argv[1]); print('open', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", hold, str(lock)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "open\n"
            done = pod.run("kill.sh", "pod", "--hosts", "1")
            assert done.returncode == 0 and lock.exists()
            assert f"held, left alone; processes that have the TPU open: {holder.pid}" in done.stdout
        finally:
            holder.kill()
    done = pod.run("kill.sh", "pod", "--hosts", "1")
    assert "stale, removed" in done.stdout and not lock.exists()
    assert "libtpu_lockfile" not in pod.run("kill.sh", "pod", "--hosts", "1").stdout


FINDMNT = '#!/bin/bash\nfile="$HOME/mounted"; [[ -e $file ]] && cat "$file"\n'
GCSFUSE = '#!/bin/bash\necho "$*" >>"$HOME/gcsfuse-calls"; echo "${@: -2:1}" >"$HOME/mounted"\n'
MOUNT = '#!/bin/bash\necho "$*" >>"$HOME/mount-calls"; echo "${@: -2:1}" >"$HOME/mounted"\n'
UMOUNT = '#!/bin/bash\nrm "$HOME/mounted"\n'


@pytest.fixture
def mounting(pod: World) -> World:
    for name, text in (
        ("findmnt", FINDMNT),
        ("gcsfuse", GCSFUSE),
        ("mount", MOUNT),
        ("umount", UMOUNT),
        ("mount.nfs", ""),
    ):
        (pod.tools / name).write_text(text)
        (pod.tools / name).chmod(0o755)
    return pod


def test_mounting_is_done_once(mounting: World, tmp_path: Path) -> None:
    options = ("pod", "--folder", str(tmp_path / "shared"))
    for _ in range(2):
        done = mounting.run("mount.sh", *options, "--bucket", "my-bucket")
        assert done.returncode == 0, done.stderr
    assert done.stdout.count("is mounted already") == 4
    calls = (mounting.home(2) / "gcsfuse-calls").read_text().splitlines()
    assert len(calls) == 1 and calls[0].endswith(f"my-bucket {tmp_path / 'shared'}") and "--implicit-dirs" in calls[0]
    done = mounting.run("mount.sh", *options, "--nfs", "10.0.0.2:/vol")
    assert done.returncode == 1 and "'my-bucket' is mounted there" in done.stderr
    for word in ("unmounted", "nothing is mounted"):
        done = mounting.run("mount.sh", *options, "--unmount")
        assert done.returncode == 0 and done.stdout.count(word) == 4
    done = mounting.run("mount.sh", *options, "--nfs", "10.0.0.2:/vol")
    assert done.returncode == 0, done.stderr
    assert "-t nfs" in (mounting.home(0) / "mount-calls").read_text()


def environment(variables: dict[str, str], tools: Path | None = None) -> dict[str, str]:
    """The environment after env.sh, in a shell that stops at unset variables and failures."""
    path = f"{tools}:{os.environ['PATH']}" if tools else os.environ["PATH"]
    done = subprocess.run(
        ["bash", "-euc", f"source {ROOT}/tpu_setup/env.sh; ulimit -n; env -0"],
        env={"PATH": path, "HOME": "/nonexistent", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    limit, _, rest = done.stdout.partition("\n")
    return {"ulimit": limit} | dict(entry.split("=", 1) for entry in rest.split("\0") if entry)


def test_the_environment_by_generation() -> None:
    plain = environment({})
    assert plain["JAX_COORDINATOR_PORT"] == "8476" and "LIBTPU_INIT_ARGS" not in plain
    assert plain["JAX_COMPILATION_CACHE_DIR"] == "/nonexistent/.cache/jaxtool/jax-cache"
    assert plain["PYTHONPATH"] == str(ROOT)
    hard = subprocess.run(["bash", "-c", "ulimit -Hn"], capture_output=True, text=True).stdout.strip()
    assert plain["ulimit"] == hard
    v6e = environment({"TPU_ACCELERATOR_TYPE": "v6e-16"})["LIBTPU_INIT_ARGS"]
    v5e = environment({"TPU_ACCELERATOR_TYPE": "v5litepod-16"})["LIBTPU_INIT_ARGS"]
    assert "--xla_tpu_scoped_vmem_limit_kib=98304" in v6e and "vmem" not in v5e
    assert all(flag.startswith("--xla_") and "=" in flag for flag in v6e.split())
    mine = {"TPU_ACCELERATOR_TYPE": "v6e-16", "LIBTPU_INIT_ARGS": "", "JAX_COORDINATOR_PORT": "1234"}
    assert environment(mine)["JAX_COORDINATOR_PORT"] == "1234"
    assert environment({**mine, "LIBTPU_INIT_ARGS": "--xla_a=1"})["LIBTPU_INIT_ARGS"] == "--xla_a=1"


def test_the_cache_is_shared_where_something_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "findmnt").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "findmnt").chmod(0o755)
    assert environment({}, tmp_path)["JAX_COMPILATION_CACHE_DIR"] == "/mnt/jaxtool/jax-cache"


def test_unknown_verbs(tmp_path: Path) -> None:
    for words in ([], ["frob"], ["die", "x"]):
        done = subprocess.run(
            ["bash", str(ROOT / "tpu_setup/worker.sh"), *words],
            env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and "verb" in done.stderr


def test_signals_reach_the_program(pod: World) -> None:
    """SIGTERM is what a program saves its last checkpoint on."""
    program = "trap 'echo saved; exit 0' TERM; echo ready; while true; do sleep 0.1; done"
    child = pod.start(
        "run.sh", "pod", "--hosts", "1", "--run-id", "r1", "--poll-seconds", "0.2", "--", "bash", "-c", program
    )
    log = pod.logs("r1") / "worker-0.log"
    wait_until(lambda: log.exists() and log.read_text() == "ready\n")
    assert pod.run("kill.sh", "pod", "--hosts", "1").returncode == 0
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and "saved" in output
