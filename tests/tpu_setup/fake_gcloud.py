"""Stands in for gcloud: keeps queued resources as files and runs `ssh` commands on this machine.

The folder $FAKE_CLOUD holds `plan.json` (what shall happen), `resources/` (what exists), `workers/` (the workers' home
folders) and `calls.jsonl` (what was asked). Refuses what the real gcloud 528 refuses: unknown commands and flags.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

CLOUD = Path(os.environ["FAKE_CLOUD"])

EVERYWHERE = {"--zone", "--project", "--quiet"}
SSH = {"--worker", "--ssh-key-file", "--internal-ip"}
# Of the flags that the real commands take, those that the scripts may use.
FLAGS = {
    "queued-resources create": EVERYWHERE
    | {"--node-id", "--accelerator-type", "--runtime-version", "--spot", "--reserved", "--valid-until-duration"}
    | {"--network", "--subnetwork", "--service-account", "--labels", "--internal-ips", "--async"},
    "queued-resources describe": EVERYWHERE | {"--format"},
    "queued-resources delete": EVERYWHERE | {"--force"},
    "queued-resources list": EVERYWHERE,
    "tpu-vm describe": EVERYWHERE | {"--format"},
    "tpu-vm ssh": EVERYWHERE | SSH | {"--command"},
    "tpu-vm scp": EVERYWHERE | SSH,
}
ALPHA = {"--tunnel-through-iap"}


def fail(message: str, code: int = 1) -> None:
    print(f"ERROR: (gcloud.compute.tpus) {message}", file=sys.stderr)
    sys.exit(code)


class Cloud:
    """Reads and writes the state; used under a lock."""

    def __init__(self) -> None:
        self.plan = json.loads((CLOUD / "plan.json").read_text())
        self.counts_path = CLOUD / "counts.json"
        self.counts = json.loads(self.counts_path.read_text()) if self.counts_path.exists() else {}

    def count(self, what: str) -> int:
        """How often this has been called before."""
        before = int(self.counts.get(what, 0))
        self.counts[what] = before + 1
        self.counts_path.write_text(json.dumps(self.counts))
        return before

    def path(self, name: str) -> Path:
        return CLOUD / "resources" / f"{name}.json"

    def resource(self, name: str) -> dict[str, object]:
        if not self.path(name).exists():
            fail(f"NOT_FOUND: Resource 'projects/p/locations/z/queuedResources/{name}' was not found.")
        resource: dict[str, object] = json.loads(self.path(name).read_text())
        return resource

    def save(self, name: str, resource: dict[str, object]) -> None:
        self.path(name).write_text(json.dumps(resource))

    def machines_end(self, name: str) -> None:
        """Preemption or deletion: no process and no disk survives."""
        for home in (CLOUD / "workers").glob(f"{name}-*"):
            for pid in home.glob("jaxtool-tpu/runs/*/pid"):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(pid.read_text().split()[0]), signal.SIGKILL)
            shutil.rmtree(home, ignore_errors=True)


def create(cloud: Cloud, name: str, flags: dict[str, str]) -> None:
    errors = cloud.plan.get("create_errors", [])
    attempt = cloud.count("create attempts")
    if attempt < len(errors) and errors[attempt]:
        fail(errors[attempt])
    if cloud.path(name).exists():
        fail(f"ALREADY_EXISTS: {name}")
    lives = cloud.plan.get("lives", [["ACTIVE"]])
    life = lives[min(cloud.count("create"), len(lives) - 1)]
    cloud.save(name, {"states": life, "type": flags["--accelerator-type"], "spot": "--spot" in flags, "at": -1})


def describe(cloud: Cloud, name: str, flags: dict[str, str]) -> None:
    """Each look shows the next state of the life, the last one for ever.

    "STATE/NODE" gives the node's state too; "STATE@FILE" stays until FILE exists in the cloud's folder.
    """
    if cloud.count("describe") < cloud.plan.get("describe_errors", 0):
        fail("UNAVAILABLE: the service is currently unavailable.")
    resource = cloud.resource(name)
    states, at = resource["states"], int(str(resource["at"]))
    assert isinstance(states, list)
    held = at >= 0 and "@" in states[at] and not (CLOUD / states[at].partition("@")[2]).exists()
    if not held:
        resource["at"] = at = min(at + 1, len(states) - 1)
        cloud.save(name, resource)
    state = states[at].partition("@")[0].partition("/")[0]
    if state in ("SUSPENDED", "FAILED"):
        cloud.machines_end(name)
    form = flags["--format"]
    if form == "value(state.state)":
        print(state)
    elif form == "value(state.state,tpu.nodeSpec[0].node.acceleratorType.basename())":
        print(f"{state}\t{resource['type']}")
    elif form == "yaml(state)":
        print(f"state:\n  state: {state}")
    else:
        fail(f"this format is not known to the fake: {form}", 2)


def describe_node(cloud: Cloud, name: str, flags: dict[str, str]) -> None:
    """The node as the last look at the queued resource implies."""
    resource = cloud.resource(name)
    states, at = resource["states"], int(str(resource["at"]))
    assert isinstance(states, list)
    queued, _, node = states[max(0, at)].partition("@")[0].partition("/")
    state = node or ("READY" if queued == "ACTIVE" else "CREATING")
    if state == "ABSENT":
        fail(f"NOT_FOUND: Resource 'projects/p/locations/z/nodes/{name}' was not found.")
    form = flags["--format"]
    if form == "value(state,networkEndpoints.len())":
        print(f"{state}\t{cloud.plan.get('hosts', 1)}")
    elif form == "value(state)":
        print(state)
    else:
        fail(f"this format is not known to the fake: {form}", 2)


def home_of(name: str, worker: str) -> Path:
    home = CLOUD / "workers" / f"{name}-{worker}"
    home.mkdir(parents=True, exist_ok=True)
    return home


def trouble(cloud: Cloud, worker: str) -> str:
    """What the plan has for this ssh or scp call: "", "fail" or "hang"."""
    plan = cloud.plan.get("ssh", {}).get(worker, {})
    number = cloud.count(f"ssh {worker}")
    for kind in ("fail", "hang"):
        first, last = plan.get(kind, (0, 0))
        if first <= number < last:
            return kind
    return ""


def ssh(name: str, flags: dict[str, str], kind: str) -> None:
    if kind == "hang":
        time.sleep(600)
    if kind == "fail":
        fail("[/usr/bin/ssh] exited with return code [255].", 255)
    home = home_of(name, flags["--worker"])
    os.chdir(home)
    tools = os.environ["FAKE_TOOLS"]
    environment = {"HOME": str(home), "PATH": f"{tools}:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    environment["JAXTOOL_LIBTPU_LOCKFILE"] = str(home / "libtpu_lockfile")
    environment["TPU_SKIP_MDS_QUERY"] = "1"
    os.execvpe("bash", ["bash", "-c", flags["--command"]], environment)


def scp(words: list[str], flags: dict[str, str], kind: str) -> None:
    if kind == "hang":
        time.sleep(600)
    if kind == "fail":
        fail("[/usr/bin/scp] exited with return code [1].")
    source, target = words
    name, _, path = target.partition(":")
    shutil.copyfile(source, home_of(name, flags["--worker"]) / path)


def main() -> None:
    words, flags = [], {}
    arguments = sys.argv[1:]
    alpha = arguments[:1] == ["alpha"]
    if alpha:
        arguments = arguments[1:]
    for argument in arguments:
        if argument.startswith("--"):
            name, _, value = argument.partition("=")
            flags[name] = value
        else:
            words.append(argument)
    command = " ".join(words[2:4])
    if words[:2] != ["compute", "tpus"] or command not in FLAGS:
        fail(f"Invalid choice: {' '.join(words[:4])!r}", 2)
    if unknown := flags.keys() - FLAGS[command] - (ALPHA if alpha else set()):
        fail(f"unrecognized arguments: {' '.join(sorted(unknown))}", 2)
    words = words[4:]
    with (CLOUD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cloud = Cloud()
        with (CLOUD / "calls.jsonl").open("a") as calls:
            calls.write(json.dumps({"command": command, "words": words, "flags": flags}) + "\n")
        kind = trouble(cloud, flags["--worker"]) if command in ("tpu-vm ssh", "tpu-vm scp") else ""
        if command == "queued-resources create":
            create(cloud, words[0], flags)
        elif command == "queued-resources describe":
            describe(cloud, words[0], flags)
        elif command == "queued-resources delete":
            cloud.resource(words[0])
            cloud.machines_end(words[0])
            cloud.path(words[0]).unlink()
        elif command == "queued-resources list":
            for path in sorted((CLOUD / "resources").glob("*.json")):
                print(path.stem)
        elif command == "tpu-vm describe":
            describe_node(cloud, words[0], flags)
    if command == "tpu-vm ssh":
        ssh(words[0], flags, kind)
    elif command == "tpu-vm scp":
        scp(words, flags, kind)


main()
