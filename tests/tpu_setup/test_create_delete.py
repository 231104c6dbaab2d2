"""Requests for slices against the fake gcloud: what exists is left alone, what is absent is no error."""

from __future__ import annotations

import signal

from tests.tpu_setup.conftest import World, read_until

CREATE = ("create.sh", "pod", "--type", "v4-16", "--spot")


def test_create_twice_and_delete_twice(world: World) -> None:
    world.plan(lives=[["WAITING_FOR_RESOURCES", "ACTIVE"]])
    done = world.run(*CREATE)
    assert done.returncode == 0 and "requested v4-16" in done.stdout, done.stderr
    assert world.resources() == ["pod"]
    done = world.run(*CREATE)
    assert done.returncode == 0 and "exists already" in done.stdout and "ACTIVE" in done.stdout
    (call,) = world.calls("queued-resources create")
    assert call["words"] == ["pod"]
    assert call["flags"]["--accelerator-type"] == "v4-16" and "--spot" in call["flags"]
    assert call["flags"]["--runtime-version"] == "tpu-ubuntu2204-base" and call["flags"]["--node-id"] == "pod"

    assert "pod" in world.run("list.sh").stdout
    done = world.run("delete.sh", "pod")
    assert done.returncode == 0 and "deleted" in done.stdout and world.resources() == []
    assert "--force" in world.calls("queued-resources delete")[0]["flags"]
    done = world.run("delete.sh", "pod")
    assert done.returncode == 0 and "there is none" in done.stdout
    assert len(world.calls("queued-resources delete")) == 1


def test_waiting_ends_when_it_is_active(world: World) -> None:
    world.plan(lives=[["CREATING", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "FROBBING", "ACTIVE"]])
    done = world.run(*CREATE, "--wait", "--poll-seconds", "0.1")
    assert done.returncode == 0, done.stderr
    states = [line.split()[1] for line in done.stdout.splitlines()[1:]]
    assert states == ["CREATING", "WAITING_FOR_RESOURCES", "FROBBING", "ACTIVE"]  # each change said, also unknown ones


def test_a_request_that_fails_while_waiting(world: World) -> None:
    world.plan(lives=[["PROVISIONING", "FAILED"]])
    done = world.run(*CREATE, "--wait", "--poll-seconds", "0.1")
    assert done.returncode == 1
    assert "is FAILED: delete.sh it" in done.stderr and "state: FAILED" in done.stderr
    done = world.run(*CREATE)
    assert done.returncode == 1 and "is FAILED" in done.stderr
    assert len(world.calls("queued-resources create")) == 1


def test_another_type_of_that_name_is_an_error(world: World) -> None:
    assert world.run(*CREATE).returncode == 0
    done = world.run("create.sh", "pod", "--type", "v4-8")
    assert done.returncode == 1 and "is a v4-16, not a v4-8" in done.stderr


def test_errors_of_gcloud_are_shown(world: World) -> None:
    world.plan(create_errors=["RESOURCE_EXHAUSTED: Quota limit 'TPUV4s' has been exceeded. Limit: 16 in zone z."])
    done = world.run(*CREATE)
    assert done.returncode == 1 and "Quota limit 'TPUV4s'" in done.stderr
    # An outage is not taken for "there is none".
    world.plan(describe_errors=99)
    for command in (CREATE, ("delete.sh", "pod")):
        done = world.run(*command)
        assert done.returncode == 1 and "UNAVAILABLE" in done.stderr
    assert len(world.calls("queued-resources create")) == 1


def test_an_interrupt_while_waiting_says_what_stays(world: World) -> None:
    world.plan(lives=[["WAITING_FOR_RESOURCES"]])
    child = world.start(*CREATE, "--wait", "--poll-seconds", "30")
    read_until(child, "requested", "WAITING_FOR_RESOURCES")
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 130 and "stays in the queue" in output
    assert world.resources() == ["pod"]
