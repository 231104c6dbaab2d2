"""First values of new rows against numpy loops, closed forms and transformers' resize."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtool.config import MeshConfig
from jaxtool.models import (
    CatalogChange,
    LanguageModel,
    RowInitialiser,
    TextDistribution,
    TokenMean,
    catalog_change,
    parameters,
    with_catalog,
)
from jaxtool.models.row_programs import moved_rows, row_moments
from jaxtool.parallel import make_mesh
from tests.tiny_models import CONFIG, GPTJ_CONFIG, random_model

V, KNOWN = 100, 90
GPTJ = dataclasses.replace(GPTJ_CONFIG, text_tokens=KNOWN)
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)
MESH = MeshConfig(data=2, fsdp=2, model=2)

RNG = np.random.default_rng(0)
NAMES = [RNG.integers(KNOWN, size=size).tolist() for size in (3, 1, 7, 2)]
DOCUMENTS = [RNG.integers(KNOWN, size=size).tolist() for size in (40, 9, 1, 23)]


def all_new(count: int) -> CatalogChange:
    return catalog_change([], [f"<<tool {i}>>" for i in range(count)])


def rows_of(model: LanguageModel, path: str) -> np.ndarray:
    first = model.config.vocab_size
    return np.asarray(parameters(model)[path])[first : first + model.config.num_tools]


def running_means(table: np.ndarray, token_ids: Sequence[Sequence[int]]) -> np.ndarray:
    """float32 sums, one row after the other."""
    means = []
    for ids in token_ids:
        total = np.zeros(table.shape[1:], np.float32)
        for row in ids:
            total = total + table[row].astype(np.float32)
        means.append(total / np.float32(len(ids)))
    return np.stack(means)


def assert_close(found: Any, expected: np.ndarray) -> None:
    """The last bit is the division's."""
    np.testing.assert_allclose(found, expected, rtol=2.0**-22)


def test_embedding_from_names_and_head_from_documents() -> None:
    mesh = make_mesh(MESH)
    strategies = {"embedding": TokenMean(token_ids=NAMES), "head": TokenMean(token_ids=DOCUMENTS, text="document")}
    model = random_model(GPTJ)
    grown = with_catalog(model, all_new(4), strategies)
    with jax.set_mesh(mesh):
        sharded = with_catalog(random_model(GPTJ, mesh=mesh), all_new(4), strategies)
    for path, token_ids in (("embedding_vd", NAMES), ("head_vd", DOCUMENTS), ("head_bias_v", DOCUMENTS)):
        assert_close(rows_of(grown, path), running_means(np.asarray(parameters(model)[path]), token_ids))
        np.testing.assert_array_equal(rows_of(sharded, path), rows_of(grown, path), err_msg=path)


def test_many_tools_with_texts_of_any_length() -> None:
    rng = np.random.default_rng(1)
    table = rng.standard_normal((50, 3)).astype(np.float32)
    token_ids = [rng.integers(50, size=size).tolist() for size in rng.integers(1, 40, size=1100)]
    rows = TokenMean(token_ids=token_ids).rows("embedding_vd", jnp.asarray(table), 50, all_new(1100))
    assert_close(rows, running_means(table, token_ids))


def test_rows_of_tools_that_stay_are_not_asked_for() -> None:
    grown = with_catalog(random_model(TIED), all_new(3), TokenMean(token_ids=NAMES[:3]))
    change = catalog_change([f"<<tool {i}>>" for i in range(3)], ["new", "<<tool 2>>", "<<tool 0>>"])
    changed = with_catalog(grown, change, TokenMean(token_ids=[NAMES[3], [], []]))
    expected = [
        running_means(np.asarray(grown.embedding_vd[...]), NAMES[3:])[0],
        *rows_of(grown, "embedding_vd")[[2, 0]],
    ]
    np.testing.assert_array_equal(rows_of(changed, "embedding_vd"), expected)


def text_table(width: int = 5) -> np.ndarray:
    """KNOWN rows of tokens with correlated columns off zero; rows that no token has are enormous."""
    rng = np.random.default_rng(2)
    table = rng.standard_normal((V, width)) @ rng.standard_normal((width, width)) + rng.standard_normal(width)
    table[KNOWN:] = 1e6
    return table.astype(np.float32)


def drawn(table: np.ndarray, count: int, **settings: Any) -> np.ndarray:
    rows = TextDistribution(**settings).rows("embedding_vd", jnp.asarray(table), KNOWN, all_new(count))
    assert rows.dtype == table.dtype and rows.shape == (count, table.shape[1])
    return np.asarray(rows, np.float64)


def assert_moments(rows: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> None:
    """Within five standard errors of the mean and of each entry of the covariance of normal samples."""
    variance = np.diag(covariance)
    assert (abs(rows.mean(axis=0) - mean) < 5 * np.sqrt(variance / len(rows)) + 1e-7).all()
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / len(rows))
    assert (abs(np.cov(rows.T, bias=True) - covariance) < 5 * error).all()


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_draws_have_the_moments_of_the_text_rows(scale: float) -> None:
    table = text_table()
    text = table[:KNOWN].astype(np.float64)
    assert_moments(drawn(table, 20_000, scale=scale), text.mean(axis=0), scale * np.cov(text.T, bias=True))


def test_moments_of_a_large_table() -> None:
    """More rows than a block, a mean far off zero: sums in float32 must not lose the covariance."""
    rng = np.random.default_rng(3)
    table = (50 + rng.standard_normal((5000, 4)) * [1, 2, 0.1, 5]).astype(np.float32)
    mean, covariance = row_moments(jnp.asarray(table), 4321)
    exact = table[:4321].astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(axis=0), rtol=1e-6)
    spread = exact.std(axis=0)
    np.testing.assert_allclose(
        covariance, np.cov(exact.T, bias=True), rtol=1e-5, atol=1e-5 * spread.max() * spread.min()
    )


def test_a_draw_depends_on_seed_parameter_and_tool() -> None:
    table = text_table()
    rows = drawn(table, 600, scale=1)
    np.testing.assert_array_equal(drawn(table, 3, scale=1), rows[:3])
    assert len(np.unique(rows, axis=0)) == 600
    assert (drawn(table, 600, scale=1, seed=1) != rows).mean() > 0.99
    other = TextDistribution(scale=1).rows("head_vd", jnp.asarray(table), KNOWN, all_new(600))
    assert (np.asarray(other) != rows).mean() > 0.99
    # A tool that comes later takes the row of its own id, not again that of the first tool.
    later = TextDistribution(scale=1).rows(
        "embedding_vd", jnp.asarray(table), KNOWN, CatalogChange(old_count=5, sources=(*range(5), None))
    )
    np.testing.assert_array_equal(later, rows[5:6])
    mean = table[:KNOWN].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(drawn(table, 600, scale=4) - mean, 2 * (rows - mean), atol=1e-5)
    np.testing.assert_allclose(drawn(table, 2, scale=0), [mean] * 2, rtol=1e-6)


def test_a_singular_covariance() -> None:
    constant = np.full((V, 4), 0.7, np.float32)
    np.testing.assert_allclose(drawn(constant, 50, scale=1), 0.7, rtol=1e-6)
    # Two different rows span one direction; nothing is drawn across it.
    table = text_table(8)
    table[:KNOWN] = np.where(np.arange(KNOWN)[:, None] % 2, table[0], table[1])
    text = table[:KNOWN].astype(np.float64)
    across = np.linalg.svd(text - text.mean(axis=0))[2][1:]
    rows = drawn(table, 500, scale=1) - text.mean(axis=0)
    assert rows.std() > 0.1 and abs(rows @ across.T).max() < 0.02 * rows.std()


def test_draws_on_a_mesh() -> None:
    mesh = make_mesh(MESH)
    strategy = TextDistribution(scale=1.0)
    plain = with_catalog(random_model(GPTJ), all_new(4), strategy)
    with jax.set_mesh(mesh):
        sharded = with_catalog(random_model(GPTJ, mesh=mesh), all_new(4), strategy)
    for path in ("embedding_vd", "head_vd", "head_bias_v"):
        assert rows_of(plain, path).std(axis=0).min() > 0.01
        np.testing.assert_allclose(rows_of(sharded, path), rows_of(plain, path), atol=1e-5, err_msg=path)


def test_bfloat16_rows_differ() -> None:
    table = text_table().astype(jnp.bfloat16)
    assert len(np.unique(drawn(table, 100).astype(np.float64), axis=0)) > 50


@pytest.mark.torch
def test_like_transformers() -> None:
    """Both samples have the mean of the old rows and 1e-9 of their covariance."""
    torch = pytest.importorskip("torch", reason="the parity oracle torch is not installed")
    import transformers

    width, count = 6, 4000
    config = transformers.GPTJConfig(
        vocab_size=KNOWN, n_embd=width, n_layer=0, n_head=1, rotary_dim=2, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    reference = transformers.GPTJForCausalLM(config)
    model = random_model(dataclasses.replace(GPTJ, hidden_size=width, intermediate_size=4, num_hidden_layers=1))
    paths = {"embedding_vd": "transformer.wte.weight", "head_vd": "lm_head.weight", "head_bias_v": "lm_head.bias"}
    old = {path: np.asarray(parameters(model)[path])[:KNOWN] for path in paths}
    with torch.no_grad():
        for path, name in paths.items():
            reference.get_parameter(name).copy_(torch.tensor(old[path]))
    reference.resize_token_embeddings(KNOWN + count, mean_resizing=True)
    grown = with_catalog(model, all_new(count), TextDistribution(scale=1e-9))
    for path, name in paths.items():
        theirs = reference.get_parameter(name).detach().numpy()[KNOWN:].astype(np.float64)
        ours = rows_of(grown, path).astype(np.float64)
        mean = old[path].astype(np.float64).mean(axis=0)
        if path == "head_bias_v":  # theirs has 1e-9 of the standard deviation, ours of the variance
            np.testing.assert_allclose(theirs, mean, rtol=1e-6)
            assert abs(ours.mean() - mean) < 1e-6
            assert ours.std() == pytest.approx(np.sqrt(1e-9) * old[path].std(), rel=0.1)
            continue
        covariance = 1e-9 * np.cov(old[path].astype(np.float64).T, bias=True)
        for rows in (theirs, ours):
            assert_moments(rows, mean, covariance)


@pytest.mark.parametrize(
    ("config", "initialiser", "words"),
    [
        (CONFIG, None, "4 tools are added, expected an initialiser for their rows"),
        (
            CONFIG,
            {"head": TokenMean(token_ids=NAMES)},
            "initialisers for head, expected embedding and head: the head is untied and needs rows of its own",
        ),
        (CONFIG, {"embedding": TextDistribution()}, "initialisers for embedding, expected embedding and head"),
        (CONFIG, {}, "initialisers for nothing, expected embedding and head"),
        (
            TIED,
            {"embedding": TextDistribution(), "head": TextDistribution()},
            "initialisers for embedding, head, expected embedding: the head is tied to the embedding",
        ),
        (CONFIG, TokenMean(token_ids=NAMES[:3]), "tokens of 3 names, expected those of all 4 tools"),
        (
            CONFIG,
            TokenMean(token_ids=[[1], [2], [], [3]], text="document"),
            "tool 2: its document has no token",
        ),
        (GPTJ, TokenMean(token_ids=[[1], [2], [3], [90]]), "tool 3: token ids 90 to 90 are outside the 90 rows of"),
        (CONFIG, TokenMean(token_ids=[[1], [2], [3], [[4]]]), "tool 3: its name is [[4]], expected token ids"),  # type: ignore[list-item]
    ],
)
def test_what_is_missing_or_surplus(
    config: Any, initialiser: RowInitialiser | dict[str, RowInitialiser] | None, words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        with_catalog(random_model(config), all_new(4), initialiser)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_scales_that_make_no_sense(scale: float) -> None:
    with pytest.raises(ValueError, match=f"scale is {scale}, expected a finite number from 0 up"):
        TextDistribution(scale=scale)


def test_no_device_holds_more_than_its_share() -> None:
    """At the size of Llama 3 with 46,985 tools: two all-to-alls, and buffers of the size of a device's own part."""
    mesh = make_mesh(MESH)
    layout = NamedSharding(mesh, PartitionSpec("model", "fsdp"))
    old_rows, rows, width = 128_256, 175_360, 4096
    with jax.set_mesh(mesh):
        matrix = jax.ShapeDtypeStruct((old_rows, width), jnp.float32, sharding=layout)
        source = jax.ShapeDtypeStruct((rows,), jnp.int32)
        compiled = moved_rows.lower(matrix, source, out=layout.spec).compile()
    program, memory = compiled.as_text(), compiled.memory_analysis()
    assert program.count(" all-to-all(") == 2 and "all-gather" not in program and "all-reduce" not in program
    share = rows * width * 4 // 4  # over fsdp and model; data holds copies
    assert memory.output_size_in_bytes == pytest.approx(share, rel=0.01)
    assert memory.temp_size_in_bytes < 2.1 * share
