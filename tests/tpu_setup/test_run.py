"""A command on all workers: logs and exit codes come back, one run at a time, nothing half started."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from tests.tpu_setup.conftest import World, read_until, wait_until

FAST = ("--poll-seconds", "0.2", "--ssh-delay", "0.1")
ME = "$JAXTOOL_WORKER"


def codes(output: str) -> dict[int, str]:
    """Worker -> exit code, from the table."""
    table = output.partition("exit code")[2]
    return {int(number): code.strip() for number, code in re.findall(r"^(\d+) +(.*?) +/", table, flags=re.MULTILINE)}


def test_logs_and_exit_codes_of_all_workers(pod: World) -> None:
    program = f'echo "out of {ME} of $JAXTOOL_WORKERS"; echo "err of {ME}" >&2; [[ {ME} != 2 ]] || exit 3'
    done = pod.run("run.sh", "pod", "--run-id", "r1", "--grace", "5", *FAST, "--", "bash", "-c", program)
    assert done.returncode == 1, done.stderr
    assert codes(done.stdout) == {0: "0", 1: "0", 2: "3", 3: "0"}
    assert "worker 2: exited 3" in done.stderr
    for worker in range(4):
        text = (pod.logs("r1") / f"worker-{worker}.log").read_text()
        assert text == f"out of {worker} of 4\nerr of {worker}\n"
    assert "out of 0 of 4" in done.stdout and "out of 1" not in done.stdout
    assert codes((pod.logs("r1") / "exit_codes").read_text())[2] == "3"
    assert "bash -c" in (pod.logs("r1") / "command").read_text()


def test_all_well(pod: World) -> None:
    program = "pwd -P; command -v python; echo $JAX_COORDINATOR_PORT $PYTHONPATH; python -c 'print(6 * 7)'"
    done = pod.run("run.sh", "pod", "--show", "all", *FAST, "--", "bash", "-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert codes(done.stdout) == dict.fromkeys(range(4), "0")
    code = (pod.home(3) / "jaxtool-tpu/code").resolve()
    lines = [line for line in done.stdout.splitlines() if line.startswith("[3] ")]
    assert lines == [f"[3] {code}", f"[3] {pod.home(3)}/jaxtool-tpu/venv/bin/python", f"[3] 8476 {code}", "[3] 42"]


def test_arguments_arrive_as_they_are(pod: World, tmp_path: Path) -> None:
    trap = tmp_path / "trapped"
    words = [
        "it's",
        'a "b"',
        "  two  spaces ",
        f"$(touch {trap})",
        f"; touch {trap}",
        "`id`",
        "*",
        "a\nb",
        "",
        "--x",
        "é\\n",
    ]
    done = pod.run("run.sh", "pod", "--hosts", "1", "--run-id", "r1", *FAST, "--", "printf", "<%s>", *words)
    assert done.returncode == 0, done.stderr
    assert (pod.logs("r1") / "worker-0.log").read_text() == "".join(f"<{word}>" for word in words)
    assert not trap.exists()


def test_commands_that_a_shell_would_take_for_its_own(pod: World) -> None:
    for command, expected in ((["exit", "0"], "127"), (["nonsense"], "127"), (["bash", "-c", "exit 255"], "255")):
        done = pod.run("run.sh", "pod", "--hosts", "1", *FAST, "--grace", "0", "--", *command)
        assert done.returncode == 1 and codes(done.stdout) == {0: expected}, command
        time.sleep(1)  # run ids are seconds


def test_a_second_run_is_refused(pod: World) -> None:
    first = pod.run("run.sh", "pod", "--run-id", "first", "--detach", "--", "sleep", "600")
    assert first.returncode == 0 and "logs.sh pod --run-id first" in first.stdout, first.stderr
    assert len(pod.pids()) == 4
    second = pod.run("run.sh", "pod", "--run-id", "second", *FAST, "--", "sleep", "600")
    assert second.returncode == 4 and "run 'first' is active" in second.stderr and "kill.sh" in second.stderr
    assert not (pod.home(0) / "jaxtool-tpu/runs/second").exists()
    # A worker checks for itself, too: between the question and the start somebody else could have started.
    third = pod.run("install.sh", "pod")
    assert third.returncode == 0  # up to date; nothing to install under a run

    killed = pod.run("kill.sh", "pod")
    assert killed.returncode == 0 and killed.stdout.count("run first: ended") == 4, killed.stdout
    assert pod.pids() == []
    again = pod.run("run.sh", "pod", "--run-id", "first", *FAST, "--", "true")
    assert again.returncode == 4 and "used before" in again.stderr


def test_a_race_for_the_start_has_one_winner_everywhere(pod: World) -> None:
    children = [
        pod.start("run.sh", "pod", "--run-id", name, "--detach", "--ssh-delay", "0.1", "--", "sleep", "600")
        for name in ("a", "b")
    ]
    outputs = [child.communicate(timeout=120)[0] for child in children]
    codes = sorted(child.returncode for child in children)
    assert codes in ([0, 4], [4, 4]), outputs
    # Whoever won has all workers, or nobody has any.
    assert len(pod.pids()) == (4 if codes == [0, 4] else 0)


def test_when_one_fails_the_others_are_ended_after_the_grace(pod: World) -> None:
    program = f"echo {ME}; if [[ {ME} == 1 ]]; then exit 7; fi; exec sleep 600"
    begin = time.monotonic()
    done = pod.run("run.sh", "pod", "--run-id", "r1", "--grace", "1", *FAST, "--", "bash", "-c", program)
    assert done.returncode == 1 and time.monotonic() - begin < 200
    found = codes(done.stdout)
    assert found[1] == "7" and all(found[worker] == "143 (ended by run.sh)" for worker in (0, 2, 3))
    assert pod.pids() == []


def test_ssh_that_fails_or_hangs_loses_nothing(pod: World) -> None:
    # Calls of worker 1: preflight 0, start 1, polls from 2 on. Failures and hangs in between.
    pod.plan(hosts=4, ssh={"1": {"fail": [3, 6]}, "2": {"hang": [3, 4]}, "3": {"fail": [1, 2]}})
    program = "for i in 1 2 3 4 5 6 7 8; do echo line $i; sleep 0.3; done"
    done = pod.run("run.sh", "pod", "--run-id", "r1", "--ssh-timeout", "8", *FAST, "--", "bash", "-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    for worker in range(4):
        lines = (pod.logs("r1") / f"worker-{worker}.log").read_text().splitlines()
        assert lines == [f"line {i}" for i in range(1, 9)], worker  # each once


def test_a_worker_that_stays_away(pod: World) -> None:
    pod.plan(hosts=4, ssh={"2": {"fail": [2, 999]}})
    done = pod.run("run.sh", "pod", "--run-id", "r1", "--max-misses", "3", "--grace", "0", *FAST, "--", "sleep", "600")
    assert done.returncode == 3
    found = codes(done.stdout)
    assert found[2] == "unreachable" and found[0] == "143 (ended by run.sh)"
    assert "worker 2: unreachable" in done.stderr


def test_a_killed_leader_is_lost_not_finished(pod: World) -> None:
    child = pod.start("run.sh", "pod", "--hosts", "1", "--run-id", "r1", "--grace", "0", *FAST, "--", "sleep", "600")
    wait_until(lambda: (pod.logs("r1") / "worker-0.log").exists())
    (pid,) = pod.pids()
    os.killpg(pid, signal.SIGKILL)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 3 and codes(output) == {0: "lost"}, output


def test_a_start_that_fails_somewhere_is_undone_everywhere(pod: World) -> None:
    pod.plan(hosts=4, ssh={"3": {"fail": [1, 99]}})
    done = pod.run("run.sh", "pod", "--run-id", "r1", "--ssh-attempts", "2", *FAST, "--", "sleep", "600")
    assert done.returncode == 3 and "did not start everywhere" in done.stderr
    assert pod.pids() == []


def test_workers_with_different_code_are_refused(pod: World) -> None:
    (pod.home(1) / "jaxtool-tpu/code/.jaxtool-commit").write_text("another\n")
    done = pod.run("run.sh", "pod", "--", "true")
    assert done.returncode == 1 and "different code" in done.stderr and "worker 1: another" in done.stderr


def test_an_interrupt_leaves_the_run_alone_and_resume_follows_it(pod: World) -> None:
    command = ("bash", "-c", "echo begun; while [[ ! -e end ]]; do sleep 0.1; done; echo ended")
    child = pod.start("run.sh", "pod", "--run-id", "r1", *FAST, "--", *command)
    log = pod.logs("r1") / "worker-0.log"
    wait_until(lambda: log.exists() and log.read_text() == "begun\n")
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 130 and "run r1 goes on" in output
    assert len(pod.pids()) == 4

    other = pod.run("run.sh", "pod", "--resume", *FAST, "--", "bash", "-c", "something else")
    assert other.returncode == 4
    child = pod.start("run.sh", "pod", "--resume", *FAST, "--", *command)
    read_until(child, "following run r1")
    for worker in range(4):
        (pod.home(worker) / "jaxtool-tpu/code/end").touch()
    child.communicate(timeout=120)
    assert child.returncode == 0
    assert log.read_text() == "begun\nended\n"


def test_an_interrupt_while_starting_ends_what_has_started(pod: World) -> None:
    pod.plan(hosts=4, ssh={"3": {"hang": [1, 2]}})
    child = pod.start("run.sh", "pod", "--run-id", "r1", *FAST, "--", "sleep", "600")
    wait_until(lambda: len(pod.pids()) == 3)
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 130 and "interrupted while starting" in output
    assert pod.pids() == []


def test_large_and_binary_logs_come_whole(pod: World) -> None:
    program = "import os, sys; sys.stdout.buffer.write(bytes(range(256)) * 24000 + b'no newline at the end')"
    done = pod.run(
        "run.sh", "pod", "--hosts", "1", "--run-id", "r1", "--show", "none", *FAST, "--", "python", "-c", program
    )
    assert done.returncode == 0, done.stderr
    log = (pod.logs("r1") / "worker-0.log").read_bytes()
    assert log == bytes(range(256)) * 24000 + b"no newline at the end"  # more than one poll brings


def test_logs_of_one_and_all(pod: World) -> None:
    program = f"for i in 1 2 3; do echo {ME}-$i; done; while [[ ! -e end ]]; do sleep 0.1; done; echo last"
    assert pod.run("run.sh", "pod", "--run-id", "r1", "--detach", "--", "bash", "-c", program).returncode == 0
    wait_until(lambda: "0-3" in pod.run("logs.sh", "pod").stdout)
    assert pod.run("logs.sh", "pod", "--worker", "2", "--lines", "2").stdout == "2-2\n2-3\n"
    done = pod.run("logs.sh", "pod", "--worker", "all", "--lines", "1", "--run-id", "r1")
    assert done.stdout == "".join(f"[{worker}] {worker}-3\n" for worker in range(4))
    done = pod.run("logs.sh", "pod", "--run-id", "r2", "--ssh-delay", "0.1")
    assert done.returncode == 1 and "no run 'r2'" in done.stderr

    child = pod.start("logs.sh", "pod", "--worker", "all", "--follow")
    read_until(child, *(f"[{worker}] {worker}-{i}\n" for worker in range(4) for i in (1, 2, 3)))
    for worker in range(4):
        (pod.home(worker) / "jaxtool-tpu/code/end").touch()
    read_until(child, *(f"[{worker}] last\n" for worker in range(4)))
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=120)
    assert child.returncode == 130
