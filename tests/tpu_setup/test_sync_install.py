"""Code and packages on all workers."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.tpu_setup.conftest import ROOT, World, git


def commits(world: World, workers: int = 4) -> list[str]:
    return [(world.home(worker) / "jaxtool-tpu/code/.jaxtool-commit").read_text().strip() for worker in range(workers)]


def test_a_commit_comes_to_all_workers(pod: World) -> None:
    head = git(pod.repo, "rev-parse", "HEAD").strip()
    assert commits(pod) == [head] * 4
    code = pod.home(3) / "jaxtool-tpu/code"
    assert (code / "tpu_setup/worker.sh").read_bytes() == (pod.repo / "tpu_setup/worker.sh").read_bytes()

    # What runs write into runs/ stays when the code changes.
    (code / "runs/mine").mkdir(parents=True)
    (pod.repo / "new.txt").write_text("new")
    git(pod.repo, "add", ".")
    git(pod.repo, "commit", "-q", "-m", "second")
    done = pod.run("sync.sh", "pod")
    assert done.returncode == 0 and "on all 4 workers" in done.stdout, done.stderr
    second = git(pod.repo, "rev-parse", "HEAD").strip()
    assert commits(pod) == [second] * 4 and (code / "new.txt").read_text() == "new" and (code / "runs/mine").is_dir()
    # Again, and back to the first.
    assert pod.run("sync.sh", "pod").returncode == 0
    assert pod.run("sync.sh", "pod", "--commit", head[:10]).returncode == 0
    assert commits(pod) == [head] * 4 and not (code / "new.txt").exists()
    # Nothing half-unpacked is left.
    left = {path.name for path in (pod.home(0) / "jaxtool-tpu").iterdir()}
    assert left == {"bin", "venv", "output", "code", f"code-{head}", f"code-{second}"}
    assert not list(pod.home(0).glob("*.tar.gz"))


def test_uncommitted_changes_are_refused_or_said(pod: World) -> None:
    head = git(pod.repo, "rev-parse", "HEAD").strip()
    (pod.repo / "tpu_setup/env.sh").write_text("changed")
    (pod.repo / "untracked.txt").write_text("x")
    done = pod.run("sync.sh", "pod")
    assert done.returncode == 1 and "uncommitted changes (2)" in done.stderr and "untracked.txt" in done.stderr
    assert commits(pod) == [head] * 4
    done = pod.run("sync.sh", "pod", "--allow-dirty")
    assert done.returncode == 0, done.stderr
    assert "untracked files are not sent" in done.stderr and "untracked.txt" in done.stderr
    code = pod.home(1) / "jaxtool-tpu/code"
    assert (code / "tpu_setup/env.sh").read_text() == "changed" and not (code / "untracked.txt").exists()
    assert len(set(commits(pod))) == 1 and commits(pod) != [head] * 4
    # Neither the tree nor the list of stashes has changed.
    assert git(pod.repo, "stash", "list") == "" and (pod.repo / "tpu_setup/env.sh").read_text() == "changed"
    # A commit that is named doesn't care.
    assert pod.run("sync.sh", "pod", "--commit", "HEAD").returncode == 0
    assert commits(pod) == [head] * 4


def test_one_worker_that_gets_nothing_is_named(pod: World) -> None:
    pod.plan(hosts=4, ssh={"2": {"fail": [0, 99]}})
    done = pod.run("sync.sh", "pod", "--ssh-delay", "0.1", "--ssh-attempts", "2")
    assert done.returncode == 3
    assert "worker 2: exit code" in done.stderr and "worker 1: exit" not in done.stderr
    assert "attempt 1 of 2" in done.stderr


def test_an_ssh_that_hangs_or_fails_at_first_is_tried_again(pod: World) -> None:
    pod.plan(hosts=4, ssh={"1": {"hang": [0, 1]}, "3": {"fail": [0, 2]}})
    done = pod.run("sync.sh", "pod", "--ssh-delay", "0.1", "--ssh-timeout", "8")
    assert done.returncode == 0, done.stderr


def test_installation_is_done_once(pod: World) -> None:
    home = pod.home(2)
    calls = (home / "uv-calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["--version", "venv", "pip"] or calls[0].startswith("venv")
    assert "pip sync" in calls[-1] and "requirements-tpu.txt" in calls[-1]
    assert "--python 3.12" in next(call for call in calls if call.startswith("venv"))
    assert "astral.sh/uv/0.13.9/install.sh" in (home / "curl-calls").read_text()

    done = pod.run("install.sh", "pod")
    assert done.returncode == 0 and "up to date" in done.stdout, done.stderr
    assert (home / "uv-calls").read_text().splitlines() == calls
    # Another lock file: only the packages again.
    (pod.repo / "tpu_setup/requirements-tpu.txt").write_text("jax==0.0.1\n")
    git(pod.repo, "commit", "-q", "-a", "-m", "other packages")
    assert pod.run("sync.sh", "pod").returncode == 0
    done = pod.run("run.sh", "pod", "--", "true")
    assert done.returncode == 1 and "packages are stale: run install.sh" in done.stderr
    assert pod.run("install.sh", "pod").returncode == 0
    later = (home / "uv-calls").read_text().splitlines()[len(calls) :]
    assert [call.split()[0] for call in later if not call.startswith("--version")] == ["pip"]
    assert len((home / "curl-calls").read_text().splitlines()) == 1


def test_a_failed_installation_is_not_taken_for_done(pod: World) -> None:
    (pod.repo / "tpu_setup/requirements-tpu.txt").write_text("jax==0.0.1\n")
    git(pod.repo, "commit", "-q", "-a", "-m", "other packages")
    assert pod.run("sync.sh", "pod").returncode == 0
    (pod.home(1) / "uv-fails").touch()
    done = pod.run("install.sh", "pod", "--ssh-delay", "0.1")
    assert done.returncode == 1 and "worker 1: exit code 10" in done.stderr and "no solution found" in done.stderr
    done = pod.run("run.sh", "pod", "--", "true")
    assert done.returncode == 1 and "packages are missing ok" in done.stderr
    (pod.home(1) / "uv-fails").unlink()
    assert pod.run("install.sh", "pod").returncode == 0


def test_before_sync_everything_says_so(world: World) -> None:
    assert world.run("create.sh", "pod", "--type", "v4-8").returncode == 0
    for script in ("install.sh", "run.sh"):
        done = world.run(script, "pod", "--ssh-delay", "0.1", *(["--", "true"] if script == "run.sh" else []))
        assert done.returncode != 0, script
        assert "worker 0: exit code 127" in done.stderr  # no worker.sh there
    world.plan(lives=[["WAITING_FOR_RESOURCES"]])
    assert world.run("delete.sh", "pod").returncode == 0
    assert world.run("create.sh", "pod", "--type", "v4-8").returncode == 0
    done = world.run("sync.sh", "pod")
    assert done.returncode == 3 and "expected READY" in done.stderr


def lock() -> dict[str, str]:
    lines = (ROOT / "tpu_setup/requirements-tpu.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_lock_file_fits_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = lock()
    environment = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux"}
    for text in [*project["dependencies"], *project["optional-dependencies"]["tpu"]]:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": "tpu"}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert name in locked, f"{name}: renew tpu_setup/requirements-tpu.txt"
        assert requirement.specifier.contains(locked[name]), text
    assert locked["jax"] == locked["jaxlib"] and "libtpu" in locked


def test_the_locked_libtpu_is_the_one_that_jax_wants() -> None:
    try:
        wanted = [Requirement(text) for text in importlib.metadata.requires("jax") or []]
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jax is not installed as a package")
    if importlib.metadata.version("jax") != lock()["jax"]:
        pytest.skip("another jax than the locked one is installed")
    (libtpu,) = [each for each in wanted if each.name == "libtpu" and each.marker and "tpu" in str(each.marker)]
    assert libtpu.specifier.contains(lock()["libtpu"])
