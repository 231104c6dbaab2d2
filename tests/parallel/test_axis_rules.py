"""The table from logical axes to mesh axes."""

import pytest
from jax.sharding import PartitionSpec

from jaxtool.parallel import AxisRules


def test_defaults() -> None:
    rules = AxisRules()
    assert rules.spec("vocabulary", "embed") == PartitionSpec("model", "fsdp")
    assert rules.spec("batch", "sequence", "activation") == PartitionSpec(("data", "fsdp"), None, None)
    assert rules.spec("layer", "embed", "heads", "head_size") == PartitionSpec(None, "fsdp", "model", None)
    assert rules.spec(None, "mlp") == PartitionSpec(None, "model")
    assert rules.spec() == PartitionSpec()


def test_unknown_axis() -> None:
    with pytest.raises(ValueError, match=r"unknown logical axis 'width', expected one of batch, sequence, "):
        AxisRules().spec("batch", "width")


@pytest.mark.parametrize("name", ["spec", "fit", "__class__"])
def test_only_fields_are_axes(name: str) -> None:
    with pytest.raises(ValueError, match="unknown logical axis"):
        AxisRules().spec(name)


@pytest.mark.parametrize(
    ("rules", "axes", "clash"),
    [
        (AxisRules(), ("heads", "mlp"), ("heads", "mlp", "model")),
        (AxisRules(), ("batch", "embed"), ("batch", "embed", "fsdp")),
        (AxisRules(sequence="model"), ("sequence", "heads"), ("sequence", "heads", "model")),
        (AxisRules(layer=("fsdp", "model")), ("layer", "vocabulary"), ("layer", "vocabulary", "model")),
    ],
)
def test_two_axes_on_one_mesh_axis(rules: AxisRules, axes: tuple[str, str], clash: tuple[str, ...]) -> None:
    words = "logical axes '{}' and '{}' both map to mesh axis '{}'".format(*clash)
    with pytest.raises(ValueError, match=words):
        rules.spec(*axes)


def test_replicated_axes_do_not_clash() -> None:
    assert AxisRules().spec("sequence", "activation", "head_size", None) == PartitionSpec(None, None, None, None)


SIZES = {"vocabulary": 256, "embed": 64, "heads": 8, "kv_heads": 4, "mlp": 96}


def test_fit_keeps_what_divides() -> None:
    assert AxisRules().fit({"data": 3, "fsdp": 4, "model": 4}, SIZES) == (AxisRules(), ())


@pytest.mark.parametrize("heads", [{"heads": 6, "kv_heads": 2}, {"heads": 8, "kv_heads": 2}])
def test_fit_drops_query_and_key_heads_together(heads: dict[str, int]) -> None:
    rules, notes = AxisRules().fit({"data": 1, "fsdp": 1, "model": 4}, SIZES | heads)
    assert rules == AxisRules(heads=None, kv_heads=None)
    assert len(notes) == 2
    assert any("kv_heads (2) is not divisible by 4 devices" in note for note in notes)
    assert all("replicated" in note for note in notes)


def test_fit_drops_single_axes() -> None:
    rules, notes = AxisRules().fit({"data": 1, "fsdp": 3, "model": 5}, SIZES | {"heads": 10, "kv_heads": 5})
    assert rules == AxisRules(vocabulary=None, embed=None, mlp=None)
    assert [note.split(" ")[0] for note in notes] == ["vocabulary", "embed", "mlp"]


def test_fit_multiplies_the_parts_of_an_axis() -> None:
    own = AxisRules(mlp=("fsdp", "model"), embed=None)
    assert own.fit({"fsdp": 2, "model": 3}, {"mlp": 12})[0] == own
    assert own.fit({"fsdp": 2, "model": 3}, {"mlp": 9})[0].mlp is None
    assert own.fit({"fsdp": 2, "model": 3}, {"mlp": 8})[0].mlp is None


def test_fit_ignores_axes_that_the_mesh_lacks() -> None:
    assert AxisRules().fit({}, SIZES | {"embed": 7}) == (AxisRules(), ())
