"""Test set-up that must happen before jax is imported: CPU with 8 fake devices, no caches, no network."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# A cached executable could hide that a program no longer compiles.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# No deadline: the first example of a property often includes a compilation.
hypothesis.settings.register_profile("jaxtool", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("jaxtool")

MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps() -> Iterator[None]:
    """Compiled programs hold memory maps, of which Linux gives a process 65,530: thousands of programs come near it."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 15_000:
        import jax  # late: the environment above comes first

        jax.clear_caches()
