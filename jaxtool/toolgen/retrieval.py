"""Retrieval with atomic tool ids: one prefill, the tool rows of the head, `top_k`.

For ids of one token this equals the constrained beam search of ToolGen's evaluation (its first step; the second can
only append the end of the turn) and gives any k. Multi-token ids need the decode engine, not this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxtool.data import ChatPrompts
from jaxtool.models import Llama
from jaxtool.parallel import einsum, reshard

_BUCKET = 16


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """Ranked tools of a list of queries.

    Attributes:
        tools_qk: tool ids, best first, int32 [Q, k]; -1 where invalid.
        log_probs_qk: natural log of the probability among the allowed tools, float32 [Q, k]; -inf where invalid.
        valid_qk: False in the places behind the last allowed tool.
        cut: number of queries whose text did not fit the maximal prompt length and was cut.
    """

    tools_qk: np.ndarray
    log_probs_qk: np.ndarray
    valid_qk: np.ndarray
    cut: int


class ToolRetriever:
    """Ranks the tools of a model for texts.

    Args:
        model: a model with tool rows, its parameters on `mesh`.
        prompts: renders the prompts as in training.
        mesh: the mesh of the model.
        batch_size: queries in one prefill; must divide by the batch axes of the mesh.
    """

    def __init__(self, model: Llama, prompts: ChatPrompts, mesh: Mesh, *, batch_size: int = 16) -> None:
        if model.config.num_tools == 0:
            raise ValueError("the model has no tool rows, there is nothing to retrieve")
        self.model, self.prompts, self.mesh, self.batch_size = model, prompts, mesh, batch_size
        parts = NamedSharding(mesh, model.rules.spec("batch", None)).num_devices // mesh.shape["model"]
        if batch_size < 1 or batch_size % parts:
            raise ValueError(
                f"batch_size {batch_size} is not a positive multiple of the {parts} devices that share a batch"
            )

    def retrieve(
        self,
        texts: Sequence[str],
        k: int,
        *,
        allowed: Collection[int] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Retrieved:
        """The k most probable tools of each text, ties by tool id.

        Args:
            texts: user queries.
            k: places to fill; more than the allowed tools gives invalid places at the end.
            allowed: tool ids to choose from (None: all). Probabilities are relative to them.
            progress: called with the number of queries of each finished batch.

        Raises:
            ValueError: an empty text, k below 1, `allowed` empty or with an unknown id, or scores that aren't finite.
        """
        if k < 1:
            raise ValueError(f"k is {k}, expected at least 1")
        tools = self.model.config.num_tools
        mask_t = np.ones(tools, bool)
        if allowed is not None:
            ids = np.fromiter(allowed, np.int64, len(allowed))
            if not ids.size or ids.min() < 0 or ids.max() >= tools:
                raise ValueError(f"allowed tools must be a non-empty set of ids from 0 to {tools - 1}")
            mask_t[:] = False
            mask_t[ids] = True
        prompts = []
        for number, text in enumerate(texts):
            try:
                prompts.append(self.prompts.prompt(text))
                self.prompts.check_within(self.model.config.vocab_size, prompts[-1].ids)
            except ValueError as error:
                raise ValueError(f"query {number}: {error}") from error

        tools_qk = np.full((len(texts), k), -1, np.int32)
        log_probs_qk = np.full((len(texts), k), -np.inf, np.float32)
        order = sorted(range(len(texts)), key=lambda index: len(prompts[index].ids))
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            scores, ranked = self._rank([prompts[row].ids for row in rows], mask_t, min(k, tools))
            log_probs_qk[rows, : scores.shape[1]] = scores[: len(rows)]
            tools_qk[rows, : ranked.shape[1]] = ranked[: len(rows)]
            if progress is not None:
                progress(len(rows))
        valid_qk = np.isfinite(log_probs_qk)
        if not valid_qk[:, 0].all():
            raise ValueError(
                f"query {int(np.argmin(valid_qk[:, 0]))}: the model's scores are not finite, its weights are damaged"
            )
        tools_qk[~valid_qk] = -1
        return Retrieved(
            tools_qk=tools_qk,
            log_probs_qk=log_probs_qk,
            valid_qk=valid_qk,
            cut=sum(prompt.cut > 0 for prompt in prompts),
        )

    def _rank(self, prompts: list[list[int]], mask_t: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        # Lengths are rounded up so that a handful of compiled programs serves all queries.
        length = -(-max(map(len, prompts)) // _BUCKET) * _BUCKET
        tokens_bs = np.zeros((self.batch_size, length), np.int32)
        lengths_b = np.ones(self.batch_size, np.int32)
        for row, ids in enumerate(prompts):
            tokens_bs[row, : len(ids)] = ids
            lengths_b[row] = len(ids)
        spec = self.model.rules.spec
        with jax.set_mesh(self.mesh):
            tokens = jax.device_put(tokens_bs, NamedSharding(self.mesh, spec("batch", None)))
            lengths = jax.device_put(lengths_b, NamedSharding(self.mesh, spec("batch")))
            mask = jax.device_put(mask_t, NamedSharding(self.mesh, spec(None)))
            scores, ids = _top_tools(self.model, tokens, lengths, mask, k)
        return np.asarray(scores), np.asarray(ids)


@jax.jit(static_argnames="k")
def _top_tools(
    model: Llama, tokens_bs: jax.Array, lengths_b: jax.Array, mask_t: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    c, spec = model.config, model.rules.spec
    positions_bs = jnp.broadcast_to(jnp.arange(tokens_bs.shape[1], dtype=jnp.int32), tokens_bs.shape)
    positions_bs = reshard(positions_bs, spec("batch", None))
    segment_ids_bs = (positions_bs < lengths_b[:, None]).astype(jnp.int32)
    hidden_bsd = model(tokens_bs, positions_bs, segment_ids_bs)
    rows_b = jnp.arange(tokens_bs.shape[0])
    last_bd = hidden_bsd.at[rows_b, lengths_b - 1].get(out_sharding=spec("batch", "activation"))
    # Only the tool rows of the head are read, and they are few enough to be gathered: top_k needs whole rows anyway.
    head_vd = reshard(model.head_rows(), spec(None, None))
    tools_td = jax.lax.dynamic_slice_in_dim(head_vd, c.vocab_size, c.num_tools).astype(c.compute_dtype)
    logits_bt = einsum("bd,td->bt", last_bd, tools_td, out=spec("batch", None), result_dtype="float32")
    # -inf enters where and the softmax of rows with at least one allowed tool only; float32 keeps ties rare, and top_k
    # breaks those that remain by the lower id.
    log_probs_bt = jax.nn.log_softmax(jnp.where(mask_t, logits_bt, -jnp.inf), axis=-1)
    return jax.lax.top_k(log_probs_bt, k)
