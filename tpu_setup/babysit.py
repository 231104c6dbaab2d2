#!/usr/bin/env python3
"""Keeps a command running on a TPU slice that can be preempted: create, sync, install, run; again after a preemption.

    tpu_setup/babysit.py NAME --type v5litepod-16 --zone us-west4-a --spot -- python train/finetune.py --config ...

The outer loop only: resuming is the command's job, from checkpoints that outlive the machines. `next_action` is the
state machine; what touches the world is done by the scripts beside this file. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent

FINISHED, PROGRAM_FAILED, USAGE, GAVE_UP, INTERRUPTED = 0, 1, 2, 3, 130
RUN_FAILED, RUN_UNREACHABLE, RUN_BUSY = 1, 3, 4  # exit codes of run.sh

WAITING = {"CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING"}
LEAVING = {"SUSPENDING", "DELETING"}
GONE = {"SUSPENDED", "FAILED"}
NODE_COMING = {"CREATING", "STARTING", "RESTARTING", "REIMAGING", "REPAIRING"}
NODE_LEAVING = {"STOPPING", "DELETING"}
NODE_GONE = {"PREEMPTED", "TERMINATED", "STOPPED", "ABSENT"}

# Errors of gcloud, by their status, that trying again doesn't change.
HOPELESS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ARGUMENT", "NOT_FOUND")


class Action(enum.Enum):
    """What to do about a state."""

    CREATE = "create"
    WAIT = "wait"
    RUN = "run"
    DELETE = "delete"
    PUZZLE = "wait, and say that the state is unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """What Google Cloud says.

    Attributes:
        queued: of the queued resource, or ABSENT.
        node: of its node, or ABSENT; only asked for when the queued resource is ACTIVE, else "-".
    """

    queued: str
    node: str = "-"

    def __str__(self) -> str:
        return self.queued if self.node == "-" else f"{self.queued}, node {self.node}"


def next_action(state: State) -> Action:
    """The state machine. A preempted slice is deleted first: a queued resource can't become active twice."""
    if state.queued == "ABSENT":
        return Action.CREATE
    if state.queued in WAITING | LEAVING:
        return Action.WAIT
    if state.queued in GONE:
        return Action.DELETE
    if state.queued != "ACTIVE":
        return Action.PUZZLE
    if state.node == "READY":
        return Action.RUN
    if state.node in NODE_COMING | NODE_LEAVING:
        return Action.WAIT
    return Action.DELETE if state.node in NODE_GONE else Action.PUZZLE


def lost(state: State) -> bool:
    """Whether the machines that a program runs on are gone or going. An unknown state isn't taken for that."""
    return state.queued in GONE | LEAVING | WAITING | {"ABSENT"} or state.node in NODE_GONE | NODE_LEAVING


class CloudError(Exception):
    """gcloud or a script failed; `status` is gcloud's, where it has one."""

    def __init__(self, message: str, status: str = "") -> None:
        super().__init__(message)
        self.status = status


class Interrupted(Exception):
    """SIGINT or SIGTERM came."""


class Cloud:
    """The scripts beside this file and gcloud, as functions; their processes have sessions of their own, so that Ctrl-C
    reaches none of them and what must not be cut short isn't."""

    def __init__(self, options: argparse.Namespace, command: list[str], stop: threading.Event) -> None:
        self.options = options
        self.command = command
        self.stop = stop
        self.where = ["--zone", options.zone] + (["--project", options.project] if options.project else [])
        self.ssh: list[str] = []
        for name in ("hosts", "parallel", "ssh_timeout", "ssh_attempts", "ssh_delay", "ssh_key_file"):
            if (value := getattr(options, name)) is not None:
                self.ssh += ["--" + name.replace("_", "-"), value]
        self.ssh += [flag for flag, given in (("--internal-ip", options.internal_ip), ("--iap", options.iap)) if given]

    def script(self, name: str, *arguments: str) -> list[str]:
        """The command line of a script for this slice."""
        return ["bash", str(HERE / name), self.options.name, *self.where, *arguments]

    def create_command(self) -> list[str]:
        """create.sh with this slice's properties."""
        options, more = self.options, []
        for name in ("runtime_version", "valid_until_duration", "network", "subnetwork", "service_account", "labels"):
            if value := getattr(options, name):
                more += ["--" + name.replace("_", "-"), value]
        flags = (("--spot", options.spot), ("--reserved", options.reserved), ("--internal-ips", options.internal_ips))
        return self.script("create.sh", "--type", options.type, *(flag for flag, given in flags if given), *more)

    def setup_commands(self) -> list[list[str]]:
        """What a new slice needs before the command can run. The scripts do nothing where it is done."""
        commands = [self.script("sync.sh", *self.ssh, "--commit", self.options.commit)]
        commands.append(self.script("install.sh", *self.ssh))
        if self.options.bucket:
            commands.append(self.script("mount.sh", *self.ssh, "--bucket", self.options.bucket))
        if self.options.nfs:
            commands.append(self.script("mount.sh", *self.ssh, "--nfs", self.options.nfs))
        if self.options.health:
            commands.append(self.script("health.sh", *self.ssh, "--type", self.options.type))
        return commands

    def run_command(self) -> list[str]:
        """run.sh, which follows the same command where it is active already."""
        follow = ["--resume", "--poll-seconds", self.options.run_poll_seconds, "--grace", self.options.grace]
        return self.script("run.sh", *self.ssh, *follow, "--", *self.command)

    def _describe(self, kind: str, fields: str) -> str:
        where = [f"--zone={self.options.zone}"] + (
            [f"--project={self.options.project}"] if self.options.project else []
        )
        command = ["gcloud", "compute", "tpus", kind, "describe", self.options.name, f"--format=value({fields})"]
        try:
            done = subprocess.run(
                [*command, *where, "--quiet"], capture_output=True, text=True, start_new_session=True, timeout=180
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CloudError(str(error)) from error
        if done.returncode == 0:
            return done.stdout.strip() or "STATE_UNSPECIFIED"
        if "NOT_FOUND" in done.stderr:
            return "ABSENT"
        raise CloudError(done.stderr.strip() or f"gcloud ended with {done.returncode}", _status(done.stderr))

    def observe(self) -> State:
        """Asks for the state.

        Raises:
            CloudError: gcloud can't say.
        """
        queued = self._describe("queued-resources", "state.state")
        return State(queued=queued, node=self._describe("tpu-vm", "state") if queued == "ACTIVE" else "-")

    def finish(self, command: list[str]) -> None:
        """Runs a script that is not to be cut short (create, delete).

        Raises:
            CloudError: it failed.
        """
        done = subprocess.run(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
        sys.stderr.write(done.stderr)
        if done.returncode:
            raise CloudError(f"{Path(command[1]).name} ended with {done.returncode}", _status(done.stderr))

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Starts a script that may be ended (sync, install, mount, run)."""
        return subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)

    def end(self, child: subprocess.Popen[bytes]) -> None:
        """Ends a started script; what run.sh started on the workers goes on."""
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()

    def wait(self, seconds: float) -> None:
        """Sleeps.

        Raises:
            Interrupted: a signal came.
        """
        if self.stop.wait(seconds):
            raise Interrupted


def _status(text: str) -> str:
    known = (*HOPELESS, "RESOURCE_EXHAUSTED")
    return next((status for status in known if status in text), "")


@dataclasses.dataclass
class Babysitter:
    """The loop and what it counts.

    Attributes:
        creations: requests that succeeded. The first is free, the others are limited by --retries.
        program_failures: times in a row that the program failed by itself on machines that stayed.
        setup_failures: times in a row that workers couldn't be set up or reached on machines that stayed.
        prepared: whether the present slice has code and packages.
    """

    options: argparse.Namespace
    cloud: Cloud
    say: Callable[[str], None]
    creations: int = 0
    create_failures: int = 0
    program_failures: int = 0
    setup_failures: int = 0
    silences: int = 0
    puzzles: int = 0
    prepared: bool = False
    last: State | None = None

    def look(self) -> State | None:
        """The state, said where it has changed; None when gcloud can't say just now."""
        try:
            state = self.cloud.observe()
        except CloudError as error:
            self.silences += 1
            self.say(f"can't ask for the state ({self.silences} in a row): {error}")
            return None
        self.silences = 0
        if state != self.last:
            self.say(f"{self.options.name}: {state}")
        self.last = state
        return state

    def watch(self) -> int:
        """Acts on the state until the command has finished or nothing more can be done; returns the exit code."""
        poll = self.options.poll_seconds
        while True:
            if self.cloud.stop.is_set():
                raise Interrupted
            state = self.look()
            if state is None:
                if self.silences >= self.options.unknown_limit:
                    return self.give_up("gcloud can't say what the state is")
                self.cloud.wait(poll)
                continue
            action = next_action(state)
            self.puzzles = self.puzzles + 1 if action is Action.PUZZLE else 0
            code: int | None = None
            if action is Action.CREATE:
                code = self.create()
            elif action is Action.DELETE:
                self.delete()
            elif action is Action.RUN:
                code = self.run()
            elif action is Action.PUZZLE:
                self.say(f"don't know the state '{state}': waiting ({self.puzzles} of {self.options.unknown_limit})")
                if self.puzzles >= self.options.unknown_limit:
                    return self.give_up(f"the state stayed '{state}'")
                self.cloud.wait(poll)
            else:
                self.cloud.wait(poll)
            if code is not None:
                return code

    def give_up(self, reason: str) -> int:
        """Says why."""
        self.say(f"giving up: {reason}")
        return GAVE_UP

    def create(self) -> int | None:
        """Requests the slice; an exit code when that is hopeless."""
        if self.creations > self.options.retries:
            return self.give_up(f"the slice was lost {self.creations} times (--retries {self.options.retries})")
        self.prepared = False
        try:
            self.cloud.finish(self.cloud.create_command())
        except CloudError as error:
            self.create_failures += 1
            if error.status in HOPELESS or self.create_failures >= self.options.create_attempts:
                quota = ": the quota is used up" if error.status == "RESOURCE_EXHAUSTED" else ""
                return self.give_up(f"creating failed {self.create_failures} times{quota} ({error.status or error})")
            pause = self.options.poll_seconds * 2**self.create_failures
            self.say(f"creating failed ({error.status or error}), again in {pause:g} s")
            self.cloud.wait(pause)
            return None
        self.create_failures = 0
        self.creations += 1
        return None

    def delete(self) -> None:
        """Deletes what is left of the slice."""
        self.prepared = False
        self.program_failures = self.setup_failures = 0
        try:
            self.cloud.finish(self.cloud.script("delete.sh"))
        except CloudError as error:
            self.silences += 1
            self.say(f"deleting failed ({error}), again in {self.options.poll_seconds:g} s")
            self.cloud.wait(self.options.poll_seconds)

    def follow(self, command: list[str]) -> int | None:
        """Runs a script while the machines stay; its exit code, or None when they went."""
        child = self.cloud.start(command)
        next_look = time.monotonic() + self.options.poll_seconds
        try:
            while True:
                try:
                    return child.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    self.cloud.wait(0)
                if time.monotonic() >= next_look:
                    if (state := self.look()) is not None and lost(state):
                        self.say(f"the machines are going: {state}")
                        return None
                    next_look = time.monotonic() + self.options.poll_seconds
        finally:
            self.cloud.end(child)

    def stayed(self) -> bool:
        """Whether the machines are still there some time after a failure: preemption shows late in the state."""
        deadline = time.monotonic() + self.options.settle_seconds
        while True:
            state = self.look()
            if state is not None and lost(state):
                self.say(f"that was the end of the machines: {state}")
                return False
            if time.monotonic() >= deadline:
                return True
            self.cloud.wait(min(self.options.poll_seconds, max(0.01, deadline - time.monotonic())))

    def run(self) -> int | None:
        """Sets the slice up where needed and runs the command; an exit code when that was the end."""
        for command in [] if self.prepared else self.cloud.setup_commands():
            code = self.follow(command)
            if code is None:
                return None
            if code == RUN_BUSY and command[1].endswith("health.sh"):
                continue  # a run is there; run.sh knows whether it is ours
            if code != 0:
                return self.count_setup(f"{Path(command[1]).name} ended with {code}", code)
        self.prepared = True
        code = self.follow(self.cloud.run_command())
        if code is None:
            self.program_failures = self.setup_failures = 0
            return None
        if code == 0:
            self.say("the command has finished")
            return FINISHED
        if code == RUN_UNREACHABLE:
            return self.count_setup("workers can't be reached, or lost the run", code)
        if code != RUN_FAILED:
            return self.give_up(f"run.sh ended with {code}")
        if not self.stayed():
            return None
        self.program_failures += 1
        self.setup_failures = 0
        limit = self.options.program_failures
        if self.program_failures >= limit:
            self.say(f"the command failed {limit} times in a row on machines that stayed: it is the command's fault")
            return PROGRAM_FAILED
        self.say(f"the command failed ({self.program_failures} of {limit} in a row), starting it again")
        return None

    def count_setup(self, what: str, code: int) -> int | None:
        """After a failure to set up or reach workers: again, then with a new slice, then not at all."""
        if code == USAGE:
            return self.give_up(what)
        if not self.stayed():
            return None
        self.setup_failures += 1
        self.prepared = False
        limit = self.options.setup_failures
        self.say(f"{what} ({self.setup_failures} of {limit} in a row)")
        if self.setup_failures >= limit:
            self.say("replacing the slice")
            self.delete()
        else:
            self.cloud.wait(self.options.poll_seconds)
        return None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser(
        prog="babysit.py",
        description="Keeps a command running on a TPU slice, through preemptions.",
        usage="babysit.py NAME --type TYPE [options] -- COMMAND [ARGUMENT...]",
        epilog="Exit code: 0 the command finished; 1 it failed by itself; 2 bad options; 3 gave up; 130 interrupted.",
        allow_abbrev=False,
    )
    add = parse.add_argument
    add("name", metavar="NAME")
    add("--type", required=True, help="accelerator type, for example v5litepod-16")
    add("--zone", default=os.environ.get("TPU_ZONE"), help="default: $TPU_ZONE")
    add("--project", default=os.environ.get("TPU_PROJECT"), help="default: $TPU_PROJECT, else gcloud's own")
    tier = parse.add_mutually_exclusive_group()
    tier.add_argument("--spot", action="store_true")
    tier.add_argument("--reserved", action="store_true")
    tier.add_argument("--on-demand", action="store_true", help="neither (default)")
    for name in ("runtime-version", "valid-until-duration", "network", "subnetwork", "service-account", "labels"):
        add(f"--{name}", help="as in create.sh")
    add("--internal-ips", action="store_true", help="as in create.sh")
    code = parse.add_mutually_exclusive_group()
    code.add_argument("--commit", help="run this commit (default: HEAD as it is now; the same after a preemption)")
    code.add_argument("--allow-dirty", action="store_true", help="with the changes to tracked files as they are now")
    shared = parse.add_mutually_exclusive_group()
    shared.add_argument("--bucket", help="mount this bucket, as in mount.sh")
    shared.add_argument("--nfs", help="mount this export, as in mount.sh")
    add("--health", action="store_true", help="check a new slice with health.sh first")
    add("--retries", type=int, default=20, help="how often a lost slice is requested again (default %(default)s)")
    add("--program-failures", type=int, default=3, help="in a row until the command is given up (default %(default)s)")
    add("--setup-failures", type=int, default=3, help="in a row until the slice is replaced (default %(default)s)")
    add("--create-attempts", type=int, default=3, help="in a row until requesting is given up (default %(default)s)")
    add("--unknown-limit", type=int, default=30, help="looks in a row at an unknown state (default %(default)s)")
    add("--poll-seconds", type=float, default=60.0, help="between two looks at the state (default %(default)s)")
    add("--settle-seconds", type=float, default=120.0, help="for a preemption to show (default %(default)s)")
    add("--run-poll-seconds", default="20", help="--poll-seconds of run.sh (default %(default)s)")
    add("--grace", default="60", help="as in run.sh (default %(default)s)")
    add("--delete-when-done", action="store_true", help="delete the slice when this program ends by itself")
    for name in ("hosts", "parallel", "ssh-timeout", "ssh-attempts", "ssh-delay", "ssh-key-file"):
        add(f"--{name}", help="as in run.sh")
    add("--internal-ip", action="store_true", help="as in run.sh")
    add("--iap", action="store_true", help="as in run.sh")
    add("--dry-run", action="store_true", help="print the commands of one undisturbed life instead of running them")
    return parse


def main() -> int:
    """Returns the exit code."""
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parse = parser()
    options, command = parse.parse_args(arguments[:split]), arguments[split + 1 :]
    if not command:
        parse.error("no command: it comes after --")
    if not options.zone:
        parse.error("no zone: give --zone, or set TPU_ZONE")
    for name in ("retries", "program_failures", "setup_failures", "create_attempts", "unknown_limit"):
        if getattr(options, name) < (name != "retries"):
            parse.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, expected a positive number")
    stop = threading.Event()
    cloud = Cloud(options, command, stop)

    # All names are checked by the scripts, before anything is requested.
    checked = subprocess.run([*cloud.create_command(), "--dry-run"], stdout=subprocess.DEVNULL)
    if checked.returncode:
        return USAGE
    resolve = ["--allow-dirty"] if options.allow_dirty else ["--commit", options.commit] if options.commit else []
    resolve += ["--dry-run"] if options.dry_run else []
    resolved = subprocess.run(
        ["bash", str(HERE / "sync.sh"), "--archive-only", *resolve], stdout=subprocess.PIPE, text=True
    )
    if resolved.returncode:
        return USAGE
    options.commit = resolved.stdout.split()[-1]
    if options.dry_run:
        life = [cloud.create_command(), *cloud.setup_commands(), cloud.run_command()]
        if options.delete_when_done:
            life.append(cloud.script("delete.sh"))
        for line in life:
            print("# " + shlex.join(line).replace("\n", "\n# "), flush=True)
            cut = line.index("--") if "--" in line else len(line)
            if code := subprocess.run([*line[:cut], "--dry-run", *line[cut:]]).returncode:
                return code
        return FINISHED

    def say(text: str) -> None:
        print(time.strftime("[babysit %H:%M:%S] ") + text, flush=True)

    def on_signal(number: int, _: object) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)  # the third one ends at once
        else:
            say("interrupted: finishing what must not be cut short")
        stop.set()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    sitter = Babysitter(options=options, cloud=cloud, say=say)
    try:
        code = sitter.watch()
    except Interrupted:
        say(f"stopped watching; '{options.name}' stays as it is (last seen {sitter.last}), and so does a run on it")
        say("to go on: the same command again; to end the run: " + shlex.join(cloud.script("kill.sh")))
        say("to stop paying: " + shlex.join(cloud.script("delete.sh")))
        return INTERRUPTED
    if options.delete_when_done:
        try:
            cloud.finish(cloud.script("delete.sh"))
        except CloudError as error:
            say(f"NOT deleted, it goes on costing: {error}")
            return code or GAVE_UP
    elif sitter.last is not None and sitter.last.queued != "ABSENT":
        say(f"'{options.name}' still exists; to stop paying: " + shlex.join(cloud.script("delete.sh")))
    return code


if __name__ == "__main__":
    sys.exit(main())
