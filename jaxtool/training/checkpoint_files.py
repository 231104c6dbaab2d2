"""The files of a checkpoint: a manifest lists them with sizes and CRC-32 sums, and says that the checkpoint is whole.

The manifest is written when all else is there. orbax itself reads flipped bits of array data without complaint. What
the files hold is not known here: `checkpoints` writes them and asks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
ORBAX_METADATA = "_CHECKPOINT_METADATA"
# In orbax's own metadata: a checkpoint that has this was to get a manifest. Older ones have neither.
CUSTOM_METADATA = {"manifest": 1}
# Files up to this size are read in every check, larger ones only before they are loaded.
_SMALL = 1 << 16
_BLOCK = 1 << 22


class DamagedCheckpoint(ValueError):
    """A checkpoint isn't what was written; the message says what of it."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's contents.

    Attributes:
        step: number of the checkpoint.
        bytes: size of the state that it holds.
        metric: name of the held-out metric, lower is better; None without one.
        value: the metric's value at this step; None where it was not measured, or is not finite.
        files: size in bytes and CRC-32 of each file by its path in the folder; empty for checkpoints of older runs.
    """

    step: int
    bytes: int
    metric: str | None = None
    value: float | None = None
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Writes it into the folder, complete or not at all."""
        content = {
            "step": self.step,
            "bytes": self.bytes,
            "metric": self.metric,
            "value": self.value if self.value is not None and math.isfinite(self.value) else None,
            "files": {name: list(pair) for name, pair in sorted(self.files.items())},
        }
        write_atomically(folder / MANIFEST, json.dumps({"crc32": _crc(content), **content}, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint; one without files for a checkpoint from before there were manifests.

    Raises:
        DamagedCheckpoint: it is absent or damaged.
    """
    if not folder.is_dir():
        raise DamagedCheckpoint("is not a folder")
    path = folder / MANIFEST
    if not path.exists():
        return _without_manifest(folder)
    try:
        content = json.loads(path.read_bytes())
        checksum = content.pop("crc32")
        if checksum != _crc(content):
            raise ValueError
        files = {name: (int(size), int(crc)) for name, (size, crc) in content.pop("files").items()}
        return Manifest(files=files, **content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} is not what was written") from error


def _without_manifest(folder: Path) -> Manifest:
    path = folder / ORBAX_METADATA
    if not path.exists():
        found = "is empty" if not any(folder.iterdir()) else f"{MANIFEST} and {ORBAX_METADATA} are missing"
        raise DamagedCheckpoint(found)
    try:
        content = json.loads(path.read_bytes())
        custom = content["custom_metadata"] or {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} is missing and {ORBAX_METADATA} is not what was written") from error
    if custom == CUSTOM_METADATA:
        raise DamagedCheckpoint(f"{MANIFEST} is missing")
    return Manifest(step=-1, bytes=0)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Checks that all files are there in their sizes, and the contents of the small ones.

    Raises:
        DamagedCheckpoint: names the first that isn't.
        OSError: the file system doesn't say.
    """
    for name, (size, crc) in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DamagedCheckpoint(f"{name} is missing") from error
        if found != size:
            raise DamagedCheckpoint(f"{name} has {found:,} bytes, expected {size:,}")
        if size <= _SMALL and _file_crc(folder / name) != crc:
            raise DamagedCheckpoint(f"{name} is not what was written (checksum)")


def check_contents(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Reads files whole and compares their checksums.

    Raises:
        DamagedCheckpoint: names the first that isn't what was written.
    """
    for name in names:
        try:
            found = _file_crc(folder / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{name} can't be read ({error.strerror})") from error
        if found != manifest.files[name][1]:
            raise DamagedCheckpoint(f"{name} is not what was written (checksum)")


def checksums(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of files in the folder."""
    return {name: ((folder / name).stat().st_size, _file_crc(folder / name)) for name in names}


def files_below(folder: Path) -> list[str]:
    """Paths of all files in the folder and its folders, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def share_of_files(folder: Path, process: int, count: int) -> list[str]:
    """The files that one of `count` processes sums up: those that it wrote itself, and process 0 those of no one."""
    share = []
    for name in files_below(folder):
        found = re.search(r"/ocdbt\.process_(\d+)/", name)
        writer = int(found[1]) if found else 0
        if (writer if writer < count else 0) == process:
            share.append(name)
    return share


def remove_folder(path: Path) -> None:
    """Deletes a folder (or file) with what orbax left of it under other names; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    for left in path.parent.glob(f"{path.name}.orbax*"):
        shutil.rmtree(left)


def sync_folder(path: Path) -> None:
    """Makes renames in the folder last through a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file that is either the old or the new one whenever it is looked at, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _file_crc(path: Path) -> int:
    crc, buffer = 0, bytearray(_BLOCK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(view[:count], crc)
    return crc


def _crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
