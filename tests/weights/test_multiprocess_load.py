"""Loading on several processes and meshes: every device gets the file's values, no process reads or holds too much.

Run as a script, this file is one of the processes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtool.config import MeshConfig
from jaxtool.models import Llama, abstract_model, parameters
from jaxtool.parallel import make_mesh
from jaxtool.weights import load, read_config, read_weights, sharded_read
from jaxtool.weights.safetensors_reader import SafetensorsFolder
from jaxtool.weights.safetensors_writer import SafetensorsWriter

ROOT = Path(__file__).parents[2]
SECONDS = 300

Abstract = dict[str, jax.ShapeDtypeStruct]
Arrays = dict[str, np.ndarray]

# Between the processes the file's rows are cut, among the devices of a process its columns, where it has any.
BY_ROWS = {
    "embedding_vd": P("process", "device"),
    "head_vd": P("process", "device"),
    "final_norm_d": P("process"),
    "blocks.attention_norm_d": P(None, "process"),
    "blocks.query_dnh": P(None, "device", "process", None),
    "blocks.key_dkh": P(None, "device", "process", None),
    "blocks.value_dkh": P(None, "device", "process", None),
    "blocks.output_nhd": P(None, "device", None, "process"),
    "blocks.mlp_norm_d": P(None, "process"),
    "blocks.gate_df": P(None, "device", "process"),
    "blocks.up_df": P(None, "device", "process"),
    "blocks.down_fd": P(None, "device", "process"),
}


def model_on(folder: Path, **sizes: int) -> Abstract:
    """The model's own layout under the default axis rules."""
    config: Any = read_config(folder)
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: sizes.get("fsdp", 1) * sizes.get("model", 1)])
    return parameters(abstract_model(lambda: Llama(config, rngs=nnx.Rngs(0)), mesh))


def by_rows(folder: Path) -> Abstract:
    mesh = jax.make_mesh((2, 4), ("process", "device"))
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, BY_ROWS[path]))
        for path, leaf in model_on(folder, fsdp=8).items()
    }


LAYOUTS = {
    "rows": by_rows,
    "fsdp": lambda folder: model_on(folder, fsdp=8),
    "fsdp and model": lambda folder: model_on(folder, fsdp=4, model=2),
}


def worker(folder: Path, out: Path, port: int, process: int) -> None:
    """One of two processes with 4 devices: loads under each layout and stores what its devices hold."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"localhost:{port}", 2, process, initialization_timeout=SECONDS)
    assert (len(jax.devices()), len(jax.local_devices())) == (8, 4)
    opened: list[SafetensorsFolder] = []

    class Watched(SafetensorsFolder):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            opened.append(self)

    load.SafetensorsFolder = Watched  # type: ignore[misc]
    bytes_read: dict[str, int] = {}
    for layout, make in LAYOUTS.items():
        abstract = make(folder)
        shards: Arrays = {}
        for path, array in read_weights(folder, abstract).items():
            assert array.sharding == abstract[path].sharding
            for shard in array.addressable_shards:
                ends = [part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)]
                shards[json.dumps([path, shard.device.id, ends])] = np.asarray(shard.data)
        np.savez(out / f"{layout}-{process}.npz", **shards)  # type: ignore[arg-type]
        bytes_read[layout] = opened[-1].bytes_read
    (out / f"{process}.json").write_text(json.dumps(bytes_read))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@pytest.mark.multiprocess
def test_two_processes(tmp_path: Path, sharded_folder: Path, hf_tensors: Arrays, expected: Arrays) -> None:
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", __file__, sharded_folder, tmp_path, str(port), str(process)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in workers]
    finally:
        for process in workers:
            process.kill()
    assert [process.returncode for process in workers] == [0, 0], "\n".join(outputs)

    whole = sum(value.nbytes for value in hf_tensors.values())
    bytes_read = [json.loads((tmp_path / f"{process}.json").read_text()) for process in range(2)]
    for layout in LAYOUTS:
        devices: set[tuple[str, int]] = set()
        for process in range(2):
            with np.load(tmp_path / f"{layout}-{process}.npz") as shards:
                for key, value in shards.items():
                    path, device, ends = json.loads(key)
                    part = expected[path][tuple(slice(*pair) for pair in ends)]
                    np.testing.assert_array_equal(value, part, err_msg=f"{layout}: {path} on device {device}")
                    devices.add((path, device))
        assert len(devices) == 8 * len(expected)
        # Small tensors: columns that another process holds lie too near to be skipped, but nothing is read twice.
        assert all(count[layout] <= whole for count in bytes_read)
    assert [count["rows"] for count in bytes_read] == [whole // 2] * 2


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2}, {"fsdp": 2, "model": 2}, {"fsdp": 8}, {"fsdp": 4, "model": 2}])
def test_any_mesh_gives_the_same_arrays(sharded_folder: Path, expected: Arrays, sizes: dict[str, int]) -> None:
    abstract = model_on(sharded_folder, **sizes)
    found = read_weights(sharded_folder, abstract)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert found[path].sharding == abstract[path].sharding
        np.testing.assert_array_equal(found[path], value, err_msg=path)


class TestMemory:
    """What the host holds while a parameter is read, as counted by Python's allocator hooks."""

    @pytest.fixture
    def folder(self, tmp_path: Path, hf_config: dict[str, Any]) -> Path:
        """Two layers with wide MLPs: 8 MiB in bfloat16 for each stacked matrix."""
        rng = np.random.default_rng(0)
        hf_config |= {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 2, "head_dim": 16}
        hf_config |= {"vocab_size": 1024, "torch_dtype": "bfloat16"}
        (tmp_path / "config.json").write_text(json.dumps(hf_config))
        shapes = {
            "model.embed_tokens.weight": (1024, 512),
            "model.norm.weight": (512,),
            "lm_head.weight": (1024, 512),
        }
        for layer in range(2):
            shapes |= {
                f"model.layers.{layer}.{name}.weight": shape
                for name, shape in {
                    "input_layernorm": (512,),
                    "self_attn.q_proj": (64, 512),
                    "self_attn.k_proj": (32, 512),
                    "self_attn.v_proj": (32, 512),
                    "self_attn.o_proj": (512, 64),
                    "post_attention_layernorm": (512,),
                    "mlp.gate_proj": (4096, 512),
                    "mlp.up_proj": (4096, 512),
                    "mlp.down_proj": (512, 4096),
                }.items()
            }
        with SafetensorsWriter(tmp_path, [(name, "BF16", shape) for name, shape in shapes.items()]) as writer:
            for name, shape in shapes.items():
                writer.write(name, rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16))
        return tmp_path

    @pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 4, "model": 2}])
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
    def test_little_more_than_the_result(self, folder: Path, sizes: dict[str, int], dtype: Any) -> None:
        abstract = {
            path: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
            for path, leaf in model_on(folder, **sizes).items()
        }
        tracemalloc.start()
        try:
            found = read_weights(folder, abstract)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        held = sum(shard.data.nbytes for array in found.values() for shard in array.addressable_shards)
        # A buffer, a piece and its cast for each thread.
        assert peak <= held + sharded_read._THREADS * 6 * 2**20
        assert peak >= 0.9 * sum(array.nbytes for array in found.values())  # the hooks do see the arrays

    def test_parts_are_filled_in_batches(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With many large parts for its devices, a process fills some at a time; the values are the same."""
        abstract = model_on(folder, fsdp=8)
        whole = read_weights(folder, abstract)
        monkeypatch.setattr(sharded_read, "_FILLED_TOGETHER", 2**20)
        for path, value in read_weights(folder, abstract).items():
            np.testing.assert_array_equal(value, whole[path])


def test_replicas_survive_donation(sharded_folder: Path, expected: Arrays) -> None:
    """Replicas on CPU devices may lie in one piece of memory: no device may overwrite it for the others."""
    abstract = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(leaf.sharding.mesh, P()))
        for path, leaf in model_on(sharded_folder, fsdp=8).items()
    }
    found = read_weights(sharded_folder, abstract)["embedding_vd"]
    changed = jax.jit(lambda x: 2 * x + 1, donate_argnums=0)(found)
    for shard in changed.addressable_shards:
        np.testing.assert_array_equal(shard.data, 2 * expected["embedding_vd"] + 1)


if __name__ == "__main__":
    worker(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
