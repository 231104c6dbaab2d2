"""Options of the scripts: help, mistakes, names that try to be commands, quoting."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tpu_setup.conftest import ROOT, World

# Script -> options of a call that works as a dry run.
SCRIPTS: dict[str, list[str]] = {
    "create.sh": ["pod", "--type", "v4-8"],
    "delete.sh": ["pod"],
    "list.sh": [],
    "sync.sh": ["pod", "--hosts", "2"],
    "install.sh": ["pod", "--hosts", "2"],
    "run.sh": ["pod", "--hosts", "2", "--", "true"],
    "logs.sh": ["pod"],
    "kill.sh": ["pod"],
    "mount.sh": ["pod", "--bucket", "bucket"],
    "health.sh": ["pod", "--type", "v4-8"],
    "babysit.py": ["pod", "--type", "v4-8", "--", "true"],
}


def with_option(options: list[str], *more: str) -> list[str]:
    cut = options.index("--") if "--" in options else len(options)
    return [*options[:cut], *more, *options[cut:]]


def test_all_scripts_are_listed() -> None:
    others = {"lib.sh", "env.sh", "worker.sh", "slurm.sh", "topology.py", "health.py", "check_install.py"}
    there = {path.name for path in (ROOT / "tpu_setup").iterdir() if path.suffix in (".sh", ".py")}
    assert there == SCRIPTS.keys() | others


def test_help_mistakes_and_dry_runs(world: World) -> None:
    for script, options in SCRIPTS.items():
        done = world.run(script, "--help")
        assert done.returncode == 0 and "--zone" in done.stdout and "--dry-run" in done.stdout, script
        assert done.stderr == ""
        done = world.run(script, *with_option(options, "--dry-run"))
        assert done.returncode == 0 and "gcloud" in done.stdout, (script, done.stderr)
        for wrong in ("--bogus", "--bogus=1", "-x"):
            done = world.run(script, *with_option(options, wrong))
            assert done.returncode == 2 and done.stdout == "", (script, wrong)
            assert wrong.partition("=")[0] in done.stderr and "Traceback" not in done.stderr
        done = world.run(script, *with_option(options, "--zone"))
        assert done.returncode == 2 and "--zone" in done.stderr, script
    assert not (world.cloud / "calls.jsonl").exists()


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != "list.sh"])
def test_names_are_checked(world: World, script: str, tmp_path: Path) -> None:
    trap = tmp_path / "trapped"
    options = SCRIPTS[script]
    names = [f"$(touch {trap})", f"a;touch {trap}", "Pod", "pod\nx", "-pod", "pod-", "p" * 64, "pod/x", ""]
    for name in names:
        done = world.run(script, *[name if word == "pod" else word for word in options])
        assert done.returncode == 2, (script, name)
    for flag, value in (
        ("--zone", f"us-central2-b;touch {trap}"),
        ("--zone", "us-central2"),
        ("--project", f"$(touch {trap})"),
    ):
        done = world.run(script, *with_option(options, flag, value))
        assert done.returncode == 2, (script, flag)
    assert not trap.exists() and not (world.cloud / "calls.jsonl").exists()


@pytest.mark.parametrize(
    "line",
    [
        "create.sh pod --type v4-8 --runtime-version 'a b'",
        "create.sh pod --type v4-8 --valid-until-duration 6",
        "create.sh pod --type v4-8 --labels 'a=$(id)'",
        "create.sh pod --type v4-8 --spot --reserved",
        "create.sh pod --type v5e-16",
        "create.sh pod --type tpu7x-8",
        "create.sh pod",
        "create.sh pod pod2 --type v4-8",
        "run.sh pod --run-id '../x' -- true",
        "run.sh pod --run-id 'a b' -- true",
        "run.sh pod --hosts 0 -- true",
        "run.sh pod --hosts 1x -- true",
        "run.sh pod --poll-seconds '1;id' -- true",
        "run.sh pod --grace 1.5 -- true",
        "run.sh pod --show 1,2 -- true",
        "run.sh pod",
        "run.sh pod --",
        "logs.sh pod --worker '0; id'",
        "logs.sh pod --lines -5",
        "kill.sh pod --run-id 'x y'",
        "kill.sh pod --grace 0",
        "mount.sh pod",
        "mount.sh pod --bucket gs://bucket",
        "mount.sh pod --bucket bucket --nfs host:/x",
        "mount.sh pod --nfs 'host:/x y'",
        "mount.sh pod --bucket bucket --folder '/mnt/a b'",
        "sync.sh pod --commit HEAD --allow-dirty",
        "health.sh pod --type v4-8 --time-limit x",
        "babysit.py pod --type v4-8",
        "babysit.py pod --type nonsense -- true",
        "babysit.py pod --type v4-8 --retries -1 -- true",
        "babysit.py pod --type v4-8 --commit nonsense -- true",
        "babysit.py pod --type v4-8 --spot --reserved -- true",
    ],
)
def test_wrong_values(world: World, line: str) -> None:
    done = world.run(*shlex.split(line))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr and "Traceback" not in done.stderr
    assert not (world.cloud / "calls.jsonl").exists()


def test_unknown_types_name_the_near_ones(world: World) -> None:
    assert "near ones: v5litepod-16" in world.run("create.sh", "pod", "--type", "v5e-16").stderr


def test_without_gcloud_it_says_how_to_get_it(world: World) -> None:
    (world.tools.parent / "bin" / "gcloud").unlink()
    world.environment["PATH"] = "/bin:/nowhere"
    (world.tools.parent / "python").mkdir()
    for name in ("bash", "python3", "git", "dirname", "basename", "mktemp", "sed", "date", "rm"):
        for folder in ("/usr/bin", "/bin"):
            if Path(folder, name).exists():
                (world.tools.parent / "python" / name).symlink_to(Path(folder, name))
                break
    world.environment["PATH"] = str(world.tools.parent / "python")
    for script in ("create.sh", "list.sh", "run.sh"):
        done = world.run(script, *SCRIPTS[script])
        assert done.returncode == 1, script
        assert "gcloud is not installed" in done.stderr and "cloud.google.com/sdk" in done.stderr


def test_a_zone_is_needed(world: World) -> None:
    del world.environment["TPU_ZONE"]
    for script, options in SCRIPTS.items():
        done = world.run(script, *options)
        assert done.returncode == 2 and "TPU_ZONE" in done.stderr, script


@settings(max_examples=30)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=4))
def test_quoting_survives_shells(words: list[str]) -> None:
    """What `quote` prints is read back as the same words by bash and by Python's shlex."""
    program = f'set -- "$@"; source {shlex.quote(str(ROOT / "tpu_setup/lib.sh"))}; quote "$@"'
    done = subprocess.run(["bash", "-c", program, "t", *words], capture_output=True, check=True, text=False)
    line = done.stdout.decode()
    assert shlex.split(line) == words
    read = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    assert read.stdout.decode().split("\0")[:-1] == (words or [""])
