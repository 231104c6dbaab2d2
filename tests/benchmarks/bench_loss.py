"""Cross-entropy at 8,192 positions x 175,360 columns, forward and backward: time and memory next to the plain one.

    python tests/benchmarks/bench_loss.py --json

The plain one holds all logits: one product, optax's cross-entropy, automatic gradients of hidden states and head. Time
is measured in one process, both in turns, and medians are reported; CPU seconds (of all threads) are what to compare on
a busy machine. Memory is what the compiler reserves besides arguments and results (`temp_bytes`), and what the kernel
counts at most (VmHWM, in a process of its own for each; `inputs_rss_bytes` is what it held before the first call).
Where the plain one does not fit into free memory, both are timed at fewer positions (`timed_positions`). `--remat` adds
a scan over chunks with `jax.checkpoint`, the same chunks as ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtool.config import MeshConfig
from jaxtool.models import LlamaConfig
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.training.cross_entropy import cross_entropy
from jaxtool.training.cross_entropy_loop import CrossEntropy

Function = Callable[[jax.Array, jax.Array, jax.Array], Any]
SPARE_BYTES = 2 * 2**30  # left to the system when it is decided what fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is measured: positions and columns, width, dtype of the products, positions of a chunk (0: chosen)."""

    positions: int
    columns: int
    hidden_size: int
    dtype: str
    chunk: int

    @property
    def setup(self) -> CrossEntropy:
        """Our loss; columns are text."""
        config = LlamaConfig(
            vocab_size=self.columns,
            hidden_size=self.hidden_size,
            intermediate_size=self.hidden_size,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=self.positions,
            rope_theta=10_000.0,
            compute_dtype=self.dtype,
        )
        return CrossEntropy(config=config, rules=AxisRules(), chunk=self.chunk)

    @property
    def chunk_size(self) -> int:
        """Positions of a chunk."""
        return self.setup.chunk_size(self.positions, self.columns, matrix_gradient=True)

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Hidden states, the head's matrix and one target for each position."""
        return (
            jax.ShapeDtypeStruct((self.positions, self.hidden_size), jnp.dtype(self.dtype)),
            jax.ShapeDtypeStruct((self.columns, self.hidden_size), jnp.float32),
            jax.ShapeDtypeStruct((self.positions,), jnp.int32),
        )

    def arrays(self) -> tuple[jax.Array, ...]:
        """Random ones."""
        rng = np.random.default_rng(0)
        hidden_pd = rng.standard_normal((self.positions, self.hidden_size), np.float32).astype(self.dtype)
        matrix_vd = 0.02 * rng.standard_normal((self.columns, self.hidden_size), np.float32)
        targets_p = rng.integers(self.columns, size=self.positions).astype(np.int32)
        return jax.device_put(hidden_pd), jax.device_put(matrix_vd), jax.device_put(targets_p)

    def functions(self) -> dict[str, Function]:
        """Loss and gradients of the three ways."""
        return {
            "ours": _value_and_gradients(self._ours),
            "plain": _value_and_gradients(self._plain),
            "remat": _value_and_gradients(self._remat),
        }

    def _ours(self, hidden_pd: jax.Array, matrix_vd: jax.Array, targets_p: jax.Array) -> jax.Array:
        targets_bpa = targets_p[None, :, None]
        sums = cross_entropy(
            self.setup, hidden_pd[None], {"matrix": matrix_vd}, targets_bpa, jnp.ones_like(targets_bpa, jnp.float32)
        )
        return sums.loss / self.positions

    def _plain(self, hidden_pd: jax.Array, matrix_vd: jax.Array, targets_p: jax.Array) -> jax.Array:
        logits_pv = _logits(hidden_pd, matrix_vd)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits_pv, targets_p))

    def _remat(self, hidden_pd: jax.Array, matrix_vd: jax.Array, targets_p: jax.Array) -> jax.Array:
        padding = -self.positions % self.chunk_size
        hidden_xcd = jnp.pad(hidden_pd, ((0, padding), (0, 0))).reshape(-1, self.chunk_size, self.hidden_size)
        targets_xc = jnp.pad(targets_p, (0, padding), constant_values=-1).reshape(-1, self.chunk_size)

        def add(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            hidden_cd, targets_c = chunk
            found_c = optax.softmax_cross_entropy_with_integer_labels(
                _logits(hidden_cd, matrix_vd), jnp.maximum(targets_c, 0)
            )
            return total + jnp.sum(jnp.where(targets_c >= 0, found_c, 0.0)), None

        total, _ = jax.lax.scan(jax.checkpoint(add), jnp.float32(0), (hidden_xcd, targets_xc))
        return total / self.positions


def _logits(hidden_pd: jax.Array, matrix_vd: jax.Array) -> jax.Array:
    return jnp.einsum("pd,vd->pv", hidden_pd, matrix_vd.astype(hidden_pd.dtype), preferred_element_type="float32")


def _value_and_gradients(loss: Function) -> Function:
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def compiled(shape: Shape, name: str) -> Any:
    """The program of one way."""
    return shape.functions()[name].lower(*shape.abstract()).compile()


def bytes_of(program: Any) -> dict[str, int]:
    """Bytes that the compiler reserves: temporary, and everything."""
    sizes = program.memory_analysis()
    everything = sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    return {"temp": sizes.temp_size_in_bytes, "all": everything}


def peak_of_process(shape: Shape, name: str) -> dict[str, int]:
    """Resident bytes of a new process before and at most during two calls."""
    options = [f"--{field}={value}" for field, value in dataclasses.asdict(shape).items()]
    command = [sys.executable, __file__, f"--process={name}", *options]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def in_process(shape: Shape, name: str) -> dict[str, int]:
    """What `peak_of_process` starts."""
    arrays, program = shape.arrays(), compiled(shape, name)
    held = _status("VmRSS")
    for _ in range(2):
        jax.block_until_ready(program(*arrays))
    return {"inputs": held, "peak": _status("VmHWM")}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"/proc/self/status has no field {field}")


def free_bytes() -> int:
    """Memory that the system could give to a process."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise ValueError("/proc/meminfo has no field MemAvailable")


def measure(shape: Shape, rounds: int, *, remat: bool) -> dict[str, Any]:
    """All figures as one JSON object."""
    names = ("ours", "plain", "remat") if remat else ("ours", "plain")
    fields = {"ours": "", "plain": "plain_", "remat": "remat_"}
    figures: dict[str, Any] = dataclasses.asdict(shape) | {"chunk": shape.chunk_size, "load_before": os.getloadavg()[0]}
    sizes = {name: bytes_of(compiled(shape, name)) for name in names}
    free = free_bytes() - SPARE_BYTES
    fits = {name: size["all"] < free for name, size in sizes.items()}
    figures["plain_fits_memory"], figures["free_bytes"] = fits["plain"], free
    for name in names:
        figures[f"{fields[name]}temp_bytes"] = sizes[name]["temp"]
        resident = peak_of_process(shape, name) if fits[name] else {"inputs": None, "peak": None}
        figures |= {f"{fields[name]}{kind}_rss_bytes": value for kind, value in resident.items()}

    timed = shape
    while bytes_of(compiled(timed, "plain"))["all"] >= free:
        timed = dataclasses.replace(timed, positions=timed.positions // 2)
    figures["timed_positions"] = timed.positions
    arrays = timed.arrays()
    programs = {name: compiled(timed, name) for name in names}
    wall: dict[str, list[float]] = {name: [] for name in programs}
    used: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(rounds + 1):  # the first one warms up
        for name, program in programs.items():
            started, cpu = time.perf_counter(), time.process_time()
            values = jax.block_until_ready(program(*arrays))
            if turn:
                wall[name].append(time.perf_counter() - started)
                used[name].append(time.process_time() - cpu)
            else:
                figures.setdefault("losses", {})[name] = float(values[0])
            del values
    for name in names:
        figures[f"{fields[name]}seconds"] = round(statistics.median(wall[name]), 3)
        figures[f"{fields[name]}cpu_seconds"] = round(statistics.median(used[name]), 3)
    figures["ratio"] = round(figures["seconds"] / figures["plain_seconds"], 3)
    figures["cpu_ratio"] = round(figures["cpu_seconds"] / figures["plain_cpu_seconds"], 3)
    figures["load_after"] = os.getloadavg()[0]
    return figures


def main() -> None:
    """Prints the figures, one a line, or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=175_360)
    parser.add_argument("--hidden_size", type=int, default=576)
    parser.add_argument("--dtype", default="float32", help="of hidden states and products; bfloat16 is slow on CPU")
    parser.add_argument("--chunk", type=int, default=0, help="positions of a chunk (0: as in training)")
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each")
    parser.add_argument("--remat", action="store_true", help="measure a scan with jax.checkpoint, too")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = Shape(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Shape)})
    jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1]))
    if options.process:
        print(json.dumps(in_process(shape, options.process)))
        return
    figures = measure(shape, options.rounds, remat=options.remat)
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
