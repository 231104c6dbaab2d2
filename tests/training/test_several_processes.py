"""Two processes of four devices as one run: they stop together, save together, fail together, and resume elsewhere.

Run as a script, this file is one of the processes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from jaxtool.config import MeshConfig, RunConfig, run_script
from jaxtool.models import LanguageModel, abstract_model, build_model, parameters, with_parameters
from jaxtool.parallel import barrier, end_process, from_first, gather, make_mesh, start_processes
from jaxtool.tools import Tool, ToolCatalog
from jaxtool.training import RunDirectory, TrainState, abstract_state, initial_state
from jaxtool.training.preemption import StopRequest
from tests.tiny_models import CONFIG as TEXT_CONFIG

ROOT = Path(__file__).parents[2]
SECONDS = 400
CONFIG = dataclasses.replace(TEXT_CONFIG, vocab_size=128, padded_vocab_size=256, num_tools=2)
CATALOG = ToolCatalog([Tool(name="a"), Tool(name="b")])
OPTIMIZER = optax.sgd(1.0, momentum=0.9)


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)


def one_more(state: TrainState) -> TrainState:
    """A step whose result is known: 1 is added to all there is."""
    return jax.tree.map(lambda x: x + 1, state)


def start_values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = parameters(abstract_model(lambda: build_model(CONFIG)))
    return {path: rng.standard_normal(leaf.shape).astype(np.float32) for path, leaf in shapes.items()}


def new_model(mesh: jax.sharding.Mesh) -> LanguageModel:
    """On several processes, each fills its own devices."""
    abstract, values = abstract_model(lambda: build_model(CONFIG), mesh), start_values()
    arrays = {
        path: jax.make_array_from_callback(leaf.shape, leaf.sharding, values[path].__getitem__)
        for path, leaf in parameters(abstract).items()
    }
    return with_parameters(abstract, arrays)


def expected_after(steps: int) -> dict[str, np.ndarray]:
    values = start_values()
    for _ in range(steps):
        values = {path: value + np.float32(1) for path, value in values.items()}
    return values


def check(state: TrainState, steps: int) -> None:
    """The parts of the state that this process holds are those after so many steps."""
    for path, value in expected_after(steps).items():
        leaves = [parameters(state.model)[path], parameters(state.optimizer_state[0].trace)[path]]
        for leaf, whole in zip(leaves, (value, np.full_like(value, steps)), strict=True):
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, whole[shard.index], err_msg=path)


def resume_or_begin(run: RunDirectory, mesh: jax.sharding.Mesh) -> tuple[int, TrainState]:
    run.start(RunConfig(), CONFIG, CATALOG, Tokenizer())
    if run.last_step() is None:
        return 0, initial_state(new_model(mesh), OPTIMIZER)
    abstract = abstract_model(lambda: build_model(CONFIG), mesh)
    step, state = run.restore_newest(lambda _: abstract_state(abstract, OPTIMIZER))
    assert isinstance(state, TrainState)
    return step, state


def worker(case: str, folder: Path, port: int, index: int) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    here = start_processes(f"localhost:{port}", 2, index, timeout=SECONDS)
    host = socket.gethostname()
    assert (here.count, here.index, here.hosts) == (2, index, (host, host))
    assert (len(jax.devices()), jax.process_count(), jax.process_index()) == (8, 2, index)
    mesh = make_mesh(MeshConfig(fsdp=4, model=2))
    jax.set_mesh(mesh)
    run = RunDirectory(folder)
    began, state = resume_or_begin(run, mesh)
    check(state, began)
    step = jax.jit(one_more, donate_argnums=0)
    if case == "stopped":
        agree(index, host)
        with StopRequest(limit_seconds=SECONDS) as stop:
            for number in range(began + 1, 10_000):
                state = step(state)
                jax.block_until_ready(state)
                print(f"step {number}", flush=True)
                if stop.at(number):
                    break
            run.save(number, state)
            run.close()
        print(json.dumps({"stopped": number, "reason": stop.reason}), flush=True)
    else:
        state = step(state)
        if index == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        run.save(began + 1, state)
        run.close()


def agree(index: int, host: str) -> None:
    for turn in range(3):
        assert gather("test", f"{index} {turn}") == [f"0 {turn}", f"1 {turn}"]
    assert from_first("made", lambda: {"by": index}) == {"by": 0}

    def refuse() -> None:
        raise FileNotFoundError(f"refused by {index}")

    with pytest.raises(FileNotFoundError, match="refused by 0"):
        from_first("refused", refuse)
    if index == 0:
        with pytest.raises(ValueError, match=rf"alone: waited 1 s for process 1 \({host}\)"):
            barrier("alone", timeout=1)
    barrier("together")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def start(case: str, folder: Path) -> list[subprocess.Popen[str]]:
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-W", "error", __file__, case, folder, str(port), str(index)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


@pytest.mark.multiprocess
def test_two_processes(tmp_path: Path) -> None:
    # One process with eight devices begins the run.
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    with jax.set_mesh(mesh):
        run = RunDirectory(tmp_path)
        began, state = resume_or_begin(run, mesh)
        assert began == 0
        for number in (1, 2):
            state = jax.jit(one_more, donate_argnums=0)(state)
            run.save(number, state)
        run.close()

    # Two go on, on another mesh; a signal to the second one stops both at the same step.
    workers = start("stopped", tmp_path)
    try:
        lines = iter(workers[0].stdout or [])
        while next(lines, "step 5\n") != "step 5\n":
            pass
        workers[1].send_signal(signal.SIGTERM)
        ends = [worker.communicate(timeout=SECONDS) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], ends
    last = [json.loads(output.splitlines()[-1]) for output, _ in ends]
    assert last[0]["stopped"] == last[1]["stopped"] > 5
    assert last[0]["reason"] == f"SIGTERM at process 1 ({socket.gethostname()})"
    assert last[1]["reason"] == "SIGTERM"
    assert "SIGTERM: the run saves after this step and ends" in ends[1][1]

    # A file that the second one can't write: both end, and both say whose it was.
    workers = start("full", tmp_path)
    try:
        failed = [worker.communicate(timeout=SECONDS) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    stopped = last[0]["stopped"]
    for worker, (_, error) in zip(workers, failed, strict=True):
        assert worker.returncode == 1, error
        assert f"checkpoint {stopped + 1} could not be written (process 1 (" in error
        assert "File too large [os_error_code='27']). It needs " in error
        assert f"checkpoint {stopped} is untouched" in error
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [str(stopped)]

    # One device is enough to read it.
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        run = RunDirectory(tmp_path)
        step, state = resume_or_begin(run, mesh)
        run.close()
    assert step == stopped
    check(state, stopped)


def test_who_is_missing_is_said_before_jax_starts() -> None:
    with pytest.raises(ValueError, match=r"1 of 2 processes did not start within 0\.3 s: 1; started have 0"):
        start_processes(f"localhost:{free_port()}", 2, 0, timeout=0.3)
    assert not jax.distributed.is_initialized()
    assert start_processes(environment={}).count == 1


if __name__ == "__main__":
    case, folder, port, index = sys.argv[1:]
    run_script(lambda: worker(case, Path(folder), int(port), int(index)), end=end_process)
