"""What one device does for `cross_entropy`: a loop over chunks of its positions with the columns that it holds.

Devices along `model` hold different columns of the same positions and exchange, chunk by chunk, a few numbers for each
position, never logits. Devices along `data` and `fsdp` hold different positions and add up, once, sums and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtool.models import LanguageModelConfig, ToolBlock
from jaxtool.parallel import AxisRules, active_mesh_axes
from jaxtool.parallel.axis_rules import MeshAxes

# Bytes of float32 logits that a device may hold at a time, unless its gradient of the head's matrix takes more.
LOGITS_BYTES = 512 * 2**20
_CHUNK_MULTIPLE = 128


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """How the loss is computed: everything that is no array.

    Attributes:
        config: the model's; says which columns can be predicted and in which dtype matrices are multiplied.
        rules: layout of the arrays on the active mesh.
        chunk: positions of a device whose logits exist at a time; 0: see `chunk_size`.
        z_loss: weight of the squared log-normaliser.
    """

    config: LanguageModelConfig
    rules: AxisRules
    chunk: int = 0
    z_loss: float = 0.0

    def chunk_size(self, positions: int, columns: int, *, matrix_gradient: bool) -> int:
        """Positions of a chunk on a device that has so many of them, and so many columns.

        If not given: as many as have `LOGITS_BYTES` of logits. Where the gradient of the matrix is summed, as many
        bytes as that takes, if these are more: every chunk reads and writes the whole of it, and only at that size do
        products take longer than memory traffic on all accelerators.
        """
        if self.chunk:
            return min(self.chunk, positions)
        chunk = LOGITS_BYTES // (4 * columns) // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
        width = self.config.hidden_size if matrix_gradient else 0
        return min(max(chunk, width, _CHUNK_MULTIPLE), positions)

    @property
    def tools(self) -> ToolBlock:
        """Where the tool rows lie in the head."""
        return ToolBlock(first=self.config.vocab_size, count=self.config.num_tools, rules=self.rules)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums over supervised positions, float32 scalars.

    Attributes:
        loss: -sum_a w_a log p(target_a) + z_loss x log-normaliser^2, the only one with a gradient. Infinite when a
            target can't be predicted.
        squared_norm: squared log-normalisers.
        right: positions whose most probable id (the lowest, if several are) is one of the targets.
        count: positions.
    """

    loss: jax.Array
    squared_norm: jax.Array
    right: jax.Array
    count: jax.Array


def device_share(
    setup: CrossEntropy,
    wanted: frozenset[str],
    hidden_bpd: jax.Array,
    targets_bpa: jax.Array,
    weights_bpa: jax.Array,
    matrix_vd: jax.Array,
    bias_v: jax.Array | None,
) -> tuple[Sums, dict[str, jax.Array]]:
    """The sums over all devices, and the device's part of the gradients `wanted`.

    Args:
        setup: how to compute.
        wanted: names of arrays to take the gradient of: "hidden", "matrix", "bias", "tool_matrix", "tool_bias".
        hidden_bpd: hidden states of the device's rows.
        targets_bpa: their target ids.
        weights_bpa: target probabilities.
        matrix_vd: the device's rows of the head in the compute dtype, their FSDP axis gathered.
        bias_v: the device's part of the bias.
    """
    batch, vocabulary = _names(setup.rules.batch), _names(setup.rules.vocabulary)
    (b, p, d), v = hidden_bpd.shape, matrix_vd.shape[0]
    n = b * p
    chunk = setup.chunk_size(n, v, matrix_gradient="matrix" in wanted)
    hidden_nd, targets_na, weights_na = (x.reshape(n, x.shape[2]) for x in (hidden_bpd, targets_bpa, weights_bpa))
    id_v = (jax.lax.axis_index(vocabulary) * v if vocabulary else 0) + jnp.arange(v, dtype=jnp.int32)
    # Columns among which are all tools of the device.
    tools, window = setup.tools, min(v, setup.tools.size)
    begin = jnp.clip(tools.first - id_v[0], 0, v - window)

    # Supervised positions come first and the loop ends behind the last of them. All devices take as many turns as the
    # one that has most of them, so that their exchanges pair up.
    supervised_n = jnp.any(weights_na > 0, axis=-1)
    count = jnp.sum(supervised_n, dtype=jnp.int32)
    turns = -(-_over(jax.lax.pmax, count, batch) // chunk)
    place_n = jnp.where(supervised_n, jnp.cumsum(supervised_n, dtype=jnp.int32) - 1, n)
    padded = -(-n // chunk) * chunk
    order = jnp.full(padded, n, jnp.int32).at[place_n].set(jnp.arange(n, dtype=jnp.int32), mode="drop")

    def turn(number: jax.Array, total: dict[str, Any]) -> dict[str, Any]:
        at_c = jax.lax.dynamic_slice_in_dim(order, number * chunk, chunk)
        hidden_cd, targets_ca, weights_ca = (
            x.at[at_c].get(mode="fill", fill_value=0) for x in (hidden_nd, targets_na, weights_na)
        )
        logits_cv = jnp.einsum("cd,vd->cv", hidden_cd, matrix_vd, preferred_element_type="float32")
        if bias_v is not None:
            logits_cv += bias_v.astype(jnp.float32)
        if not setup.config.predicts_all_rows:
            logits_cv = jnp.where(setup.config.is_predicted(id_v), logits_cv, -jnp.inf)
        sums, grad_cv = _chunk_sums(setup, logits_cv, targets_ca, weights_ca, id_v)
        total = total | {"sums": jax.tree.map(jnp.add, total["sums"], sums)}

        # Rounded to the compute dtype for the products, summed in float32 inside and over chunks.
        factor_cv = grad_cv.astype(hidden_cd.dtype)
        if "hidden" in wanted:
            found_cd = jnp.einsum("cv,vd->cd", factor_cv, matrix_vd, preferred_element_type=total["hidden"].dtype)
            total["hidden"] = jax.lax.dynamic_update_slice_in_dim(total["hidden"], found_cd, number * chunk, axis=0)
        if "matrix" in wanted:
            total["matrix"] += jnp.einsum("cv,cd->vd", factor_cv, hidden_cd, preferred_element_type="float32")
        if "bias" in wanted:
            total["bias"] += jnp.sum(grad_cv, axis=0)
        if "tool_matrix" in wanted:
            factor_cw = jax.lax.dynamic_slice_in_dim(factor_cv, begin, window, axis=1)
            total["tool_matrix"] += jnp.einsum("cw,cd->wd", factor_cw, hidden_cd, preferred_element_type="float32")
        if "tool_bias" in wanted:
            total["tool_bias"] += jnp.sum(jax.lax.dynamic_slice_in_dim(grad_cv, begin, window, axis=1), axis=0)
        return total

    shapes = {"matrix": (v, d), "bias": (v,), "tool_matrix": (window, d), "tool_bias": (window,)}
    zeros = {name: jnp.zeros(shapes[name], jnp.float32) for name in wanted - {"hidden"}}
    if "hidden" in wanted:
        # Where devices hold parts of a sum, these aren't rounded before they are added.
        zeros["hidden"] = jnp.zeros((padded, d), jnp.float32 if vocabulary else hidden_nd.dtype)
    zero = _varying(jnp.float32(0), batch)
    total: dict[str, Any] = {name: _varying(x, (*batch, *vocabulary)) for name, x in zeros.items()}
    total["sums"] = Sums(loss=zero, squared_norm=zero, right=zero, count=zero)
    # One chunk needs no loop, and so no sums that begin with zeros.
    total = turn(jnp.int32(0), total) if padded == chunk else jax.lax.fori_loop(0, turns, turn, total)

    sums = jax.tree.map(lambda x: _over(jax.lax.psum, x, batch), total.pop("sums"))
    if "hidden" in wanted:
        grad_nd = _over(jax.lax.psum, total["hidden"], vocabulary)
        total["hidden"] = grad_nd.at[place_n].get(mode="fill", fill_value=0).reshape(b, p, d)
    # Tool x is row `tools.first + x` of the whole matrix, which one device has.
    tool_x = jnp.arange(tools.size, dtype=jnp.int32)
    at_x = tools.first + tool_x - id_v[0] - begin
    at_x = jnp.where((tool_x < tools.count) & (at_x >= 0), at_x, window)
    for name in wanted & {"tool_matrix", "tool_bias"}:
        block = total[name].at[at_x].get(mode="fill", fill_value=0)
        cut = tools.rows_axis is not None
        total[name] = _summed_cut(block, vocabulary, 0) if cut else _over(jax.lax.psum, block, vocabulary)
    for name in wanted - {"hidden"}:
        total[name] = _summed(total[name], setup.rules)
    return sums, total


def _chunk_sums(
    setup: CrossEntropy, logits_cv: jax.Array, targets_ca: jax.Array, weights_ca: jax.Array, id_v: jax.Array
) -> tuple[Sums, jax.Array]:
    """Sums over a chunk, and the gradient of their `loss` in the logits of the device's columns `id_v`."""
    vocabulary, v = _names(setup.rules.vocabulary), len(id_v)
    used_ca = weights_ca > 0
    supervised_c, weight_c = jnp.any(used_ca, axis=-1), jnp.sum(weights_ca, axis=-1)

    top_c, best_c = _top(logits_cv)
    best_c, own_top_c = best_c + id_v[0], top_c
    top_c = _over(jax.lax.pmax, own_top_c, vocabulary)
    best_c = jnp.where(own_top_c == top_c, best_c, jnp.iinfo(jnp.int32).max)
    best_c = _over(jax.lax.pmin, best_c, vocabulary)

    # Everything is taken relative to the largest logit: where the model is sure, the loss is a difference of nearly
    # equal numbers.
    exp_cv = jnp.exp(logits_cv - top_c[:, None])
    at_ca = targets_ca - id_v[0]
    here_ca = used_ca & (at_ca >= 0) & (at_ca < v)
    target_ca = jnp.take_along_axis(logits_cv, jnp.clip(at_ca, 0, v - 1), axis=1) - top_c[:, None]
    target_c = jnp.sum(jnp.where(here_ca, weights_ca * target_ca, 0.0), axis=-1)
    total_c, target_c = _over(jax.lax.psum, (jnp.sum(exp_cv, axis=-1), target_c), vocabulary)

    log_c = jnp.log(total_c)
    norm_c = jnp.where(supervised_c, top_c + log_c, 0.0)
    impossible_c = jnp.any(used_ca & ~setup.config.is_predicted(targets_ca), axis=-1)
    loss_c = jnp.where(impossible_c, jnp.inf, weight_c * log_c - target_c)
    if setup.z_loss:  # 0 times a square that overflowed would be NaN
        loss_c += setup.z_loss * norm_c**2
    sums = Sums(
        loss=jnp.sum(loss_c),
        squared_norm=jnp.sum(norm_c**2),
        right=jnp.sum(jnp.any(used_ca & (targets_ca == best_c[:, None]), axis=-1), dtype=jnp.float32),
        count=jnp.sum(supervised_c, dtype=jnp.float32),
    )

    slope_c = (weight_c + 2 * setup.z_loss * norm_c) / total_c
    # Comparing every column with the targets fuses with the rest; a scatter wouldn't.
    share_cv = sum(
        jnp.where(id_v == targets_ca[:, a, None], weights_ca[:, a, None], 0.0) for a in range(targets_ca.shape[1])
    )
    grad_cv = exp_cv * slope_c[:, None] - share_cv
    return sums, grad_cv if setup.config.predicts_all_rows else jnp.where(jnp.isneginf(logits_cv), 0.0, grad_cv)


def _top(logits_cv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit of each position and the first column that has it.

    In two steps, the largest of each group of columns first: `argmax` over all of them takes four times as long on CPU.
    """
    group = math.gcd(logits_cv.shape[1], 128)
    logits_cgw = logits_cv.reshape(len(logits_cv), -1, group)
    top_cg = jnp.max(logits_cgw, axis=-1)
    best_c = jnp.argmax(top_cg, axis=-1).astype(jnp.int32)
    logits_cw = jnp.take_along_axis(logits_cgw, best_c[:, None, None], axis=1)[:, 0]
    return jnp.max(top_cg, axis=-1), best_c * group + jnp.argmax(logits_cw, axis=-1).astype(jnp.int32)


def _names(axes: MeshAxes) -> tuple[str, ...]:
    """Mesh axes as a tuple; none without a mesh."""
    given = (axes,) if isinstance(axes, str) else axes or ()
    return given if divides_arrays() else ()


def divides_arrays() -> bool:
    """Whether there is a mesh of several devices; on one, even the exchange of a device with itself costs copies."""
    return math.prod(active_mesh_axes().values()) > 1


def _over(reduce: Callable[..., Any], x: Any, axes: tuple[str, ...]) -> Any:
    """`x` reduced over mesh axes, if there are any."""
    return reduce(x, axes) if axes else x


def _varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x` as an array that may differ between devices along these axes."""
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def _summed_cut(x: jax.Array, axes: tuple[str, ...], dimension: int) -> jax.Array:
    """The device's part along `dimension` of the sum over mesh axes."""
    for axis in axes:
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)
    return x


def _summed(gradient: jax.Array, rules: AxisRules) -> jax.Array:
    """The gradient of head rows [V, D], or of their bias [V], summed over the batch and cut like the head."""
    batch, embed = _names(rules.batch), _names(rules.embed) if gradient.ndim == 2 else ()
    gradient = _over(jax.lax.psum, gradient, tuple(axis for axis in batch if axis not in embed))
    for axis in embed:
        if axis in batch:
            gradient = _summed_cut(gradient, (axis,), 1)
        else:
            width = gradient.shape[1] // active_mesh_axes()[axis]
            gradient = jax.lax.dynamic_slice_in_dim(gradient, jax.lax.axis_index(axis) * width, width, axis=1)
    return gradient
