"""babysit's state machine and its counting, over scripted sequences; no processes."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from tests.tpu_setup.conftest import ROOT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("babysit", ROOT / "tpu_setup/babysit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["babysit"] = module
    spec.loader.exec_module(module)
    return module


babysit = load()
Action, State = babysit.Action, babysit.State

# Every state that Google documents, for the queued resource and, where that is ACTIVE, for the node.
EXPECTED = {
    "ABSENT": Action.CREATE,
    "CREATING": Action.WAIT,
    "ACCEPTED": Action.WAIT,
    "WAITING_FOR_RESOURCES": Action.WAIT,
    "PROVISIONING": Action.WAIT,
    "FAILED": Action.DELETE,
    "DELETING": Action.WAIT,
    "SUSPENDING": Action.WAIT,
    "SUSPENDED": Action.DELETE,
    "STATE_UNSPECIFIED": Action.PUZZLE,
    "FROBBING": Action.PUZZLE,
    "ACTIVE/READY": Action.RUN,
    "ACTIVE/CREATING": Action.WAIT,
    "ACTIVE/STARTING": Action.WAIT,
    "ACTIVE/RESTARTING": Action.WAIT,
    "ACTIVE/REIMAGING": Action.WAIT,
    "ACTIVE/REPAIRING": Action.WAIT,
    "ACTIVE/STOPPING": Action.WAIT,
    "ACTIVE/DELETING": Action.WAIT,
    "ACTIVE/STOPPED": Action.DELETE,
    "ACTIVE/PREEMPTED": Action.DELETE,
    "ACTIVE/TERMINATED": Action.DELETE,
    "ACTIVE/ABSENT": Action.DELETE,
    "ACTIVE/HIDDEN": Action.PUZZLE,
}


def state(text: str) -> Any:
    queued, _, node = text.partition("/")
    return State(queued=queued, node=node or "-")


@pytest.mark.parametrize("text", EXPECTED)
def test_every_state_has_its_action(text: str) -> None:
    assert babysit.next_action(state(text)) is EXPECTED[text]


def test_what_counts_as_lost_while_a_program_runs() -> None:
    kept = {"ACTIVE/READY", "ACTIVE/REPAIRING", "ACTIVE/HIDDEN", "ACTIVE/CREATING", "ACTIVE/STARTING"}
    kept |= {"ACTIVE/RESTARTING", "ACTIVE/REIMAGING", "STATE_UNSPECIFIED", "FROBBING"}
    assert {text for text in EXPECTED if not babysit.lost(state(text))} == kept


class Script(babysit.Cloud):  # type: ignore[misc,name-defined]
    """A cloud that follows a script: states in order, and what each started script ends with."""

    def __init__(self, options: argparse.Namespace, states: list[str], ends: dict[str, list[int]]) -> None:
        super().__init__(options, ["train"], threading.Event())
        self.states = iter(states)
        self.ends = ends
        self.done: list[str] = []
        self.slept = 0.0
        self.create_errors: list[str] = []

    def observe(self) -> Any:
        text = next(self.states)
        if text.startswith("!"):
            raise babysit.CloudError(text)
        return state(text)

    def finish(self, command: list[str]) -> None:
        name = command[1].rpartition("/")[2]
        if name == "create.sh" and self.create_errors and (error := self.create_errors.pop(0)):
            self.done.append("create failed")
            raise babysit.CloudError(error, babysit._status(error))
        self.done.append(name)

    def wait(self, seconds: float) -> None:
        self.slept += seconds


class Sitter(babysit.Babysitter):  # type: ignore[misc,name-defined]
    """Takes the ends from the script instead of starting something; None: the machines went."""

    def follow(self, command: list[str]) -> int | None:
        name = command[1].rpartition("/")[2]
        ends = self.cloud.ends.get(name, [])
        code = ends.pop(0) if ends else 0
        self.cloud.done.append(f"{name} {'lost' if code is None else code}")
        return code

    def stayed(self) -> bool:
        found = self.look()
        return found is not None and not babysit.lost(found)


def options(**changes: Any) -> argparse.Namespace:
    parsed = babysit.parser().parse_args(["pod", "--type", "v4-8", "--zone", "us-central2-b"])
    parsed.commit = "abc"
    for name, value in changes.items():
        setattr(parsed, name, value)
    return parsed


def live(states: list[str], ends: dict[str, list[Any]] | None = None, **changes: Any) -> tuple[int, Script, list[str]]:
    cloud = Script(options(**changes), states, ends or {})
    cloud.create_errors = changes.get("create_errors", [])
    said: list[str] = []
    code = Sitter(options=cloud.options, cloud=cloud, say=said.append).watch()
    assert next(cloud.states, None) is None, "not all states were looked at"
    return code, cloud, said


SET_UP = ["sync.sh 0", "install.sh 0"]
READY = "ACTIVE/READY"


def test_an_undisturbed_life() -> None:
    code, cloud, _ = live(["ABSENT", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE/CREATING", READY])
    assert code == 0 and cloud.done == ["create.sh", *SET_UP, "run.sh 0"]


def test_what_runs_already_is_taken_over() -> None:
    assert live([READY])[1].done == [*SET_UP, "run.sh 0"]


def test_two_preemptions() -> None:
    one = ["SUSPENDING", "SUSPENDED", "ABSENT", "CREATING", READY]
    code, cloud, _ = live(["ABSENT", READY, *one, *one], {"run.sh": [None, None, 0]})
    again = ["delete.sh", "create.sh", *SET_UP]
    assert code == 0
    assert cloud.done == ["create.sh", *SET_UP, "run.sh lost", *again, "run.sh lost", *again, "run.sh 0"]


def test_a_preemption_during_the_set_up() -> None:
    code, cloud, _ = live(
        ["ABSENT", READY, "ACTIVE/PREEMPTED", "ABSENT", READY], {"install.sh": [None, 0], "run.sh": [0]}
    )
    assert code == 0
    assert cloud.done == ["create.sh", "sync.sh 0", "install.sh lost", "delete.sh", "create.sh", *SET_UP, "run.sh 0"]


def test_a_failure_that_was_a_preemption_is_not_counted() -> None:
    lives = ["ABSENT", READY, "SUSPENDING", "SUSPENDED"]  # the look after the failure shows it
    code, cloud, _ = live([*lives * 4, "ABSENT", READY], {"run.sh": [1, 1, 1, 1, 0]}, program_failures=2)
    assert code == 0 and cloud.done.count("create.sh") == 5


def test_a_program_that_fails_by_itself_is_given_up() -> None:
    code, cloud, said = live(["ABSENT", *[READY] * 6], {"run.sh": [1, 1, 1]})
    assert code == 1
    assert cloud.done == ["create.sh", *SET_UP, "run.sh 1", "run.sh 1", "run.sh 1"]  # set up once
    assert "the command's fault" in said[-1]


def test_a_preemption_between_failures_begins_the_count_anew() -> None:
    states = ["ABSENT", *[READY] * 5, "SUSPENDED", "ABSENT", *[READY] * 5]
    code, cloud, _ = live(states, {"run.sh": [1, 1, None, 1, 1, 0]})
    assert code == 0 and cloud.done.count("delete.sh") == 1


def test_retries_are_bounded() -> None:
    life = ["ABSENT", READY, "SUSPENDED"]
    code, cloud, said = live([*life * 3, "ABSENT"], {"run.sh": [None] * 3}, retries=2)
    assert code == 3 and cloud.done.count("create.sh") == 3 and cloud.done.count("delete.sh") == 3
    assert "lost 3 times" in said[-1]


def test_a_failed_request_is_made_again() -> None:
    code, cloud, _ = live(["ABSENT", "WAITING_FOR_RESOURCES", "FAILED", "ABSENT", READY])
    assert code == 0 and cloud.done[:3] == ["create.sh", "delete.sh", "create.sh"]


def test_unknown_states_are_said_and_bounded() -> None:
    code, cloud, said = live(["ABSENT", "FROBBING", "FROBBING", READY], unknown_limit=3)
    assert code == 0 and cloud.done == ["create.sh", *SET_UP, "run.sh 0"]
    assert sum("don't know the state 'FROBBING'" in line for line in said) == 2
    code, cloud, said = live(["ABSENT", *["ACTIVE/HIDDEN"] * 3], unknown_limit=3)
    assert code == 3 and "stayed 'ACTIVE, node HIDDEN'" in said[-1]
    assert cloud.done == ["create.sh"]  # nothing is deleted on suspicion


def test_outages_of_gcloud_are_waited_for_and_bounded() -> None:
    code, cloud, _ = live(["ABSENT", "!UNAVAILABLE", "!UNAVAILABLE", READY], unknown_limit=3)
    assert code == 0 and cloud.done == ["create.sh", *SET_UP, "run.sh 0"]
    code, _, said = live(["!UNAVAILABLE"] * 3, unknown_limit=3)
    assert code == 3 and "can't say" in said[-1]


def test_quota_and_hopeless_errors() -> None:
    quota = "RESOURCE_EXHAUSTED: Quota limit 'TPUV4' has been exceeded"
    code, cloud, said = live(["ABSENT"] * 3, create_errors=[quota] * 3)
    assert code == 3 and cloud.done == ["create failed"] * 3 and "quota is used up" in said[-1]
    assert cloud.slept >= 60 * 2 + 60 * 4
    code, cloud, _ = live(["ABSENT", "ABSENT", READY], create_errors=[quota, ""])
    assert code == 0 and cloud.done[:2] == ["create failed", "create.sh"]
    code, cloud, said = live(["ABSENT"], create_errors=["PERMISSION_DENIED: no"])
    assert code == 3 and cloud.done == ["create failed"] and "PERMISSION_DENIED" in said[-1]


def test_workers_that_can_not_be_set_up_are_replaced() -> None:
    code, cloud, said = live(["ABSENT", *[READY] * 4, "ABSENT", READY], {"install.sh": [1, 3, 0]}, setup_failures=2)
    assert code == 0 and "replacing the slice" in " ".join(said)
    assert cloud.done == [
        *("create.sh", "sync.sh 0", "install.sh 1", "sync.sh 0", "install.sh 3"),
        *("delete.sh", "create.sh", *SET_UP, "run.sh 0"),
    ]


def test_unreachable_workers_are_set_up_again() -> None:
    code, cloud, _ = live(["ABSENT", READY, READY, READY], {"run.sh": [3, 0]})
    assert code == 0 and cloud.done == ["create.sh", *SET_UP, "run.sh 3", *SET_UP, "run.sh 0"]


def test_another_run_is_not_disturbed() -> None:
    code, cloud, said = live([READY], {"run.sh": [4]})
    assert code == 3 and cloud.done == [*SET_UP, "run.sh 4"] and "run.sh ended with 4" in said[-1]


def test_a_health_check_before_a_run_but_not_beside_one() -> None:
    code, cloud, _ = live(["ABSENT", READY], health=True)
    assert code == 0 and cloud.done == ["create.sh", *SET_UP, "health.sh 0", "run.sh 0"]
    code, cloud, _ = live([READY], {"health.sh": [4]}, health=True)
    assert code == 0 and cloud.done == [*SET_UP, "health.sh 4", "run.sh 0"]
    code, cloud, _ = live([READY, READY, "ABSENT", READY], {"health.sh": [1, 0]}, health=True, setup_failures=1)
    assert code == 0
    assert cloud.done == [*SET_UP, "health.sh 1", "delete.sh", "create.sh", *SET_UP, "health.sh 0", "run.sh 0"]
