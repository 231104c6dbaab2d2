"""Runs that are killed at any moment, again and again: they end with the weights of the run that nobody touched."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from jaxtool.training.checkpoints import CheckpointFolder

ROOT = Path(__file__).parents[2]
STEPS, KILLS = 40, 10

# A server that has imported everything and starts each attempt as a child: what takes long is done once.
SERVER = """
import os, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jaxtool.training.checkpoints import CheckpointFolder

def attempt(folder, log, last):
    jax.config.update("jax_disable_most_optimizations", True)
    checkpoints = CheckpointFolder(Path(folder), keep=2, metric="loss")
    checkpoints.begin_writing()
    shapes = {"x": (512, 512), "y": (100_000,)}
    at = checkpoints.newest()
    if at is None:
        at, state = 0, {name: jnp.ones(shape) for name, shape in shapes.items()}
    else:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=here) for name, shape in shapes.items()}
        state = checkpoints.load(at, {"parameters": wanted})["parameters"]
    step = jax.jit(lambda state, n: jax.tree.map(lambda x: x * 0.9 + jnp.sin(x + n), state), donate_argnums=0)
    Path(log).write_text(f"started {at}")
    for n in range(at, last):
        state = step(state, n)
        checkpoints.save(n + 1, {"parameters": state}, value=abs(n - 12.5))
        Path(log).write_text(f"at {n + 1}")
    checkpoints.wait()
    np.savez(log + ".npz", **state)
    Path(log).write_text("done")

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        attempt(*line.split()[:2], int(line.split()[2]))
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Attempts:
    """Attempts at one run, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": "", "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self) -> int:
        self.log.unlink(missing_ok=True)
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(f"{self.folder} {self.log} {STEPS}\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def status(self) -> int:
        assert self.server.stdout is not None
        return int(self.server.stdout.readline())

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    drawn = random.Random(0)
    whole = Attempts(tmp_path / "whole")
    killed = Attempts(tmp_path / "killed")
    try:
        whole.start()
        before, kills = 0, 0
        deadline = time.monotonic() + 500
        while kills < KILLS:
            child = killed.start()
            until = before + drawn.randrange(0, 6)
            while True:
                assert time.monotonic() < deadline
                word, _, step = killed.said().partition(" ")
                if word == "done" or (word == "at" and int(step) >= until):
                    break
                time.sleep(0.001)
            assert word != "done", "ended before it was killed often enough"
            time.sleep(drawn.random() * 0.05)
            os.kill(child, signal.SIGKILL)
            assert killed.status() == signal.SIGKILL
            kills += 1
            damage: list[str] = []
            newest = CheckpointFolder(tmp_path / "killed", warn=damage.append).newest() or 0
            assert not damage and newest >= before
            before = newest
        killed.start()
        assert (killed.status(), whole.status()) == (0, 0)
    finally:
        for attempts in (whole, killed):
            attempts.server.kill()
            attempts.server.communicate()
    assert (killed.said(), whole.said()) == ("done", "done")
    assert before > 0  # it went on from where it was
    with np.load(tmp_path / "whole.log.npz") as expected, np.load(tmp_path / "killed.log.npz") as found:
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name])
    left = [sorted(os.listdir(tmp_path / run)) for run in ("whole", "killed")]
    assert left == [["13", str(STEPS - 1), str(STEPS)]] * 2
