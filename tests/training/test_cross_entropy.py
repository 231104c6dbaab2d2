"""Cross-entropy and its gradients against a float64 sum written from the formula, on one device and on eight."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxtool.config import MeshConfig
from jaxtool.models import LanguageModelConfig
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.training.cross_entropy import cross_entropy
from jaxtool.training.cross_entropy_loop import CrossEntropy
from tests.tiny_models import CONFIG, GPTJ_CONFIG

RULES = AxisRules()
D, P, A = 32, 7, 3
CONFIGS: dict[str, LanguageModelConfig] = {
    "text": CONFIG,  # every row is predicted
    "tools": dataclasses.replace(CONFIG, num_tools=9),  # 19 rows of padding behind the tools
    # Two unknown text rows before the tools; a bias.
    "biased": dataclasses.replace(GPTJ_CONFIG, vocab_size=102, text_tokens=100, num_tools=9),
    # 160 tools in 256 rows: a block of theirs lies on both devices of an axis, unevenly.
    "many tools": dataclasses.replace(CONFIG, vocab_size=60, num_tools=160),
}
Arrays = dict[str, np.ndarray]


def predicted(config: LanguageModelConfig) -> np.ndarray:
    text = config.text_tokens or config.vocab_size
    return np.r_[0:text, config.vocab_size : config.vocab_size + config.num_tools]


def example(config: LanguageModelConfig, rows: int = 3, *, seed: int = 0) -> tuple[Arrays, np.ndarray, np.ndarray]:
    """Arrays of the head and `hidden`, targets and weights. The middle row and places in others aren't supervised."""
    rng = np.random.default_rng(seed)
    arrays = {"hidden": rng.standard_normal((rows, P, D)), "matrix": 0.3 * rng.standard_normal((config.rows, D))}
    if config.head_bias:
        arrays["bias"] = rng.standard_normal(config.rows)
    arrays = {name: value.astype(np.float32) for name, value in arrays.items()}
    targets = np.stack([rng.permutation(predicted(config))[:A] for _ in range(rows * P)]).reshape(rows, P, A)
    weights = rng.random((rows, P, A)) * (np.arange(A) < rng.integers(1, A + 1, (rows, P, 1)))
    weights = weights / weights.sum(axis=-1, keepdims=True) * (rng.random((rows, P, 1)) < 0.6)
    weights[rows // 2] = 0
    # What isn't supervised may hold anything.
    arrays["hidden"][~weights.any(axis=-1)] = np.nan
    return arrays, targets.astype(np.int32), weights.astype(np.float32)


def by_formula(
    config: LanguageModelConfig, arrays: Arrays, targets: np.ndarray, weights: np.ndarray, z_loss: float = 0.0
) -> tuple[dict[str, float], Arrays]:
    """The sums, and the gradients of their loss, in float64."""
    hidden, matrix = (arrays[name].astype(np.float64) for name in ("hidden", "matrix"))
    columns = predicted(config)
    sums = {"loss": 0.0, "squared_norm": 0.0, "right": 0.0, "count": 0.0}
    gradients = {name: np.zeros(value.shape) for name, value in arrays.items()}
    for b, p in zip(*np.nonzero(weights.any(axis=-1)), strict=True):
        logits = np.full(config.rows, -np.inf)
        logits[columns] = matrix[columns] @ hidden[b, p]
        if "bias" in arrays:
            logits += arrays["bias"]
        norm = logits.max() + np.log(np.exp(logits - logits.max()).sum())
        share = np.zeros(config.rows)
        share[targets[b, p]] = weights[b, p]
        assert share.sum() == pytest.approx(1, abs=1e-6)
        sums["loss"] += -(share[columns] * (logits - norm)[columns]).sum() + z_loss * norm**2
        sums["squared_norm"] += norm**2
        sums["right"] += share[logits.argmax()] > 0
        sums["count"] += 1
        slope = np.exp(logits - norm) * (share.sum() + 2 * z_loss * norm) - share
        gradients["hidden"][b, p] = slope @ matrix
        gradients["matrix"] += np.outer(slope, hidden[b, p])
        if "bias" in arrays:
            gradients["bias"] += slope
    return sums, gradients


def computed(
    setup: CrossEntropy, arrays: dict[str, Any], targets: Any, weights: Any, names: tuple[str, ...] | None = None
) -> tuple[dict[str, float], dict[str, jax.Array]]:
    """The same by `cross_entropy`; gradients of the arrays `names` (None: of all)."""
    names = tuple(arrays) if names is None else names
    sums, gradients = _computed(setup, names, arrays, targets, weights)
    return {name: float(value) for name, value in vars(sums).items()}, gradients


@jax.jit(static_argnums=(0, 1))
def _computed(setup: CrossEntropy, names: tuple[str, ...], arrays: Any, targets: Any, weights: Any) -> Any:
    def loss(some: dict[str, jax.Array]) -> Any:
        head = {**arrays, **some}
        hidden = head.pop("hidden").astype(setup.config.compute_dtype)
        sums = cross_entropy(setup, hidden, head, targets, weights)
        return sums.loss, sums

    (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)({name: arrays[name] for name in names})
    return sums, gradients


def assert_close(found: dict[str, Any], expected: Arrays, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = np.linalg.norm(value)
        assert scale > 0, name
        error = np.linalg.norm(np.asarray(found[name], np.float64) - value) / scale
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("name", "chunk", "z_loss"),
    [("text", 0, 0.0), ("tools", 1, 0.0), ("tools", 4, 0.01), ("biased", 5, 0.1), ("biased", 1000, 0.0)],
)
def test_sums_and_gradients(name: str, chunk: int, z_loss: float) -> None:
    config = CONFIGS[name]
    arrays, targets, weights = example(config)
    expected, slopes = by_formula(config, arrays, targets, weights, z_loss)
    assert 4 < expected["count"] < 2 * P
    setup = CrossEntropy(config=config, rules=RULES, chunk=chunk, z_loss=z_loss)
    found, gradients = computed(setup, arrays, targets, weights)
    assert found == pytest.approx(expected, rel=1e-6)
    assert_close(gradients, slopes, 1e-6)
    masked = np.setdiff1d(np.arange(config.rows), predicted(config))
    for part in gradients.keys() - {"hidden"}:
        assert not np.asarray(gradients[part])[masked].any()
    assert not np.asarray(gradients["hidden"])[~weights.any(axis=-1)].any()


def test_nothing_is_supervised() -> None:
    config = CONFIGS["biased"]
    arrays, targets, weights = example(config)
    setup = CrossEntropy(config=config, rules=RULES, chunk=5, z_loss=0.1)
    found, gradients = computed(setup, arrays, targets, 0 * weights)
    assert found == {"loss": 0, "squared_norm": 0, "right": 0, "count": 0}
    assert gradients.keys() == arrays.keys()
    assert not any(np.asarray(value).any() for value in gradients.values())


def test_a_model_that_is_sure() -> None:
    """Logits of thousands, and losses from 1e-6 to 1e4: each is right to float32's accuracy of the logits."""
    config = CONFIGS["text"]
    setup = CrossEntropy(config=config, rules=RULES, chunk=5, z_loss=0.0)
    matrix = np.zeros((config.rows, D), np.float32)
    matrix[:D] = np.eye(D)
    targets, weights = np.full((3, P, A), 3, np.int32), np.zeros((3, P, A), np.float32)
    targets[..., 1:] = 0
    for top, others, expected in (
        (5000.0, 4980.0, math.log1p((D - 1) * math.exp(-20.0))),  # the 68 rows of zeros are far below
        (-5000.0, 4980.0, 9980.0 + math.log(D - 1)),
        (0.0, 0.0, math.log(config.rows)),
    ):
        hidden = np.full((3, P, D), others, np.float32)
        hidden[..., 3] = top
        weights[1, 2, 0] = 1
        found, gradients = computed(setup, {"hidden": hidden, "matrix": matrix}, targets, weights)
        assert found["loss"] == pytest.approx(expected, rel=1e-6, abs=1e-7)
        assert all(np.isfinite(value).all() for value in gradients.values())


@pytest.mark.parametrize("wrong", [-1, 100, 101, 111, 127, 128, 10**6])
def test_a_target_that_cannot_be_predicted(wrong: int) -> None:
    config = CONFIGS["biased"]
    arrays, targets, weights = example(config)
    setup = CrossEntropy(config=config, rules=RULES, chunk=5)
    b, p = (places[0] for places in np.nonzero(weights.all(axis=-1)))
    changed = targets.copy()
    changed[~weights.astype(bool)] = wrong  # nobody asks for these
    found, _ = computed(setup, arrays, changed, weights)
    assert found == pytest.approx(by_formula(config, arrays, targets, weights)[0], rel=1e-6)
    changed[b, p, 1] = wrong
    found, gradients = computed(setup, arrays, changed, weights)
    assert found["loss"] == math.inf
    assert all(np.isfinite(value).all() for value in gradients.values())
    masked = np.setdiff1d(np.arange(config.rows), predicted(config))
    assert not np.asarray(gradients["matrix"])[masked].any()


def test_the_lowest_of_equal_logits_is_the_answer() -> None:
    config = CONFIGS["tools"]
    setup = CrossEntropy(config=config, rules=RULES, chunk=4)
    matrix = np.zeros((config.rows, D), np.float32)
    matrix[[40, 70, 105]] = 1  # names of the same tokens give the same rows
    arrays = {"hidden": np.ones((3, P, D), np.float32), "matrix": matrix}
    weights = np.zeros((3, P, 1), np.float32)
    weights[0, :3] = 1
    targets = np.zeros((3, P, 1), np.int32)
    targets[0, :3, 0] = [70, 40, 105]
    found, _ = computed(setup, arrays, targets, weights, ())
    assert (found["right"], found["count"]) == (1, 3)


@pytest.mark.parametrize("name", ["tools", "biased", "many tools"])
def test_gradient_of_the_tool_rows_alone(name: str) -> None:
    config = CONFIGS[name]
    arrays, targets, weights = example(config)
    expected, slopes = by_formula(config, arrays, targets, weights, 0.01)
    setup = CrossEntropy(config=config, rules=RULES, chunk=5, z_loss=0.01)
    tools = setup.tools
    blocks = {f"tool_{part}": tools.read(jnp.asarray(arrays[part])) for part in ("matrix", "bias") if part in arrays}
    found, gradients = computed(setup, arrays | blocks, targets, weights, ("hidden", *blocks))
    assert found == pytest.approx(expected, rel=1e-6)
    assert all(gradients[part].shape[0] == tools.size for part in blocks)
    assert not any(np.asarray(gradients[part])[tools.count :].any() for part in blocks)
    rows = slice(config.vocab_size, config.vocab_size + config.num_tools)
    of_tools = {part: slopes[part.removeprefix("tool_")][rows] for part in blocks}
    counted = {part: value if part == "hidden" else value[: tools.count] for part, value in gradients.items()}
    assert_close(counted, {"hidden": slopes["hidden"]} | of_tools, 1e-6)


def test_bfloat16_products() -> None:
    """Inputs are rounded, products summed in float32; the gradient in the logits is rounded once."""
    config = dataclasses.replace(CONFIGS["biased"], compute_dtype="bfloat16")
    arrays, targets, weights = example(config)
    rounded = {name: np.asarray(value.astype(jnp.bfloat16), np.float32) for name, value in arrays.items()}
    expected, slopes = by_formula(
        config, arrays | {"matrix": rounded["matrix"], "hidden": rounded["hidden"]}, targets, weights
    )
    setup = CrossEntropy(config=config, rules=RULES, chunk=2)
    found, gradients = computed(setup, arrays, targets, weights)
    assert found == pytest.approx(expected, rel=1e-6)
    assert {value.dtype for value in gradients.values()} == {jnp.dtype("float32")}
    assert_close(gradients, slopes, 3e-3)
    assert_close({"bias": gradients["bias"]}, {"bias": slopes["bias"]}, 1e-6)  # no product, never rounded


def products(setup: CrossEntropy, arrays: Any, targets: Any, weights: Any, names: tuple[str, ...]) -> list[str]:
    """Shapes of the results of all matrix products in the program, as it is handed to the compiler."""
    text = _computed.lower(setup, names, arrays, targets, weights).as_text()
    return re.findall(r"stablehlo\.dot_general .* -> tensor<(\w+)xf32>", text)


def test_only_what_is_asked_for_is_computed() -> None:
    config = dataclasses.replace(CONFIGS["biased"], vocab_size=300, text_tokens=0)
    arrays, targets, weights = example(config)
    setup = CrossEntropy(config=config, rules=RULES, chunk=5)
    blocks = {f"tool_{part}": setup.tools.read(jnp.asarray(arrays[part])) for part in ("matrix", "bias")}
    logits, hidden, matrix, rows = "5x384", "5x32", "384x32", "128x32"
    for names, expected in {
        (): [logits],
        ("hidden",): [logits, hidden],
        ("bias",): [logits],
        ("tool_bias", "tool_matrix"): [logits, rows],
        ("hidden", "tool_matrix"): [logits, hidden, rows],
        ("hidden", "matrix"): [logits, hidden, matrix],
    }.items():
        assert products(setup, arrays | blocks, targets, weights, names) == expected, names
    with_loop = jax.jit(lambda: cross_entropy(setup, arrays["hidden"], {"matrix": arrays["matrix"]}, targets, weights))
    assert with_loop.lower().as_text().count("dot_general") == 1


def test_memory_does_not_grow_with_positions() -> None:
    """Compiled as for production. What grows by a position is its hidden state, not its logits."""
    v, d, chunk = 8192, 16, 32
    config = dataclasses.replace(CONFIG, vocab_size=v, hidden_size=d)
    setup = CrossEntropy(config=config, rules=RULES, chunk=chunk)
    jax.config.update("jax_disable_most_optimizations", False)  # quick_compilation sets it back

    def temporary(positions: int, columns: int = v) -> int:
        arrays = {
            "hidden": jax.ShapeDtypeStruct((2, positions // 2, d), jnp.float32),
            "matrix": jax.ShapeDtypeStruct((columns, d), jnp.float32),
        }
        ids, weights = (jax.ShapeDtypeStruct((2, positions // 2, 1), kind) for kind in (jnp.int32, jnp.float32))
        wide = dataclasses.replace(setup, config=dataclasses.replace(config, vocab_size=columns))
        compiled = _computed.lower(wide, ("hidden", "matrix"), arrays, ids, weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many, wide = temporary(256), temporary(4096), temporary(4096, 2 * v)
    logits, matrix = 4 * chunk * v, 4 * v * d
    assert few <= 3 * logits + 3 * matrix
    assert many - few <= (4096 - 256) * (4 * d + 64) * 2
    assert wide - many <= 3 * logits + 3 * matrix
    assert many < 4 * 4096 * v / 8


def test_chunk_that_is_chosen() -> None:
    """512 MiB of logits, or as many bytes as the gradient of the matrix takes."""
    config = dataclasses.replace(CONFIG, vocab_size=175_360, hidden_size=576)
    setup = CrossEntropy(config=config, rules=RULES)
    assert setup.chunk_size(8192, 175_360, matrix_gradient=True) == 640
    assert 512 * 2**20 / 1.2 < 4 * 640 * 175_360 < 512 * 2**20
    assert setup.chunk_size(8192, 175_360 // 4, matrix_gradient=True) == 2944
    assert setup.chunk_size(100, 175_360, matrix_gradient=True) == 100
    wide = dataclasses.replace(setup, config=dataclasses.replace(config, hidden_size=4096))
    assert wide.chunk_size(8192, 175_360, matrix_gradient=True) == 4096
    assert wide.chunk_size(8192, 175_360, matrix_gradient=False) == 640
    assert setup.chunk_size(8192, 10**7, matrix_gradient=False) == 128
    assert dataclasses.replace(setup, chunk=7).chunk_size(8192, 175_360, matrix_gradient=True) == 7


def on_mesh(setup: CrossEntropy, arrays: Arrays, targets: np.ndarray, weights: np.ndarray) -> tuple[Any, Any, Any]:
    """The arrays in the layouts of a model and a batch on the active mesh."""
    spec, mesh = setup.rules.spec, jax.sharding.get_mesh()
    layouts = {
        "hidden": spec("batch", None, None),
        "matrix": spec("vocabulary", "embed"),
        "bias": spec("vocabulary"),
        "tool_matrix": setup.tools.spec("embed"),
        "tool_bias": setup.tools.spec(),
    }
    rows = NamedSharding(mesh, layouts["hidden"])
    placed = {name: jax.device_put(value, NamedSharding(mesh, layouts[name])) for name, value in arrays.items()}
    return placed, jax.device_put(targets, rows), jax.device_put(weights, rows)


@pytest.mark.parametrize(
    ("name", "sizes", "rules"),
    [
        ("biased", (2, 2, 2), RULES),
        ("many tools", (2, 2, 2), RULES),
        ("many tools", (1, 2, 4), dataclasses.replace(RULES, batch=("data",))),  # embed is cut, the batch isn't
        ("biased", (2, 2, 2), dataclasses.replace(RULES, vocabulary=None, embed=None)),
    ],
)
@pytest.mark.parametrize("part", ["all", "tools"])
def test_eight_devices(name: str, sizes: tuple[int, int, int], rules: AxisRules, part: str) -> None:
    config = CONFIGS[name]
    arrays, targets, weights = example(config, 8)
    assert len(set(weights.any(axis=-1).sum(axis=-1).tolist())) > 2  # devices have different numbers of positions
    expected, slopes = by_formula(config, arrays, targets, weights, 0.01)
    setup = CrossEntropy(config=config, rules=rules, chunk=3, z_loss=0.01)
    data, fsdp, model = sizes
    with jax.set_mesh(make_mesh(MeshConfig(data=data, fsdp=fsdp, model=model))):
        placed = on_mesh(setup, arrays, targets, weights)
        names = tuple(arrays)
        if part == "tools":
            blocks = {f"tool_{n}": setup.tools.read(placed[0][n]) for n in arrays if n != "hidden"}
            placed[0].update(blocks)
            names = ("hidden", *blocks)
        found, gradients = computed(setup, *placed, names)
        for n in names:
            assert gradients[n].sharding.is_equivalent_to(placed[0][n].sharding, gradients[n].ndim), n
    assert found == pytest.approx(expected, rel=1e-6)
    if part == "tools":
        rows = slice(config.vocab_size, config.vocab_size + config.num_tools)
        slopes = {n: slopes["hidden"] if n == "hidden" else slopes[n.removeprefix("tool_")][rows] for n in names}
        gradients = {n: np.asarray(value)[: len(slopes[n])] for n, value in gradients.items()}
    assert_close(gradients, slopes, 1e-5)


def collectives(text: str) -> list[tuple[str, int, bool]]:
    """Kind, elements of the result and whether it is inside a loop, of every collective of a compiled program."""
    bodies = set(re.findall(r"while\(.*body=(%[\w.\-]+)", text))
    found, computation = [], ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            computation = line.removeprefix("ENTRY ").split(" ")[0]
        made = re.search(
            r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(", line
        )
        if made:
            sizes = (math.prod(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\]", made[1]))
            found.append((made[2], max(sizes, default=1), computation in bodies))
    return found


def test_what_crosses_devices() -> None:
    """No logits: in the loop a few numbers for each position, outside the head and the gradients, once."""
    config = dataclasses.replace(CONFIGS["tools"], vocab_size=1000)
    rows, chunk = 1024, 6
    assert config.rows == rows
    arrays, targets, weights = example(config, 8)
    setup = CrossEntropy(config=config, rules=RULES, chunk=chunk)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, model=2))):
        placed = on_mesh(setup, arrays, targets, weights)
        text = _computed.lower(setup, ("hidden", "matrix"), *placed).compile().as_text()
    found = collectives(text)
    inside = [size for _, size, loop in found if loop]
    assert inside and max(inside) <= 2 * chunk
    outside = sorted((size for _, size, loop in found if not loop), reverse=True)
    # The head is gathered and its gradient summed, over `data` and over `fsdp`: three times rows of one device.
    assert [size for size in outside if size >= rows * D // 4] in (
        [rows * D // 2] * 3,
        [rows * D // 2] * 2 + [rows * D // 4],
        [rows * D // 2] + [rows * D // 4] * 2,
    )
    hidden = 2 * -(-2 * P // chunk) * chunk * D
    assert max(size for size in outside if size < rows * D // 4) <= hidden
