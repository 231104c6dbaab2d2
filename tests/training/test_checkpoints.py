"""Checkpoints of plain arrays: what is saved while training goes on, what is kept, and what happens to damaged ones."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from jaxtool.training import checkpoint_reader
from jaxtool.training import checkpoints as module
from jaxtool.training.checkpoint_files import DamagedCheckpoint, Manifest, check_sizes, read_manifest
from jaxtool.training.checkpoints import CheckpointFolder

MESH = jax.make_mesh((2, 4), ("fsdp", "model"), devices=jax.devices())
LAYOUTS = {"a": P("fsdp", "model"), "b": P(None, "model"), "c": P(), "count": P()}
Items = dict[str, dict[str, Any]]


def host_arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.standard_normal((64, 256)).astype(np.float32),
        "b": rng.standard_normal((3, 512)).astype(jnp.bfloat16),
        "c": rng.standard_normal(1000).astype(np.float32),
        "count": np.int32(seed),
    }


def items(seed: int) -> Items:
    """Two items on the mesh; what the device holds is its own."""
    placed = {name: jax.device_put(x, NamedSharding(MESH, LAYOUTS[name])) for name, x in host_arrays(seed).items()}
    return {"parameters": jax.tree.map(jnp.copy, placed), "optimizer": {"mu": jnp.copy(placed["a"])}}


def wanted(mesh: jax.sharding.Mesh = MESH) -> Items:
    def shape(name: str, x: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, LAYOUTS[name]))

    arrays = {name: shape(name, x) for name, x in host_arrays(0).items()}
    return {"parameters": arrays, "optimizer": {"mu": arrays["a"]}}


def same(found: Items, seed: int) -> bool:
    expected = host_arrays(seed)
    pairs = [(found["parameters"][name], x) for name, x in expected.items()]
    return all(np.array_equal(x, y) for x, y in [*pairs, (found["optimizer"]["mu"], expected["a"])])


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints 10 and 20, with values of a metric."""
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    checkpoints = CheckpointFolder(folder, keep=2, metric="held_out_loss")
    checkpoints.save(10, items(10), value=2.0)
    checkpoints.save(20, items(20), value=3.0)
    checkpoints.wait()
    return folder


@pytest.fixture
def copied(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "checkpoints"))


# ---- saving in the background --------------------------------------------------------------------------------------


def test_steps_that_donate_do_not_reach_a_save_in_progress(tmp_path: Path) -> None:
    """State is handed over again and again while it is written; the checkpoints are those of a run that waits."""
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 2 + 1, state), donate_argnums=0)
    hands_on = jax.jit(lambda state: dict(state))  # its results are its arguments
    large = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    sharding = NamedSharding(MESH, P("fsdp", "model"))
    shape = jax.ShapeDtypeStruct(large.shape, large.dtype, sharding=sharding)
    kept, overlapped = {}, False
    for way in ("background", "waiting"):
        state = {name: jnp.copy(jax.device_put(large, sharding)) for name in ("x", "y")}
        checkpoints = CheckpointFolder(tmp_path / way, keep=9)
        for number in range(1, 9):
            state = step(state)
            if number % 4 == 0:
                checkpoints.save(number, {"parameters": hands_on(state)})
            if way == "waiting":
                jax.block_until_ready(state)
                checkpoints.wait()
        jax.block_until_ready(state)
        checkpoints.save(9, {"parameters": state})
        jax.block_until_ready(step(state))
        overlapped |= checkpoints._thread is not None and checkpoints._thread.is_alive()
        kept[way] = {n: checkpoints.load(n, {"parameters": {"x": shape, "y": shape}})["parameters"] for n in (4, 8, 9)}
    assert overlapped
    expected = large
    for number in range(1, 9):
        expected = expected * 2 + 1
        if number % 4 == 0:
            for found in (kept[way][n] for way in kept for n in ((8, 9) if number == 8 else (4,))):
                np.testing.assert_array_equal(found["x"], expected)
                np.testing.assert_array_equal(found["y"], expected)


def test_times_and_sizes_are_reported_once(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    assert checkpoints.finished() is None
    state = items(3)
    checkpoints.save(7, state)
    checkpoints.wait()
    report = checkpoints.finished()
    assert report is not None and checkpoints.finished() is None
    assert (report.step, report.bytes) == (7, 2 * 64 * 256 * 4 + 3 * 512 * 2 + 1000 * 4 + 4)
    assert report.blocking_seconds > 0 and report.background_seconds > 0


def test_any_other_layout(copied: Path) -> None:
    other = jax.make_mesh((1, 2), ("fsdp", "model"), devices=jax.devices()[3:5])
    found = CheckpointFolder(copied).load(20, wanted(other))
    assert same(found, 20)
    assert found["parameters"]["a"].sharding == NamedSharding(other, LAYOUTS["a"])
    assert CheckpointFolder(copied).load(20, {"optimizer": wanted()["optimizer"]}).keys() == {"optimizer"}
    with pytest.raises(ValueError, match=r"20: the checkpoint can't be read .* another kind of state"):
        CheckpointFolder(copied).load(20, {"optimizer": {"nu": wanted()["optimizer"]["mu"]}})


# ---- what is kept --------------------------------------------------------------------------------------------------


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2, metric="loss")
    state = items(0)
    values = [5.0, 3.0, 3.0, float("nan"), None, 4.0, 2.5, 9.0, 9.0]
    after = [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6], [6, 7], [7, 8], [7, 8, 9]]
    best = [1, 2, 2, 2, 2, 2, 7, 7, 7]
    for step, value in enumerate(values, start=1):
        checkpoints.save(step, state, value=value)
        checkpoints.wait()
        assert names(tmp_path) == [str(each) for each in after[step - 1]]
        assert (checkpoints.best(), checkpoints.newest()) == (best[step - 1], step)
    assert (CheckpointFolder(tmp_path).best(), CheckpointFolder(tmp_path).newest()) == (7, 9)
    assert CheckpointFolder(tmp_path, metric="accuracy").best() is None
    manifest = read_manifest(tmp_path / "7")
    assert (manifest.step, manifest.metric, manifest.value) == (7, "loss", 2.5)
    # Without a metric only the newest stay; a number that was used is replaced.
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(9, items(9))
    checkpoints.wait()
    assert names(tmp_path) == ["9"] and same(checkpoints.load(9, wanted()), 9)


# ---- damage --------------------------------------------------------------------------------------------------------


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(content)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def uncommitted(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "commit_success.txt").unlink()


def another_value(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"value": 0.1}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "array file missing": (lambda f: largest(f / "parameters").unlink(), r"parameters/.* is missing"),
    "array file cut": (lambda f: os.truncate(largest(f / "parameters"), 100), "has 100 bytes, expected [0-9,]+"),
    "first byte": (lambda f: flip(largest(f / "parameters"), 0), r"parameters/.* is not what was written"),
    "a bit of the data": (lambda f: flip(largest(f / "optimizer"), 20_000), r"optimizer/.* is not what was written"),
    "a bit of the index": (
        lambda f: flip(f / "parameters/manifest.ocdbt", 20),
        "manifest.ocdbt is not what was written",
    ),
    "a bit of the tree": (
        lambda f: flip(f / "parameters/_METADATA", 30),
        "parameters/_METADATA is not what was written",
    ),
    "tree missing": (lambda f: (f / "optimizer/_METADATA").unlink(), "optimizer/_METADATA is missing"),
    "metadata missing": (lambda f: (f / "_CHECKPOINT_METADATA").unlink(), "_CHECKPOINT_METADATA is missing"),
    "item missing": (lambda f: shutil.rmtree(f / "optimizer"), r"optimizer/.* is missing"),
    "no commit marker": (uncommitted, r"manifest\.json is missing"),
    "manifest cut": (lambda f: os.truncate(f / "manifest.json", 50), r"manifest\.json is not what was written"),
    "manifest changed": (another_value, r"manifest\.json is not what was written"),
    "manifest of another kind": (lambda f: (f / "manifest.json").write_text("[]"), r"manifest\.json is not what was"),
    "empty folder": (empty, "is empty"),
    "a file": (lambda f: (shutil.rmtree(f), f.write_text("")), "is not a folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_falls_back_with_a_warning(copied: Path, damage: str) -> None:
    do, said = DAMAGES[damage]
    do(copied / "20")
    warnings: list[str] = []
    checkpoints = CheckpointFolder(copied, metric="held_out_loss", warn=warnings.append)
    checkpoints.begin_writing()
    if checkpoints.newest() == 20:  # sizes don't tell
        with pytest.raises(DamagedCheckpoint, match=f"20: the checkpoint is damaged: {said}"):
            checkpoints.load(20, wanted())
    assert (checkpoints.newest(), checkpoints.newest()) == (10, 10)
    assert len(warnings) == 1  # once
    (warning,) = warnings
    assert f"{copied / '20'}: the checkpoint is damaged: " in warning
    assert warning.endswith("; checkpoint 10 is used, and the next one that is saved replaces it")
    assert re.search(said, warning)
    assert same(checkpoints.load(10, wanted()), 10)
    # The next save, of whatever number, takes the damaged one away.
    checkpoints.save(15, items(15))
    checkpoints.wait()
    assert names(copied) == ["10", "15"] and checkpoints.newest() == 15


@pytest.mark.parametrize("newer", ["a bit of the data", "array file missing", "empty folder"])
def test_all_damaged_is_an_error(copied: Path, newer: str) -> None:
    DAMAGES[newer][0](copied / "20")
    flip(largest(copied / "10"), 500)
    checkpoints = CheckpointFolder(copied, warn=lambda _: None)
    for step in (20, 10):
        if checkpoints.newest() == step:
            with pytest.raises(DamagedCheckpoint):
                checkpoints.load(step, wanted())
    with pytest.raises(ValueError, match=r"all checkpoints are damaged: 10 \(.*checksum.*\); 20 \(.*start anew"):
        checkpoints.newest()


def test_an_older_damaged_one_is_left_out(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    largest(copied / "10").unlink()
    checkpoints = CheckpointFolder(copied)
    assert (checkpoints.newest(), checkpoints.best(), checkpoints.before(20)) == (20, 20, None)
    said = capsys.readouterr().err
    assert said.startswith("warning: ") and said.endswith("is missing; it is left out\n") and said.count("\n") == 1


def test_what_can_not_be_read_for_now_is_not_deleted(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    checkpoints = CheckpointFolder(copied, warn=warnings.append)

    def stale(folder: Path, manifest: Manifest) -> None:
        if folder.name == "10":
            raise OSError(116, "Stale file handle")
        check_sizes(folder, manifest)

    monkeypatch.setattr(checkpoint_reader, "check_sizes", stale)
    assert checkpoints.newest() == 20
    checkpoints.save(30, items(30))
    checkpoints.wait()
    assert names(copied) == ["10", "30"]
    assert [warning.split(": ", 1)[1] for warning in warnings] == [
        "the checkpoint is damaged: can't be read (Stale file handle); it is left out"
    ]


def test_checkpoints_from_before_there_were_manifests(tmp_path: Path) -> None:
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save_checkpointables(step, items(step), force=True)
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.begin_writing()
    assert names(tmp_path) == ["1", "2"]
    assert (checkpoints.newest(), checkpoints.best()) == (2, None)
    assert same(checkpoints.load(2, wanted()), 2)
    checkpoints.save(3, items(3))
    checkpoints.wait()
    assert names(tmp_path) == ["3"]


# ---- what a kill leaves --------------------------------------------------------------------------------------------


def test_what_a_kill_left_is_put_in_order(copied: Path) -> None:
    complete = copied / "20"
    shutil.copytree(complete, copied / ".30.saving")  # killed between its manifest and its move
    shutil.copytree(complete, copied / ".20.saving")
    shutil.copytree(complete, copied / ".5.removed")
    for half in (".40.saving", ".41.saving.orbax-checkpoint-tmp-1", ".42.replaced", "7.orbax-checkpoint-tmp"):
        (copied / half / "parameters").mkdir(parents=True)
    (copied / "10").rename(copied / ".10.replaced")  # killed between two moves
    (copied / "notes").mkdir()
    reader = CheckpointFolder(copied)
    assert reader.newest() == 20
    assert ".30.saving" in names(copied)  # not a reader's to touch
    writer = CheckpointFolder(copied)
    writer.begin_writing()
    assert names(copied) == ["10", "20", "30", "notes"]
    assert same(writer.load(30, wanted()), 20) and same(writer.load(10, wanted()), 10)


# ---- saves that fail -----------------------------------------------------------------------------------------------


def test_a_failed_save_is_raised_where_the_loop_asks(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    checkpoints = CheckpointFolder(copied, keep=2)
    bytes_needed = 2 * 64 * 256 * 4 + 3 * 512 * 2 + 1000 * 4 + 4
    said = rf"30 could not be written \(.*No space left.*\)\. It needs {bytes_needed:,} bytes, [0-9,]+ are free there; "
    for ask in (lambda: checkpoints.save(40, items(40)), checkpoints.wait, checkpoints.finished):
        with monkeypatch.context() as patch:
            patch.setattr(module, "checksums", full)
            checkpoints.save(30, items(30))
            thread = checkpoints._thread
            assert thread is not None
            thread.join()
        with pytest.raises(ValueError, match=said + "checkpoint 20 is untouched"):
            ask()
        assert names(copied) == ["10", "20"]
        checkpoints.wait()  # said once
    assert same(checkpoints.load(20, wanted()), 20)
    checkpoints.save(30, items(30))
    checkpoints.wait()
    assert names(copied) == ["20", "30"] and same(checkpoints.load(30, wanted()), 30)


def test_files_that_may_not_grow(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Real write errors: the system refuses what goes beyond a size."""
    checkpoints = CheckpointFolder(copied)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        checkpoints.save(30, items(30))
        with pytest.raises(ValueError, match=r"30 could not be written \(.*File too large.*checkpoint 20 is untouched"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(copied) == ["10", "20"]
    assert same(checkpoints.load(20, wanted()), 20)
    assert capfd.readouterr() == ("", "")  # no stack trace of another's


FILLS_THE_DISK = """
import sys
from pathlib import Path
import jax
from jaxtool.training.checkpoints import CheckpointFolder
folder = Path(sys.argv[1])
noise = jax.random.normal(jax.random.key(0), (2_000_000,))
checkpoints = CheckpointFolder(folder)
for step, size in ((1, 1000), (2, noise.size)):
    try:
        checkpoints.save(step, {"parameters": {"x": noise[:size]}})
        checkpoints.wait()
    except ValueError as error:
        print(error)
print(checkpoints.newest(), sorted(path.name for path in folder.iterdir()))
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("a small file system can't be mounted without unshare")
    python = [sys.executable, "-c", FILLS_THE_DISK, str(tmp_path)]
    mount = f'mount -t tmpfs -o size=4m tmpfs {tmp_path} || exit 77; exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", *python]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    assert (done.returncode, done.stderr) == (0, "")
    failure, after = done.stdout.splitlines()
    assert f"{tmp_path}: checkpoint 2 could not be written" in failure and "No space left on device" in failure
    assert "It needs 8,000,000 bytes, " in failure and "checkpoint 1 is untouched" in failure
    assert after == "1 ['1']"
