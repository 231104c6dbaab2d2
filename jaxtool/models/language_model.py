"""What all ports share: the shape of a model, projections with LoRA, the decoder stack, embedding and head.

A port is a config, a block and a final norm (`llama`, `gptj`). Tool rows of embedding and head are in `vocabulary`,
the choice of a port by its name in `registry`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtool.models.attention import IMPLEMENTATIONS, attention
from jaxtool.models.cudnn_attention import CUDNN_DTYPES
from jaxtool.models.fused_projections import project_fused
from jaxtool.models.rotary import rotary_tables
from jaxtool.models.tool_rows import ToolBlock, ToolRows, look_up, take_rows
from jaxtool.parallel import AxisRules, active_mesh_axes, check_mesh, einsum, reshard

VOCABULARY_MULTIPLE = 128
DEFAULT_RULES = AxisRules()

KEPT_ACTIVATIONS = {
    "elementwise": jax.checkpoint_policies.save_only_these_names("kept"),
    "full": jax.checkpoint_policies.nothing_saveable,
}

Rotary = tuple[jax.Array, jax.Array]
# How a block's new tokens attend, to one another or to a cache: queries [B, S, N, H], their keys and values
# [B, S, K, H] -> [B, S, N, H].
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A weight matrix of a block.

    Attributes:
        letters: its axes by the letters of the legend, the contracted ones first: "dnh" maps D to N x H.
        axes: logical axes, one for each letter.
        inputs: how many of the axes are contracted.
    """

    letters: str
    axes: tuple[str, ...]
    inputs: int = 1


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Shape and numerics of a decoder-only model; field names are those of Llama's Hugging Face config.

    Attributes:
        vocab_size: text rows of the embedding, as in the checkpoint.
        text_tokens: ids below `vocab_size` that the tokenizer knows; rows from there to `vocab_size` never get
            probability (GPT-J: 50,257 of 50,400). 0: all rows are predicted, as in transformers.
        num_tools: tool rows behind the text rows: tool i is row `vocab_size + i`.
        padded_vocab_size: rows that the matrices really have; 0 stands for `vocab_size` without tools, else for the
            next multiple of 128 after text and tool rows. Rows behind the last tool never get probability.
        param_dtype: dtype of the stored parameters.
        compute_dtype: dtype of activations and matrix products (norms, softmax and logits stay float32).
        remat: what the backward pass recomputes: "elementwise" keeps the inputs of the large matrix products and
            recomputes norms and gates (40 % of the memory of keeping all, and faster on CPU); "full" keeps the
            block inputs only.
        attention: implementation of attention: "xla" runs everywhere, "splash" on TPUs, "cudnn" on NVIDIA GPUs and in
            half precision only; `resolve_attention` chooses. Not a property of the model: JSON leaves it out.
        lora_rank: rank R of the low-rank updates; 0 for none.
        lora_alpha: an update is scaled by lora_alpha / lora_rank.
        lora_projections: which projections have one, by name ("query", "key", ...).
    """

    architecture: ClassVar[str]
    projections: ClassVar[Mapping[str, Projection]]
    head_bias: ClassVar[bool] = False
    # Projections that read the same input, which decoding computes as one.
    fused_projections: ClassVar[tuple[tuple[str, ...], ...]] = ()

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    text_tokens: int = 0
    num_tools: int = 0
    padded_vocab_size: int = 0
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: str = "elementwise"
    attention: str = "xla"
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_projections: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.remat not in KEPT_ACTIVATIONS:
            raise ValueError(f"remat is {self.remat!r}, expected one of {', '.join(KEPT_ACTIVATIONS)}")
        if self.attention not in IMPLEMENTATIONS:
            raise ValueError(f"attention is {self.attention!r}, expected one of {', '.join(IMPLEMENTATIONS)}")
        if self.attention == "cudnn" and self.compute_dtype not in CUDNN_DTYPES:
            raise ValueError(
                f"attention is 'cudnn' and compute_dtype {self.compute_dtype}, expected {' or '.join(CUDNN_DTYPES)}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, rotary embedding needs an even number")
        if not 0 <= self.text_tokens <= self.vocab_size:
            raise ValueError(f"text_tokens is {self.text_tokens}, expected 0 to vocab_size {self.vocab_size}")
        if self.padded_vocab_size and self.padded_vocab_size < self.vocab_size + self.num_tools:
            raise ValueError(f"padded_vocab_size {self.padded_vocab_size} is below vocab_size + num_tools")
        if self.lora_rank < 0 or bool(self.lora_rank) != bool(self.lora_projections):
            raise ValueError(
                f"lora_rank is {self.lora_rank} with {len(self.lora_projections)} projections, expected a positive "
                "rank and at least one projection, or neither"
            )
        if unknown := sorted(set(self.lora_projections) - self.projections.keys()):
            raise ValueError(
                f"lora_projections has {', '.join(unknown)}, {self.architecture} has {', '.join(self.projections)}"
            )

    @property
    def rows(self) -> int:
        """Rows of the embedding and head matrices."""
        return self.padded_vocab_size or padded_rows(self.vocab_size, self.num_tools)

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""
        return self.num_attention_heads

    @property
    def letter_sizes(self) -> dict[str, int]:
        """Length of each axis of the projections by its letter."""
        return {
            "d": self.hidden_size,
            "n": self.num_attention_heads,
            "k": self.kv_heads,
            "h": self.head_dim,
            "f": self.intermediate_size,
            "r": self.lora_rank,
        }

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Length of each logical axis that a mesh may cut, for `AxisRules.fit`."""
        return {
            "vocabulary": self.rows,
            "embed": self.hidden_size,
            "heads": self.num_attention_heads,
            "kv_heads": self.kv_heads,
            "mlp": self.intermediate_size,
        }

    def frequencies(self) -> np.ndarray:
        """Rotary frequencies, float32."""
        raise NotImplementedError

    def is_predicted(self, ids: jax.Array) -> jax.Array:
        """Whether these ids are ones that the head can predict: known text tokens and tools, not padding."""
        known = (ids >= 0) & (ids < (self.text_tokens or self.vocab_size))
        return known | ((ids >= self.vocab_size) & (ids < self.vocab_size + self.num_tools))

    @property
    def predicts_all_rows(self) -> bool:
        """Whether every row of the head can be predicted."""
        return self.text_tokens in (0, self.vocab_size) and self.vocab_size + self.num_tools == self.rows


def padded_rows(vocab_size: int, num_tools: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """Rows for text and tools: `vocab_size` as it is without tools, else rounded up to `multiple`."""
    return vocab_size if num_tools == 0 else -(-(vocab_size + num_tools) // multiple) * multiple


def annotation(rules: AxisRules, *axes: str) -> tuple[Any, ...] | None:
    """Sharding metadata of a parameter; Flax refuses it where no mesh is active."""
    return tuple(rules.spec(*axes)) if active_mesh_axes() else None


def final_vector(value: float, config: LanguageModelConfig, rules: AxisRules) -> nnx.Param[jax.Array]:
    """A parameter [D] of the final norm, filled with `value`."""
    filled = jnp.full((config.hidden_size,), value, config.param_dtype)
    return nnx.Param(filled, out_sharding=annotation(rules, "activation"))


def lora_names(name: str, projection: Projection) -> tuple[str, str]:
    """Names of the two factors of a projection's low-rank update: `query_lora_dr`, `query_lora_rnh`."""
    inputs, outputs = projection.letters[: projection.inputs], projection.letters[projection.inputs :]
    return f"{name}_lora_{inputs}r", f"{name}_lora_r{outputs}"


class DecoderBlock(nnx.Module):
    """Projections of one decoder layer, plain or with low-rank updates; a port adds norms and the order of things."""

    def __init__(self, config: LanguageModelConfig, rules: AxisRules, *, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(config.param_dtype)
        sizes = config.letter_sizes

        def matrix(letters: str, axes: tuple[str, ...], fan_in: int) -> nnx.Param[jax.Array]:
            shape = tuple(sizes[letter] for letter in letters)
            value = jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in)
            return nnx.Param(value.astype(dtype), out_sharding=annotation(rules, *axes))

        for name, projection in config.projections.items():
            letters, axes, inputs = projection.letters, projection.axes, projection.inputs
            fan_in = math.prod(sizes[letter] for letter in letters[:inputs])
            setattr(self, f"{name}_{letters}", matrix(letters, axes, fan_in))
            if name in config.lora_projections:
                first, second = lora_names(name, projection)
                setattr(self, first, matrix(letters[:inputs] + "r", (*axes[:inputs], "rank"), fan_in))
                # Zero, so that training starts from the pretrained model.
                zero = jnp.zeros([sizes[letter] for letter in "r" + letters[inputs:]], dtype)
                sharding = annotation(rules, "rank", *axes[inputs:])
                setattr(self, second, nnx.Param(zero, out_sharding=sharding))
        self.config = config
        self.rules = rules
        self.fused = False

    def project_all(self, names: tuple[str, ...], x: jax.Array) -> tuple[jax.Array, ...]:
        """x [B, S, inputs] through each of the projections, [B, S, outputs] in the compute dtype."""
        if self.fused:
            return project_fused(self, names, x)
        return tuple(self._project(name, x) for name in names)

    def project(self, name: str, x: jax.Array) -> jax.Array:
        """x [B, S, inputs] through the projection `name`, [B, S, outputs] in the compute dtype."""
        return self.project_all((name,), x)[0]

    def _project(self, name: str, x: jax.Array) -> jax.Array:
        projection = self.config.projections[name]
        letters, axes, inputs = projection.letters, projection.axes, projection.inputs
        out = self.rules.spec(
            "batch", "sequence", *("activation" if axis == "embed" else axis for axis in axes[inputs:])
        )
        y = einsum(
            f"bs{letters[:inputs]},{letters}->bs{letters[inputs:]}",
            x,
            self._gathered(f"{name}_{letters}", axes),
            out=out,
        )
        if name not in self.config.lora_projections:
            return y
        first, second = lora_names(name, projection)
        low_bsr = einsum(
            f"bs{letters[:inputs]},{letters[:inputs]}r->bsr",
            x,
            self._gathered(first, (*axes[:inputs], "rank")),
            out=self.rules.spec("batch", "sequence", "rank"),
        )
        update = einsum(
            f"bsr,r{letters[inputs:]}->bs{letters[inputs:]}",
            low_bsr,
            self._gathered(second, ("rank", *axes[inputs:])),
            out=out,
        )
        return y + update * (self.config.lora_alpha / self.config.lora_rank)

    def _gathered(self, name: str, axes: tuple[str, ...]) -> jax.Array:
        """The parameter in the compute dtype with its FSDP axis gathered (cast first: half the bytes travel)."""
        value = getattr(self, name)[...].astype(self.config.compute_dtype)
        return reshard(value, self.rules.spec(*(None if axis == "embed" else axis for axis in axes)))

    def vector(self, value: float, size: int, axis: str) -> nnx.Param[jax.Array]:
        """A parameter of one axis, filled with `value`: a norm's scale or a bias."""
        filled = jnp.full((size,), value, self.config.param_dtype)
        return nnx.Param(filled, out_sharding=annotation(self.rules, axis))

    def __call__(self, x_bsd: jax.Array, attend: Attend, rotary: Rotary) -> jax.Array:
        """x [B, S, D], rotary tables 2 x [B, S, R] -> [B, S, D]; `attend` mixes the tokens."""
        raise NotImplementedError


class LanguageModel(nnx.Module):
    """Decoder stack with tied or untied head.

    Parameters: `embedding_vd` [V, D], `blocks.*` [L, ...], a final norm and, untied, `head_vd` [V, D] (GPT-J:
    `head_bias_v` [V] too). The head is stored like the embedding, one row per token, so that both grow and shrink
    the same way.
    """

    def __init__(
        self, config: LanguageModelConfig, block: type[DecoderBlock], rules: AxisRules, *, rngs: nnx.Rngs
    ) -> None:
        dtype = jnp.dtype(config.param_dtype)

        def rows() -> nnx.Param[jax.Array]:
            value = 0.02 * jax.random.normal(rngs.params(), (config.rows, config.hidden_size), jnp.float32)
            return nnx.Param(value.astype(dtype), out_sharding=annotation(rules, "vocabulary", "embed"))

        @nnx.split_rngs(splits=config.num_hidden_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs: nnx.Rngs) -> DecoderBlock:
            return block(config, rules, rngs=rngs)

        self.embedding_vd = rows()
        self.blocks = stack(rngs)
        if not config.tie_word_embeddings:
            self.head_vd = rows()
        if config.head_bias:
            self.head_bias_v = nnx.Param(jnp.zeros((config.rows,), dtype), out_sharding=annotation(rules, "vocabulary"))
        self.config = config
        self.rules = rules

    @property
    def tool_block(self) -> ToolBlock:
        """Where the tool rows lie in the vocabulary matrices."""
        return ToolBlock(first=self.config.vocab_size, count=self.config.num_tools, rules=self.rules)

    def __call__(
        self,
        tokens_bs: jax.Array,
        positions_bs: jax.Array,
        segment_ids_bs: jax.Array,
        *,
        tool_rows: ToolRows | None = None,
    ) -> jax.Array:
        """Final normed hidden states [B, S, D] in the compute dtype.

        Args:
            tokens_bs: int32 token or tool ids, [B, S].
            positions_bs: int32 positions for the rotary embedding, from 0 in each segment.
            segment_ids_bs: int32, 0 for padding; tokens attend within their segment.
            tool_rows: the matrices' tool rows once more, to take the gradient in the place of the whole matrices.

        Raises:
            ValueError: the model lies on a mesh that isn't active.
        """
        check_mesh(self.embedding_vd[...])
        c = self.config
        if tool_rows:
            x_bsd = look_up(self.embedding_vd[...], tool_rows["embedding_vd"], tokens_bs, self.tool_block)
            x_bsd = x_bsd.astype(c.compute_dtype)
        else:
            x_bsd = self.embed(tokens_bs)
        rotary = rotary_tables(positions_bs, c.frequencies())

        def attend(q_bsnh: jax.Array, k_bskh: jax.Array, v_bskh: jax.Array) -> jax.Array:
            return attention(q_bsnh, k_bskh, v_bskh, segment_ids_bs, self.rules, c.attention)

        def body(x_bsd: jax.Array, block: DecoderBlock) -> tuple[jax.Array, None]:
            return block(x_bsd, attend, rotary), None

        body = jax.checkpoint(body, policy=KEPT_ACTIVATIONS[c.remat])
        x_bsd, _ = jax.lax.scan(body, x_bsd, self.blocks)
        return self.final_norm(x_bsd)

    def embed(self, tokens_bs: jax.Array) -> jax.Array:
        """Rows of the embedding [B, S, D] in the compute dtype; NaN for ids that have none."""
        c = self.config
        return take_rows(self.embedding_vd[...], tokens_bs, "vocabulary", self.rules, c.compute_dtype)

    def final_norm(self, x_bsd: jax.Array) -> jax.Array:
        """The norm between the last block and the head."""
        raise NotImplementedError

    def head_rows(self) -> jax.Array:
        """The output matrix [V, D]: the head, or the embedding when tied."""
        return (self.embedding_vd if self.config.tie_word_embeddings else self.head_vd)[...]

    def logits(self, hidden_bpd: jax.Array) -> jax.Array:
        """float32 logits [B, P, V] of hidden states [B, P, D].

        Columns behind the last tool, and text columns that the tokenizer doesn't know, are -inf.
        """
        c, spec = self.config, self.rules.spec
        head_vd = reshard(self.head_rows().astype(c.compute_dtype), spec("vocabulary", None))
        logits_bpv = einsum(
            "bpd,vd->bpv", hidden_bpd, head_vd, out=spec("batch", None, "vocabulary"), result_dtype="float32"
        )
        if c.head_bias:
            logits_bpv += self.head_bias_v[...].astype(jnp.float32)
        return (
            logits_bpv if c.predicts_all_rows else jnp.where(c.is_predicted(jnp.arange(c.rows)), logits_bpv, -jnp.inf)
        )

    def tool_head(self) -> tuple[jax.Array, jax.Array | None]:
        """The tool rows of the head, [T, D] and bias [T] or None, whole on every device and in the compute dtype.

        They are few enough to be gathered, and ranking all tools needs them whole.
        """
        c, spec = self.config, self.rules.spec
        head_vd = reshard(self.head_rows(), spec(None, None))
        rows_td = jax.lax.dynamic_slice_in_dim(head_vd, c.vocab_size, c.num_tools).astype(c.compute_dtype)
        if not c.head_bias:
            return rows_td, None
        bias_v = reshard(self.head_bias_v[...], spec(None))
        return rows_td, jax.lax.dynamic_slice_in_dim(bias_v, c.vocab_size, c.num_tools).astype(jnp.float32)
