"""`--dry-run`: the commands as `dry_runs.txt` has them, fit for a shell, with flags that gcloud knows, and no deed."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.tpu_setup.conftest import ROOT, World, git

GOLDEN = Path(__file__).with_name("dry_runs.txt")
SDK = Path("/usr/lib/google-cloud-sdk/data/cli/gcloud_completions.py")


def sections() -> dict[str, str]:
    """Command line -> expected output."""
    found = {}
    for section in re.split(r"^\$ ", GOLDEN.read_text(), flags=re.MULTILINE)[1:]:
        command, _, output = section.partition("\n")
        found[command] = output
    return found


def dry_run(world: World, line: str) -> str:
    """What the script prints, with the commit, the time and the repository's folder by name."""
    script, *arguments = shlex.split(line)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    done = world.run(script, *arguments[:cut], "--dry-run", *arguments[cut:])
    assert done.returncode == 0, done.stderr
    commit = git(world.repo, "rev-parse", "HEAD").strip()
    output = done.stdout.replace(commit, "COMMIT").replace(str(world.repo), "REPO")
    return re.sub(r"\b\d{8}-\d{6}\b", "TIME", output)


def commands(output: str) -> list[list[str]]:
    return [shlex.split(line) for line in output.splitlines() if not line.startswith("#")]


def test_outputs_and_no_deed(world: World) -> None:
    for line, expected in sections().items():
        assert dry_run(world, line) == expected, line
    assert not (world.cloud / "calls.jsonl").exists()
    assert world.resources() == []
    assert "nothing to commit" in git(world.repo, "status")
    assert not (world.repo / "runs").exists()


def test_a_dry_run_needs_no_gcloud(world: World) -> None:
    world.environment["PATH"] = "/usr/bin:/bin"
    (world.tools.parent / "bin" / "gcloud").unlink()
    assert "queued-resources create pod" in dry_run(world, "create.sh pod --type v4-8")


def test_printed_commands_run_as_they_are(world: World) -> None:
    world.plan(hosts=2)
    for line in (
        "create.sh pod --type v4-16 --spot",
        "sync.sh pod --hosts 2",
        "install.sh pod --hosts 2",
        "run.sh pod --run-id r1 --hosts 2 --detach -- bash -c 'echo \"it'\\''s $JAXTOOL_WORKER\" >\"a file\"'",
    ):
        script, *arguments = shlex.split(line)
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        printed = world.run(script, *arguments[:cut], "--dry-run", *arguments[cut:]).stdout
        # The look before a creation ends with an error where there is nothing, as it should.
        done = subprocess.run(
            ["bash", "-c", printed], cwd=world.repo, env=world.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        done = world.run("logs.sh", "pod", "--worker", str(worker))
        assert done.returncode == 0, done.stderr
        file = world.home(worker) / "jaxtool-tpu/code/a file"
        assert file.read_text() == f"it's {worker}\n"


@pytest.mark.skipif(not SDK.exists(), reason="compares with an installed Google Cloud SDK")
def test_flags_are_those_of_the_real_gcloud() -> None:
    tree = ast.literal_eval(SDK.read_text().partition("STATIC_COMPLETION_CLI_TREE = ")[2])

    def node(*path: str) -> dict[str, dict[str, object]]:
        here: object = tree
        for name in path:
            assert isinstance(here, dict)
            here = here["commands"][name]
        assert isinstance(here, dict)
        return here

    seen = set()
    everywhere = set(node()["flags"])
    for output in sections().values():
        for words in commands(output):
            if words[0] != "gcloud":
                continue
            path = [word for word in words[1:] if not word.startswith("--")]
            path = path[: 5 if path[0] == "alpha" else 4]
            flags = {word.split("=")[0] for word in words if word.startswith("--")}
            assert flags <= set(node(*path)["flags"]) | everywhere, words
            seen.add(" ".join(path[-2:]))
    assert seen == {
        "queued-resources create",
        "queued-resources delete",
        "queued-resources describe",
        "queued-resources list",
        "tpu-vm describe",
        "tpu-vm ssh",
        "tpu-vm scp",
    }


def documented() -> list[str]:
    """The command lines of docs/tpu.md that call scripts of this folder."""
    text = (ROOT / "docs/tpu.md").read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("tpu_setup/")]


def test_documented_commands_are_accepted(world: World) -> None:
    assert len(documented()) > 10
    for line in documented():
        line = line.removeprefix("tpu_setup/")
        if line.startswith("health.sh"):
            line += " --type v5litepod-16"  # it would ask
        assert "gcloud compute tpus" in dry_run(world, line), line
