"""Command line over the table of TPU slices in `jaxtool/parallel/topologies.py`, for the shell scripts and the README.

    python3 tpu_setup/topology.py v5litepod-16                        # everything about a slice
    python3 tpu_setup/topology.py v5litepod-16 hosts runtime_version  # some fields, on one line
    python3 tpu_setup/topology.py --table                             # the README's table

Loads the table by its path: `import jaxtool` would need jax, and this runs on laptops.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parent.parent / "jaxtool" / "parallel" / "topologies.py"

FIELDS = (
    "accelerator_type",
    "generation",
    "shape",
    "chips",
    "hosts",
    "chips_per_host",
    "devices",
    "hbm_gib",
    "peak_tflops",
    "runtime_version",
    "gke_accelerator",
    "aot_name",
)
COLUMNS = (
    ("type", "accelerator_type"),
    ("chips", "chips"),
    ("hosts", "hosts"),
    ("chips per host", "chips_per_host"),
    ("devices", "devices"),
    ("HBM, GiB per device", "hbm_gib"),
    ("bf16 TFLOP/s per device", "peak_tflops"),
    ("runtime version", "runtime_version"),
    ("GKE accelerator", "gke_accelerator"),
    ("AOT name", "aot_name"),
)


def load_table() -> Any:
    """The module `jaxtool.parallel.topologies`, without its package."""
    spec = importlib.util.spec_from_file_location("jaxtool_topologies", TABLE)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{TABLE}: the table of TPU slices is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def cell(topology: Any, field: str) -> str:
    """One field as text; the AOT name comes with the arguments it needs, fields that don't apply are "-"."""
    value = getattr(topology, field)
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def markdown_table() -> str:
    """All slices, one row each."""
    lines = ["| " + " | ".join(title for title, _ in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for topology in load_table().TOPOLOGIES.values():
        cells = [cell(topology, field) for _, field in COLUMNS]
        if topology.aot_options:
            cells[-1] += " (" + ", ".join(f"{key}={value!r}" for key, value in topology.aot_options) + ")"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(description="Looks TPU slices up.", allow_abbrev=False)
    parser.add_argument("accelerator_type", nargs="?", help="for example v5litepod-16")
    parser.add_argument("fields", nargs="*", metavar="field", help=", ".join(FIELDS))
    parser.add_argument("--table", action="store_true", help="print all slices as a Markdown table")
    options = parser.parse_args()
    if options.table == (options.accelerator_type is not None):
        parser.error("expected an accelerator type, or --table")
    if unknown := [field for field in options.fields if field not in FIELDS]:
        parser.error(f"unknown field {unknown[0]!r}, expected some of {', '.join(FIELDS)}")
    if options.table:
        print(markdown_table())
        return
    try:
        topology = load_table().find_topology(options.accelerator_type)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if options.fields:
        print(*(cell(topology, field) for field in options.fields))
    else:
        for field in FIELDS:
            print(f"{field}: {cell(topology, field)}")


if __name__ == "__main__":
    main()
