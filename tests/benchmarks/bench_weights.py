"""Loading a 1 GiB checkpoint: seconds, peak memory and bytes read of each process, next to torch transformers.

    python tests/benchmarks/bench_weights.py --json

A random Llama is written as several shards, then loaded by 2 processes with 4 CPU devices each (parameters cut over all
8), by one process with one device, and by transformers' `from_pretrained` in the same dtype. Each load runs in new
processes, imports aren't counted; the three take turns, and the medians are reported. Memory is what the kernel counts
(VmHWM over what the process held before, after imports and with its mesh), bytes read are the kernel's, too. The files
are in the page cache, because they have just been written; `--cold` drops them before each load. CPU seconds (of all
threads) are what to compare on a busy machine. `from_pretrained` maps the files and returns before a weight is read, so
that a read of every page is counted with it; it neither copies nor transposes, which a sharded load has to.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
GIB = 2**30
SECONDS = 900
SHARD_BYTES = 300 * 1000**2
FORMAT_NAMES = {"bfloat16": "BF16", "float32": "F32"}

V, D, F, L, N, K, H = 16_384, 2048, 8192, 8, 16, 4, 128


def write_checkpoint(folder: Path, dtype: str) -> int:
    """A random Llama in several shards; returns its bytes."""
    import jax.numpy as jnp

    from jaxtool.weights.safetensors_writer import SafetensorsWriter

    config = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": dtype,
        "head_dim": H,
        "hidden_act": "silu",
        "hidden_size": D,
        "intermediate_size": F,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": N,
        "num_hidden_layers": L,
        "num_key_value_heads": K,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "vocab_size": V,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    layer = {
        "input_layernorm": (D,),
        "self_attn.q_proj": (N * H, D),
        "self_attn.k_proj": (K * H, D),
        "self_attn.v_proj": (K * H, D),
        "self_attn.o_proj": (D, N * H),
        "post_attention_layernorm": (D,),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for number in range(L):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (D,), "lm_head.weight": (V, D)}
    values = np.random.default_rng(0).standard_normal(2**22, np.float32).astype(jnp.dtype(dtype))
    listed = [(name, FORMAT_NAMES[dtype], shape) for name, shape in shapes.items()]
    with SafetensorsWriter(folder, listed, shard_bytes=SHARD_BYTES) as writer:
        for name, shape in shapes.items():
            if len(shape) == 1:
                writer.write(name, values[: shape[0]])
                continue
            rows, columns = shape
            step = values.size // columns
            for row in range(0, rows, step):
                writer.write(name, values[: min(step, rows - row) * columns].reshape(-1, columns))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measured(load: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `load` returns, and its seconds, peak extra memory and bytes read."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = status("VmRSS")
    except OSError:
        before = status("VmHWM")
    reads = int(Path("/proc/self/io").read_text().split()[1])
    started, cpu = time.perf_counter(), time.process_time()
    result = load()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return result, {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "extra_rss": status("VmHWM") - before,
        "bytes_read": int(Path("/proc/self/io").read_text().split()[1]) - reads,
    }


def load_with_jaxtool(folder: Path, processes: int, process: int, devices: int, port: int) -> dict[str, float]:
    """One process's part of the load, on `processes` x `devices`."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from jax.experimental import multihost_utils

    from jaxtool.config import MeshConfig
    from jaxtool.models import abstract_model, build_model, parameters
    from jaxtool.parallel import make_mesh
    from jaxtool.weights import read_config, read_weights

    jax.config.update("jax_num_cpu_devices", devices)
    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, process)
    mesh = make_mesh(MeshConfig(fsdp=processes * devices))
    config = read_config(folder)
    dtype = json.loads((folder / "config.json").read_text())["dtype"]
    leaves = parameters(abstract_model(lambda: build_model(config), mesh))
    abstract = {path: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding) for path, leaf in leaves.items()}
    if processes > 1:
        multihost_utils.sync_global_devices("start")
    found, figures = measured(lambda: jax.block_until_ready(read_weights(folder, abstract)))
    share = sum(
        part.nbytes
        for array in found.values()
        for part in {str(shard.index): shard.data for shard in array.addressable_shards}.values()
    )
    return figures | {"share": share}


def load_with_torch(folder: Path) -> dict[str, float]:
    """The peer: `from_pretrained` in the files' dtype, without and with one read of every page.

    It may map the files and return before any weight has been read.
    """
    import torch
    from transformers import LlamaForCausalLM

    torch.zeros(1)
    dtype = getattr(torch, json.loads((folder / "config.json").read_text())["dtype"])
    model, figures = measured(lambda: LlamaForCausalLM.from_pretrained(folder, dtype=dtype))

    def touch() -> float:
        pages = (value.detach().flatten()[:: 4096 // value.element_size()] for value in model.parameters())
        return sum(float(page.sum(dtype=torch.float32)) for page in pages)

    _, touched = measured(touch)
    return {name: figures[name] + touched[name] for name in touched} | {"seconds_untouched": figures["seconds"]}


def in_processes(folder: Path, system: str, processes: int = 1, devices: int = 1) -> list[dict[str, float]]:
    """Figures of each process of a load."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--worker", system, "--folder", str(folder), "--port", str(port)]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [*command, "--processes", str(processes), "--process", str(process), "--devices", str(devices)],
            stdout=subprocess.PIPE,
            env=env | {"HF_HUB_OFFLINE": "1"},
        )
        for process in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise RuntimeError(f"a process of {system} failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def drop_from_page_cache(folder: Path) -> None:
    """Takes the weights out of the page cache; they are on the disk already."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(dtype: str, rounds: int, cold: bool) -> dict[str, Any]:
    """All figures as one JSON object."""
    systems: dict[str, tuple[Any, ...]] = {"jaxtool": (2, 4), "single": (1, 1), "torch": ()}
    try:
        import torch  # noqa: F401
    except ImportError:
        del systems["torch"]
    found: dict[str, list[list[dict[str, float]]]] = {system: [] for system in systems}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_checkpoint(folder, dtype)
        shards = len(list(folder.glob("*.safetensors")))
        for _ in range(rounds):
            for system, arguments in systems.items():
                if cold:
                    drop_from_page_cache(folder)
                found[system].append(in_processes(folder, system, *arguments))

    def median(system: str, of: Callable[[dict[str, float]], float]) -> float | None:
        """Over the rounds, of the worst process."""
        values = [max(map(of, processes)) for processes in found.get(system, [])]
        return round(statistics.median(values), 3) if values else None

    def seconds(system: str, kind: str = "seconds") -> float | None:
        return median(system, lambda figures: figures[kind])

    ours, theirs = seconds("single"), seconds("torch")
    return {
        "dtype": dtype,
        "checkpoint_gib": round(size / GIB, 3),
        "shards": shards,
        "page_cache": "cold" if cold else "warm",
        "rounds": rounds,
        "share_gib": median("jaxtool", lambda figures: figures["share"] / GIB),
        "load_seconds": seconds("jaxtool"),
        "load_cpu_seconds": seconds("jaxtool", "cpu_seconds"),
        "extra_rss_gib": median("jaxtool", lambda figures: figures["extra_rss"] / GIB),
        "peak_rss_over_share": median("jaxtool", lambda figures: figures["extra_rss"] / figures["share"]),
        "bytes_read_over_share": median("jaxtool", lambda figures: figures["bytes_read"] / figures["share"]),
        "single_process_load_seconds": ours,
        "single_process_cpu_seconds": seconds("single", "cpu_seconds"),
        "single_process_peak_rss_over_share": median("single", lambda figures: figures["extra_rss"] / figures["share"]),
        "torch_load_seconds": seconds("torch", "seconds_untouched"),
        "torch_load_and_touch_seconds": theirs,
        "torch_load_and_touch_cpu_seconds": seconds("torch", "cpu_seconds"),
        "torch_touched_over_single_process": round(theirs / ours, 2) if ours and theirs else None,
    }


def main() -> None:
    """Prints the figures, one a line, or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dtype", choices=sorted(FORMAT_NAMES), default="bfloat16", help="of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3, help="loads by each system")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each load")
    for name, kind in {"worker": str, "folder": Path, "port": int, "processes": int, "process": int}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker == "torch":
        print(json.dumps(load_with_torch(options.folder)))
    elif options.worker:
        place = (options.processes, options.process, options.devices, options.port)
        print(json.dumps(load_with_jaxtool(options.folder, *place)))
    else:
        figures = measure(options.dtype, options.rounds, options.cold)
        print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
