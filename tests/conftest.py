"""Test set-up that must happen before jax is imported: CPU with 8 fake devices, no caches, no network."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# A cached executable could hide that a program no longer compiles.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis

# No deadline: the first example of a property often includes a compilation.
hypothesis.settings.register_profile("jaxtool", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("jaxtool")
