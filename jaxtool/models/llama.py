"""Llama 3 in Flax NNX, in reading order: config, rotary embedding, attention, block, model.

Numerics follow transformers' `LlamaForCausalLM`: half-split rotary embedding with float32 angles, RMSNorm statistics
and attention softmax in float32. Loading weights is in `jaxtool.weights`, tool rows are in `vocabulary`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtool.parallel import AxisRules, active_mesh_axes, einsum, reshard

VOCABULARY_MULTIPLE = 128
DEFAULT_RULES = AxisRules()

KEPT_ACTIVATIONS = {
    "elementwise": jax.checkpoint_policies.save_only_these_names("kept"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape and numerics of a Llama model; field names are those of the Hugging Face config.

    Attributes:
        vocab_size: text rows of the embedding, as in the checkpoint.
        num_tools: tool rows behind the text rows: tool i is row `vocab_size + i`.
        padded_vocab_size: rows that the matrices really have; 0 stands for `vocab_size` without tools, else for the
            next multiple of 128 after text and tool rows. Rows behind the last tool never get probability.
        param_dtype: dtype of the stored parameters.
        compute_dtype: dtype of activations and matrix products (norms, softmax and logits stay float32).
        remat: what the backward pass recomputes: "elementwise" keeps the inputs of the large matrix products and
            recomputes norms and gates (40 % of the memory of keeping all, and faster on CPU); "full" keeps the
            block inputs only.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = False
    num_tools: int = 0
    padded_vocab_size: int = 0
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: str = "elementwise"

    def __post_init__(self) -> None:
        if self.remat not in KEPT_ACTIVATIONS:
            raise ValueError(f"remat is {self.remat!r}, expected one of {', '.join(KEPT_ACTIVATIONS)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, rotary embedding needs an even number")
        if self.padded_vocab_size and self.padded_vocab_size < self.vocab_size + self.num_tools:
            raise ValueError(f"padded_vocab_size {self.padded_vocab_size} is below vocab_size + num_tools")

    @property
    def rows(self) -> int:
        """Rows of the embedding and head matrices."""
        return self.padded_vocab_size or padded_rows(self.vocab_size, self.num_tools)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Length of each logical axis that a mesh may cut, for `AxisRules.fit`."""
        return {
            "vocabulary": self.rows,
            "embed": self.hidden_size,
            "heads": self.num_attention_heads,
            "kv_heads": self.num_key_value_heads,
            "mlp": self.intermediate_size,
        }


def padded_rows(vocab_size: int, num_tools: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """Rows for text and tools: `vocab_size` as it is without tools, else rounded up to `multiple`."""
    return vocab_size if num_tools == 0 else -(-(vocab_size + num_tools) // multiple) * multiple


def rms_norm(x: jax.Array, scale_d: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis; statistics in float32, result in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale_d.astype(x.dtype)


def rotary_tables(positions_bs: jax.Array, head_size: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [B, S, H/2] of the rotary angles, in float32: bfloat16 would turn position 257 into 256."""
    frequency = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    angle = positions_bs[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def apply_rotary(x_bsnh: jax.Array, cos_bsr: jax.Array, sin_bsr: jax.Array) -> jax.Array:
    """Rotates the half-split pairs (i, i + H/2) of each head; computed in float32, returned in the dtype of `x`."""
    first, second = jnp.split(x_bsnh.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_bsr[:, :, None, :], sin_bsr[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_bsnh.dtype)


def attention_mask(segment_ids_bs: jax.Array) -> jax.Array:
    """Boolean [B, S, S]: query s sees key t when t <= s and both are of one segment; padding (0) sees only itself.

    The own position is always visible, so no softmax row is empty.
    """
    length = segment_ids_bs.shape[1]
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))
    same = segment_ids_bs[:, :, None] == segment_ids_bs[:, None, :]
    real = (segment_ids_bs > 0)[:, :, None] | jnp.eye(length, dtype=bool)
    return causal & same & real


_GROUPED = ("batch", "sequence", "kv_heads", None, "head_size")


class Block(nnx.Module):
    """One decoder layer: pre-norm grouped-query attention, then a pre-norm SwiGLU MLP."""

    def __init__(self, config: LlamaConfig, rules: AxisRules, *, rngs: nnx.Rngs) -> None:
        d, f = config.hidden_size, config.intermediate_size
        n, k, h = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        dtype = jnp.dtype(config.param_dtype)

        def matrix(shape: tuple[int, ...], fan_in: int, *axes: str) -> nnx.Param[jax.Array]:
            value = jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in)
            return nnx.Param(value.astype(dtype), out_sharding=_annotation(rules, *axes))

        def scale() -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.ones((d,), dtype), out_sharding=_annotation(rules, "activation"))

        self.attention_norm_d = scale()
        self.query_dnh = matrix((d, n, h), d, "embed", "heads", "head_size")
        self.key_dkh = matrix((d, k, h), d, "embed", "kv_heads", "head_size")
        self.value_dkh = matrix((d, k, h), d, "embed", "kv_heads", "head_size")
        self.output_nhd = matrix((n, h, d), n * h, "heads", "head_size", "embed")
        self.mlp_norm_d = scale()
        self.gate_df = matrix((d, f), d, "embed", "mlp")
        self.up_df = matrix((d, f), d, "embed", "mlp")
        self.down_fd = matrix((f, d), f, "mlp", "embed")
        self.config = config
        self.rules = rules

    def __call__(self, x_bsd: jax.Array, mask_bst: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
        """x [B, S, D], mask [B, S, S], rotary tables 2 x [B, S, H/2] -> [B, S, D]."""
        eps = self.config.rms_norm_eps
        x_bsd = x_bsd + self._attention(rms_norm(x_bsd, self.attention_norm_d[...], eps), mask_bst, rotary)
        return x_bsd + self._mlp(rms_norm(x_bsd, self.mlp_norm_d[...], eps))

    def _attention(self, x_bsd: jax.Array, mask_bst: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
        c, spec = self.config, self.rules.spec
        with jax.named_scope("attention"):
            w_q = self._gathered(self.query_dnh, None, "heads", "head_size")
            w_k = self._gathered(self.key_dkh, None, "kv_heads", "head_size")
            w_v = self._gathered(self.value_dkh, None, "kv_heads", "head_size")
            q_bsnh = einsum("bsd,dnh->bsnh", x_bsd, w_q, out=spec("batch", "sequence", "heads", "head_size"))
            k_bskh = einsum("bsd,dkh->bskh", x_bsd, w_k, out=spec("batch", "sequence", "kv_heads", "head_size"))
            v_bskh = einsum("bsd,dkh->bskh", x_bsd, w_v, out=spec("batch", "sequence", "kv_heads", "head_size"))
            q_bsnh = checkpoint_name(apply_rotary(q_bsnh, *rotary), "kept")
            k_bskh = checkpoint_name(apply_rotary(k_bskh, *rotary), "kept")
            v_bskh = checkpoint_name(v_bskh, "kept")

            # Query heads of one key-value head are rows of one matrix: [G*S, H] x [H, S] per (batch, K), which CPU and
            # accelerator matrix units run at full speed, and keys are never repeated.
            b, s = x_bsd.shape[:2]
            groups, size = c.num_attention_heads // c.num_key_value_heads, c.head_dim
            rows = spec("batch", "kv_heads", None, "head_size")
            q_bskgh = _reshape(q_bsnh, (b, s, c.num_key_value_heads, groups, size), spec(*_GROUPED))
            q_bkxh = _reshape(q_bskgh.transpose(0, 2, 3, 1, 4), (b, c.num_key_value_heads, groups * s, size), rows)
            scores_bkxt = einsum(
                "bkxh,bkht->bkxt",
                q_bkxh * size**-0.5,
                k_bskh.transpose(0, 2, 3, 1),
                out=spec("batch", "kv_heads", None, None),
                result_dtype="float32",
            )
            mask_bxt = jnp.tile(mask_bst, (1, groups, 1))
            scores_bkxt = jnp.where(mask_bxt[:, None], scores_bkxt, jnp.finfo(jnp.float32).min)
            weights_bkxt = checkpoint_name(jax.nn.softmax(scores_bkxt, axis=-1).astype(v_bskh.dtype), "kept")
            mixed_bkxh = einsum("bkxt,bkth->bkxh", weights_bkxt, v_bskh.transpose(0, 2, 1, 3), out=rows)
            split = spec("batch", "kv_heads", None, "sequence", "head_size")
            mixed_bkgsh = _reshape(mixed_bkxh, (b, c.num_key_value_heads, groups, s, size), split)
            heads = spec("batch", "sequence", "heads", "head_size")
            mixed_bsnh = _reshape(mixed_bkgsh.transpose(0, 3, 1, 2, 4), q_bsnh.shape, heads)
            mixed_bsnh = checkpoint_name(mixed_bsnh, "kept")
            w_o = self._gathered(self.output_nhd, "heads", "head_size", None)
            return einsum("bsnh,nhd->bsd", mixed_bsnh, w_o, out=spec("batch", "sequence", "activation"))

    def _mlp(self, x_bsd: jax.Array) -> jax.Array:
        spec = self.rules.spec
        with jax.named_scope("mlp"):
            inner = spec("batch", "sequence", "mlp")
            gate_bsf = einsum("bsd,df->bsf", x_bsd, self._gathered(self.gate_df, None, "mlp"), out=inner)
            up_bsf = einsum("bsd,df->bsf", x_bsd, self._gathered(self.up_df, None, "mlp"), out=inner)
            gate_bsf, up_bsf = checkpoint_name(gate_bsf, "kept"), checkpoint_name(up_bsf, "kept")
            down_fd = self._gathered(self.down_fd, "mlp", None)
            return einsum(
                "bsf,fd->bsd",
                jax.nn.silu(gate_bsf) * up_bsf,
                down_fd,
                out=spec("batch", "sequence", "activation"),
            )

    def _gathered(self, param: nnx.Param[jax.Array], *axes: str | None) -> jax.Array:
        """The parameter in the compute dtype with its FSDP axis gathered (cast first: half the bytes travel)."""
        return reshard(param[...].astype(self.config.compute_dtype), self.rules.spec(*axes))


class Llama(nnx.Module):
    """Decoder stack with tied or untied head.

    Parameters: `embedding_vd` [V, D], `blocks.*` [L, ...], `final_norm_d` [D] and, untied, `head_vd` [V, D]. The head
    is stored like the embedding, one row per token, so that both grow and shrink the same way.
    """

    def __init__(self, config: LlamaConfig, rules: AxisRules = DEFAULT_RULES, *, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(config.param_dtype)
        table = _annotation(rules, "vocabulary", "embed")

        def rows() -> nnx.Param[jax.Array]:
            value = 0.02 * jax.random.normal(rngs.params(), (config.rows, config.hidden_size), jnp.float32)
            return nnx.Param(value.astype(dtype), out_sharding=table)

        @nnx.split_rngs(splits=config.num_hidden_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rules, rngs=rngs)

        self.embedding_vd = rows()
        self.blocks = stack(rngs)
        self.final_norm_d = nnx.Param(
            jnp.ones((config.hidden_size,), dtype), out_sharding=_annotation(rules, "activation")
        )
        if not config.tie_word_embeddings:
            self.head_vd = rows()
        self.config = config
        self.rules = rules

    def __call__(self, tokens_bs: jax.Array, positions_bs: jax.Array, segment_ids_bs: jax.Array) -> jax.Array:
        """Final normed hidden states [B, S, D] in the compute dtype.

        Args:
            tokens_bs: int32 token or tool ids, [B, S].
            positions_bs: int32 positions for the rotary embedding, from 0 in each segment.
            segment_ids_bs: int32, 0 for padding; tokens attend within their segment only.
        """
        c, spec = self.config, self.rules.spec
        activations = spec("batch", "sequence", "activation")
        sharding = activations if active_mesh_axes() else None
        table_vd = reshard(self.embedding_vd[...], spec("vocabulary", None))
        x_bsd = table_vd.at[tokens_bs].get(out_sharding=sharding).astype(c.compute_dtype)
        mask_bst = attention_mask(segment_ids_bs)
        rotary = rotary_tables(positions_bs, c.head_dim, c.rope_theta)

        def body(x_bsd: jax.Array, block: Block) -> tuple[jax.Array, None]:
            return block(x_bsd, mask_bst, rotary), None

        body = jax.checkpoint(body, policy=KEPT_ACTIVATIONS[c.remat])
        x_bsd, _ = jax.lax.scan(body, x_bsd, self.blocks)
        return rms_norm(x_bsd, self.final_norm_d[...], c.rms_norm_eps)

    def head_rows(self) -> jax.Array:
        """The output matrix [V, D]: the head, or the embedding when tied."""
        return (self.embedding_vd if self.config.tie_word_embeddings else self.head_vd)[...]

    def logits(self, hidden_bpd: jax.Array) -> jax.Array:
        """float32 logits [B, P, V] of hidden states [B, P, D]; columns behind the last tool are -inf."""
        c, spec = self.config, self.rules.spec
        head_vd = reshard(self.head_rows().astype(c.compute_dtype), spec("vocabulary", None))
        logits_bpv = einsum(
            "bpd,vd->bpv", hidden_bpd, head_vd, out=spec("batch", None, "vocabulary"), result_dtype="float32"
        )
        real = c.vocab_size + c.num_tools
        return logits_bpv if real == c.rows else jnp.where(jnp.arange(c.rows) < real, logits_bpv, -jnp.inf)


def _annotation(rules: AxisRules, *axes: str) -> tuple[Any, ...] | None:
    """Sharding metadata of a parameter; Flax refuses it where no mesh is active."""
    return tuple(rules.spec(*axes)) if active_mesh_axes() else None


def _reshape(x: jax.Array, shape: tuple[int, ...], spec: jax.sharding.PartitionSpec) -> jax.Array:
    return jax.lax.reshape(x, shape, out_sharding=spec) if active_mesh_axes() else jnp.reshape(x, shape)
