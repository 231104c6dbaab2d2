"""Imports what a run needs and compares the versions with the lock file; part of install.sh, run on each worker.

Leaves the TPU alone: another process may hold it.
"""

import importlib
import importlib.metadata
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"

LOCK = Path(__file__).resolve().parent / "requirements-tpu.txt"
PINNED = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint")
MODULES = ("jax", "libtpu", "flax.nnx", "optax", "orbax.checkpoint", "tokenizers", "safetensors", "jsonargparse")


def main() -> None:
    """Ends with a non-zero status and the reason where something is missing or of another version."""
    lock = dict(line.split("==") for line in LOCK.read_text().splitlines() if "==" in line and line[0] != "#")
    wrong = []
    for name in PINNED:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found != lock[name]:
            wrong.append(f"{name} is {found}, the lock says {lock[name]}")
    if wrong:
        sys.exit("packages: " + "; ".join(wrong))
    for name in MODULES:
        importlib.import_module(name)
    print("packages:", ", ".join(f"{name} {lock[name]}" for name in PINNED))


if __name__ == "__main__":
    main()
