"""The table of slices, against Google's published numbers and, where libtpu is installed, against libtpu."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

from jaxtool.parallel.topologies import TOPOLOGIES, find_topology
from tests.tpu_setup.conftest import ROOT

# Type, shape, chips, machines: from the pages on v4, v5e, v5p, v6e of the Cloud TPU documentation.
PUBLISHED = """
v4-8 2x2x1 4 1 | v4-16 2x2x2 8 2 | v4-32 2x2x4 16 4 | v4-64 2x4x4 32 8 | v4-128 4x4x4 64 16
v4-512 4x8x8 256 64 | v4-4096 8x16x16 2048 512
v5litepod-1 1x1 1 1 | v5litepod-4 2x2 4 1 | v5litepod-8 2x4 8 1 | v5litepod-16 4x4 16 4 | v5litepod-32 4x8 32 8
v5litepod-64 8x8 64 16 | v5litepod-128 8x16 128 32 | v5litepod-256 16x16 256 64
v5p-8 2x2x1 4 1 | v5p-16 2x2x2 8 2 | v5p-32 2x2x4 16 4 | v5p-64 2x4x4 32 8 | v5p-128 4x4x4 64 16 | v5p-256 4x4x8 128 32
v5p-512 4x8x8 256 64 | v5p-1024 8x8x8 512 128 | v5p-2048 8x8x16 1024 256 | v5p-4096 8x16x16 2048 512
v5p-8192 16x16x16 4096 1024 | v5p-12288 16x16x24 6144 1536
v6e-1 1x1 1 1 | v6e-4 2x2 4 1 | v6e-8 2x4 8 1 | v6e-16 4x4 16 4 | v6e-32 4x8 32 8 | v6e-64 8x8 64 16
v6e-128 8x16 128 32 | v6e-256 16x16 256 64
"""
# Data sheet: GiB (or GB) of a chip, bf16 TFLOP/s of a chip, devices that JAX shows for a chip.
CHIPS = {"v4": (32, 275, 1), "v5e": (16, 197, 1), "v5p": (95, 459, 1), "v6e": (32, 918, 1), "tpu7x": (192, 2307, 2)}


def test_sizes_are_the_published_ones() -> None:
    rows = [row.split() for row in PUBLISHED.replace("\n", "|").split("|") if row.strip()]
    assert len(rows) > 30
    for name, shape, chips, hosts in rows:
        found = find_topology(name)
        assert (found.shape, found.chips, found.hosts) == (shape, int(chips), int(hosts)), name


def test_rows_are_consistent() -> None:
    for name, each in TOPOLOGIES.items():
        memory, peak, devices = CHIPS[each.generation]
        assert name == each.accelerator_type
        assert math.prod(map(int, each.shape.split("x"))) == each.chips == each.hosts * each.chips_per_host
        assert each.devices == each.chips * devices
        # A program gets a little less than what the data sheet says, or what a GB more than a GiB is.
        assert 0.93 * memory < each.hbm_gib * devices < 1.01 * memory
        assert each.peak_tflops * devices == peak
        assert each.aot_name == f"{each.generation}:{each.shape}"
        assert (each.runtime_version is None) == (each.generation == "tpu7x")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v5e-16", "v5litepod-16, v5litepod-8"),
        ("v4-24", "v4-16, v4-32"),
        ("V4-8", "v4-8"),
        ("v5litepod_8", "v5litepod-8"),
        ("v5p", "v5p-8"),
        ("v6e-99999999999999999999", "v6e-256"),
        ("", ""),
        ("h100-8", ""),
    ],
)
def test_unknown_names_list_the_near_ones(name: str, near: str) -> None:
    with pytest.raises(ValueError, match="unknown accelerator type") as error:
        find_topology(name)
    assert near in str(error.value).partition("near ones: ")[2]
    assert str(error.value).partition("near ones: ")[2]


def topology(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-E", str(ROOT / "tpu_setup/topology.py"), *arguments]  # -S: no site-packages
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_line() -> None:
    assert topology("v5litepod-16", "hosts", "runtime_version").stdout == "4 v2-alpha-tpuv5-lite\n"
    assert "aot_name: v4:2x2x4\n" in topology("v4-32").stdout
    assert topology("tpu7x-8", "runtime_version").stdout == "-\n"
    for wrong in ((), ("v4-8", "nonsense"), ("v4-9",), ("v4-8", "--table"), ("--bogus",)):
        done = topology(*wrong)
        assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


def test_the_readme_has_the_table() -> None:
    assert topology("--table").stdout in (ROOT / "tpu_setup/README.md").read_text()


LIBTPU = """
import json, sys
from jax.experimental import topologies
from jaxtool.parallel.topologies import TOPOLOGIES
found = {}
for name, each in TOPOLOGIES.items():
    options = dict(each.aot_options)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=each.aot_name, **options).devices
    found[name] = (len(devices), len({device.process_index for device in devices}))
print(json.dumps(found))
"""


def test_libtpu_knows_every_slice_with_as_many_devices_and_hosts() -> None:
    pytest.importorskip("libtpu", reason="compares with libtpu, which jax[tpu] installs")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    done = subprocess.run([sys.executable, "-c", LIBTPU], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {name: [each.devices, each.hosts] for name, each in TOPOLOGIES.items()}
