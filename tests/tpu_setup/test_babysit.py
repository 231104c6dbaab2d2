"""babysit.py with the real scripts against the fake gcloud: preemptions kill processes and erase disks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.tpu_setup.conftest import World, git, read_until, wait_until

FAST = ("--poll-seconds", "0.5", "--settle-seconds", "0.5", "--run-poll-seconds", "0.2", "--ssh-delay", "0.1")
OPTIONS = ("pod", "--type", "v4-16", "--spot", "--grace", "1", *FAST)


COUNT = """
if [[ $JAXTOOL_WORKER == 0 ]]; then
  echo x >>"$0/starts"
  wc -l <"$0/starts" >"$0/next" && mv "$0/next" "$0/$JAXTOOL_RUN_ID"
fi
until [[ -e $0/$JAXTOOL_RUN_ID ]]; do sleep 0.1; done
n=$(<"$0/$JAXTOOL_RUN_ID")
"""


def program(shared: Path, text: str) -> tuple[str, ...]:
    """A command that knows how often it was started (n), by a folder that outlives the machines."""
    return ("--", "bash", "-c", COUNT + text, str(shared))


def starts(shared: Path) -> int:
    path = shared / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "starts").touch()
    return folder


def test_two_preemptions_and_an_unknown_state(world: World, shared: Path) -> None:
    world.plan(
        hosts=2,
        lives=[
            ["CREATING", "WAITING_FOR_RESOURCES", "FROBBING", "ACTIVE@first", "SUSPENDING", "SUSPENDED"],
            ["PROVISIONING", "ACTIVE@second", "ACTIVE/PREEMPTED"],
            ["ACTIVE"],
        ],
    )
    text = f"((n != 1)) || touch {world.cloud}/first; ((n != 2)) || touch {world.cloud}/second; "
    command = program(shared, text + "if ((n < 3)); then sleep 600; fi; echo third time lucky")
    done = world.run("babysit.py", *OPTIONS, "--delete-when-done", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert starts(shared) == 3 and world.resources() == [] and world.pids() == []
    assert len(world.calls("queued-resources create")) == 3 and len(world.calls("queued-resources delete")) == 3
    assert "don't know the state 'FROBBING'" in done.stdout
    assert done.stdout.count("the machines are going") == 2
    assert "third time lucky" in done.stdout and "the command has finished" in done.stdout
    # The same request, and the same commit, each time.
    assert len({str(call["flags"]) for call in world.calls("queued-resources create")}) == 1
    head = git(world.repo, "rev-parse", "HEAD").strip()
    assert all(head in str(call["words"]) for call in world.calls("tpu-vm scp"))


def test_a_failing_program_ends_it_and_the_commit_stays(world: World, shared: Path) -> None:
    world.plan(hosts=2)
    head = git(world.repo, "rev-parse", "HEAD").strip()
    # The program changes the repository that it came from: the next start has the old commit nevertheless.
    commit = (
        f"cd {world.repo} && git -c user.name=t -c user.email=t@e -c commit.gpgsign=false commit -q --allow-empty -m x"
    )
    command = program(shared, f"if [[ $JAXTOOL_WORKER == 1 ]]; then ({commit}); fi; exit 5")
    done = world.run("babysit.py", *OPTIONS, "--program-failures", "2", *command)
    assert done.returncode == 1, done.stdout + done.stderr
    assert starts(shared) == 2 and "the command's fault" in done.stdout
    assert git(world.repo, "rev-parse", "HEAD").strip() != head
    code = world.home(0) / "jaxtool-tpu/code"
    assert (code / ".jaxtool-commit").read_text().strip() == head
    assert world.resources() == ["pod"] and "still exists; to stop paying" in done.stdout


def test_quota(world: World, shared: Path) -> None:
    world.plan(create_errors=["RESOURCE_EXHAUSTED: Quota limit 'TPUV4s' has been exceeded."] * 9)
    done = world.run("babysit.py", *OPTIONS, "--create-attempts", "2", *program(shared, "true"))
    assert done.returncode == 3
    assert "Quota limit 'TPUV4s'" in done.stderr and "the quota is used up" in done.stdout
    assert world.resources() == [] and starts(shared) == 0


def test_an_interrupt_while_waiting_for_machines(world: World, shared: Path) -> None:
    world.plan(hosts=2, lives=[["WAITING_FOR_RESOURCES"]])
    child = world.start("babysit.py", *OPTIONS, *program(shared, "true"))
    wait_until(lambda: len(world.calls("queued-resources describe")) >= 4)
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 130, output
    assert "last seen WAITING_FOR_RESOURCES" in output and "delete.sh" in output
    assert world.resources() == ["pod"]  # requested once, and said so


def test_an_interrupt_leaves_the_run_and_the_same_command_goes_on(world: World, shared: Path) -> None:
    world.plan(hosts=2)
    command = program(shared, 'echo here; while [[ ! -e "$0/end" ]]; do sleep 0.1; done; echo ended')
    child = world.start("babysit.py", *OPTIONS, *command)
    wait_until(lambda: len(world.pids()) == 2)
    read_until(child, "here\n")
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 130 and "so does a run on it" in output and "kill.sh" in output
    assert len(world.pids()) == 2 and starts(shared) == 1

    child = world.start("babysit.py", *OPTIONS, *command)
    read_until(child, "following run")
    (shared / "end").touch()
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0 and "ended" in output
    assert starts(shared) == 1 and len(world.calls("queued-resources create")) == 1


def test_an_interrupt_while_installing_leaves_nothing_running(world: World, shared: Path) -> None:
    world.plan(hosts=2, ssh={"1": {"hang": [2, 3]}})  # calls of worker 1: scp, adopt, install
    child = world.start("babysit.py", *OPTIONS, *program(shared, "true"))
    wait_until(lambda: any("install" in call["flags"].get("--command", "") for call in world.calls("tpu-vm ssh")))
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 130, output
    assert starts(shared) == 0
    # The same command again finishes what was begun.
    done = world.run("babysit.py", *OPTIONS, *program(shared, "true"))
    assert done.returncode == 0 and starts(shared) == 1, done.stdout + done.stderr
