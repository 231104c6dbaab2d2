"""A repository of its own with the real scripts, and a fake gcloud whose workers are folders on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ZONE = "us-central2-b"

GCLOUD = f'#!/bin/sh\nexec {sys.executable} -S -E "{HERE / "fake_gcloud.py"}" "$@"\n'
# What `curl` brings from astral.sh: an installer that installs this uv.
CURL = """#!/bin/bash
echo "$*" >>"$HOME/curl-calls"
cat <<'INSTALLER'
mkdir -p "$UV_UNMANAGED_INSTALL"
cp "$(dirname "$(command -v curl)")/uv" "$UV_UNMANAGED_INSTALL/uv"
INSTALLER
"""
UV = f"""#!/bin/bash
echo "$*" >>"$HOME/uv-calls"
case $1 in
  --version) echo "uv 0.13.9 (fake)" ;;
  venv)
    mkdir -p "${{@: -1}}/bin"
    cat >"${{@: -1}}/bin/python" <<'PYTHON'
#!/bin/bash
case $1 in
  --version) echo "Python 3.12.12" ;;
  */check_install.py) echo "packages: pretended" ;;
  *) exec {sys.executable} "$@" ;;
esac
PYTHON
    chmod +x "${{@: -1}}/bin/python"
    ;;
  pip) [[ ! -e $HOME/uv-fails ]] || {{ echo "no solution found" >&2; exit 1; }} ;;
esac
"""


def git(repo: Path, *arguments: str) -> str:
    """Runs git as somebody, whatever this machine's configuration says."""
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *arguments], cwd=repo, check=True, capture_output=True, text=True).stdout


class World:
    """The repository, the cloud, and how to run a script in them."""

    def __init__(self, root: Path) -> None:
        self.repo = root / "repo"
        self.cloud = root / "cloud"
        self.tools = root / "tools"
        self.environment = {
            "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
            "HOME": str(root),
            "LANG": "C.UTF-8",
            "TPU_ZONE": ZONE,
            "FAKE_CLOUD": str(self.cloud),
            "FAKE_TOOLS": str(self.tools),
        }

    def build(self) -> None:
        """Makes the folders."""
        (self.repo / "jaxtool" / "parallel").mkdir(parents=True)
        shutil.copytree(ROOT / "tpu_setup", self.repo / "tpu_setup", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "jaxtool/parallel/topologies.py", self.repo / "jaxtool/parallel")
        (self.repo / ".gitignore").write_text("/runs/\n__pycache__/\n")
        git(self.repo, "init", "-q", "-b", "main")
        git(self.repo, "add", ".")
        git(self.repo, "commit", "-q", "-m", "first")
        binaries = self.repo.parent / "bin"
        for folder in (self.cloud / "resources", self.cloud / "workers", self.tools, binaries):
            folder.mkdir(parents=True)
        for path, text in (
            (binaries / "gcloud", GCLOUD),
            (self.tools / "curl", CURL),
            (self.tools / "uv", UV),
            (self.tools / "sudo", '#!/bin/sh\nshift\nexec "$@"\n'),  # sudo -n COMMAND
        ):
            path.write_text(text)
            path.chmod(0o755)
        self.plan()

    def plan(self, **plan: Any) -> None:
        """What shall happen; see `fake_gcloud.py`."""
        (self.cloud / "plan.json").write_text(json.dumps(plan))

    def command(self, script: str, *arguments: str) -> list[str]:
        interpreter = [sys.executable, "-S"] if script.endswith(".py") else ["bash"]
        return [*interpreter, str(self.repo / "tpu_setup" / script), *arguments]

    def run(self, script: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(script, *arguments),
            cwd=self.repo,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        """Starts a script in a session of its own, as a terminal would."""
        return subprocess.Popen(
            # What runs in the background of a script ignores interrupts, and so would all that it starts.
            ["env", "--default-signal=INT", *self.command(script, *arguments)],
            cwd=self.repo,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def calls(self, command: str) -> list[dict[str, Any]]:
        """What gcloud was asked, of one command."""
        path = self.cloud / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [call for call in map(json.loads, lines) if call["command"] == command]

    def resources(self) -> list[str]:
        return [path.stem for path in sorted((self.cloud / "resources").iterdir())]

    def home(self, worker: int, name: str = "pod") -> Path:
        return self.cloud / "workers" / f"{name}-{worker}"

    def logs(self, run_id: str, name: str = "pod") -> Path:
        return self.repo / "runs/tpu" / name / run_id

    def pids(self) -> list[int]:
        """The leaders of all runs on all workers that are alive."""
        found = []
        for path in (self.cloud / "workers").glob("*/jaxtool-tpu/runs/*/pid"):
            pid = int(path.read_text().split()[0])
            alive = subprocess.run(["pgrep", "-g", str(pid), "-r", "D,R,S,T,t"], stdout=subprocess.DEVNULL)
            if alive.returncode == 0:
                found.append(pid)
        return found

    def close(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def wait_until(true: Callable[[], object], seconds: float = 120) -> None:
    """Returns when `true` is; fails after some time."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def read_until(child: subprocess.Popen[str], *wanted: str) -> str:
    """What a started script says until all of these have appeared in lines; fails when it ends before."""
    assert child.stdout is not None
    missing, said = set(wanted), ""
    while missing:
        line = child.stdout.readline()
        assert line, f"ended without {missing}:\n{said}"
        said += line
        missing = {text for text in missing if text not in line}
    return said


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A world in which nothing exists yet."""
    world = World(tmp_path)
    world.build()
    yield world
    world.close()


@pytest.fixture(scope="session")
def finished_pod(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pod` copies."""
    root = tmp_path_factory.mktemp("pod")
    world = World(root)
    world.build()
    world.plan(hosts=4)
    for script, *options in (("create.sh", "--type", "v4-32"), ("sync.sh",), ("install.sh",)):
        done = world.run(script, "pod", *options)
        assert done.returncode == 0, done.stderr
    (world.cloud / "calls.jsonl").unlink()
    (world.cloud / "counts.json").unlink()
    return root


@pytest.fixture
def pod(finished_pod: Path, tmp_path: Path) -> Iterator[World]:
    """A world with an ACTIVE slice "pod" of four workers that has code and packages."""
    shutil.copytree(finished_pod, tmp_path, symlinks=True, dirs_exist_ok=True)
    world = World(tmp_path)
    yield world
    world.close()
