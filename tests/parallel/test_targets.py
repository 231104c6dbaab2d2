"""Machines by name: those that there are, and what is said of those that there aren't."""

from __future__ import annotations

import importlib.util

import jax
import pytest

from jaxtool.parallel.targets import find_target


def test_names_of_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jax.device_count() == 8  # from here on jax has those that it has
    assert len(find_target("cpu:2").devices) == 2
    with pytest.raises(ValueError, match="cpu:64 is more than the 8 fake devices"):
        find_target("cpu:64")
    for name in ("v5e-60", "v5e:9x9", "h100", "v5litepod-60"):
        with pytest.raises(ValueError, match=f"unknown accelerator type '{name}'; near ones: ") as raised:
            find_target(name)
        if "60" in name:
            assert "v5litepod-64" in str(raised.value)
    for name in ("cpu:0", "cpu:x", "cpu"):
        with pytest.raises(ValueError, match=f"'{name}' is no number of fake devices, expected cpu:N"):
            find_target(name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("v5e:8x8", "v5e-64", "v5litepod-64", "v4-32"):
        with pytest.raises(ValueError, match=rf"pip install 'jax\[tpu\]=={jax.__version__}'"):
            find_target(name)
