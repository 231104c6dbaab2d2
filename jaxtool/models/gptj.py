"""GPT-J in Flax NNX: attention and MLP side by side behind one LayerNorm, interleaved partial rotary, biased head.

Numerics follow transformers' `GPTJForCausalLM`: scores and softmax in float32, probabilities back in the dtype of the
values, tanh GELU. There is no Llama-like variation in it, so it shares only what `language_model` holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtool.models.language_model import (
    DEFAULT_RULES,
    Attend,
    DecoderBlock,
    LanguageModel,
    LanguageModelConfig,
    Projection,
    Rotary,
    final_vector,
)
from jaxtool.models.norms import layer_norm
from jaxtool.models.rotary import rotary_frequencies, rotate_interleaved
from jaxtool.parallel import AxisRules

ROTARY_THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class GPTJConfig(LanguageModelConfig):
    """A GPT-J model; see `LanguageModelConfig` for the other fields.

    Attributes:
        rotary_dim: dimensions of each head that are rotated, from the first on (64 of 256 in the 6B model).
        layer_norm_eps: added to the variance in every norm.
    """

    architecture: ClassVar[str] = "gptj"
    head_bias: ClassVar[bool] = True
    fused_projections: ClassVar[tuple[tuple[str, ...], ...]] = (("query", "key", "value"),)
    projections: ClassVar[Mapping[str, Projection]] = {
        "query": Projection(letters="dnh", axes=("embed", "heads", "head_size")),
        "key": Projection(letters="dnh", axes=("embed", "heads", "head_size")),
        "value": Projection(letters="dnh", axes=("embed", "heads", "head_size")),
        "output": Projection(letters="nhd", axes=("heads", "head_size", "embed"), inputs=2),
        "up": Projection(letters="df", axes=("embed", "mlp")),
        "down": Projection(letters="fd", axes=("mlp", "embed")),
    }

    rotary_dim: int
    layer_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings is true, GPT-J's biased head is implemented untied only")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim is {self.rotary_dim}, expected an even number from 2 to the head size {self.head_dim}"
            )

    def frequencies(self) -> np.ndarray:
        """Rotary frequencies, float32 [rotary_dim / 2]."""
        return rotary_frequencies(self.rotary_dim, ROTARY_THETA)


class GPTJBlock(DecoderBlock):
    """One decoder layer: x + attention(norm(x)) + mlp(norm(x))."""

    config: GPTJConfig

    def __init__(self, config: GPTJConfig, rules: AxisRules, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rules, rngs=rngs)
        self.norm_d = self.vector(1.0, config.hidden_size, "activation")
        self.norm_bias_d = self.vector(0.0, config.hidden_size, "activation")
        self.up_bias_f = self.vector(0.0, config.intermediate_size, "mlp")
        self.down_bias_d = self.vector(0.0, config.hidden_size, "activation")

    def __call__(self, x_bsd: jax.Array, attend: Attend, rotary: Rotary) -> jax.Array:
        """x [B, S, D], rotary tables 2 x [B, S, rotary_dim/2] -> [B, S, D]; `attend` mixes the tokens."""
        normed_bsd = layer_norm(x_bsd, self.norm_d[...], self.norm_bias_d[...], self.config.layer_norm_eps)
        return x_bsd + self._attention(normed_bsd, attend, rotary) + self._mlp(normed_bsd)

    def _attention(self, x_bsd: jax.Array, attend: Attend, rotary: Rotary) -> jax.Array:
        with jax.named_scope("attention"):
            q_bsnh, k_bsnh, v_bsnh = self.project_all(("query", "key", "value"), x_bsd)
            q_bsnh = checkpoint_name(rotate_interleaved(q_bsnh, *rotary), "kept")
            k_bsnh = checkpoint_name(rotate_interleaved(k_bsnh, *rotary), "kept")
            v_bsnh = checkpoint_name(v_bsnh, "kept")
            mixed_bsnh = attend(q_bsnh, k_bsnh, v_bsnh)
            return self.project("output", mixed_bsnh)

    def _mlp(self, x_bsd: jax.Array) -> jax.Array:
        with jax.named_scope("mlp"):
            inner_bsf = checkpoint_name(self.project("up", x_bsd), "kept") + self.up_bias_f[...].astype(x_bsd.dtype)
            down_bsd = self.project("down", jax.nn.gelu(inner_bsf, approximate=True))
            return down_bsd + self.down_bias_d[...].astype(x_bsd.dtype)


class GPTJ(LanguageModel):
    """The network of a `GPTJConfig`. Beside the shared parameters it has `final_norm_d` and `final_norm_bias_d` [D]."""

    config: GPTJConfig

    def __init__(self, config: GPTJConfig, rules: AxisRules = DEFAULT_RULES, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, GPTJBlock, rules, rngs=rngs)
        self.final_norm_d = final_vector(1.0, config, rules)
        self.final_norm_bias_d = final_vector(0.0, config, rules)

    def final_norm(self, x_bsd: jax.Array) -> jax.Array:
        """LayerNorm between the last block and the head."""
        return layer_norm(x_bsd, self.final_norm_d[...], self.final_norm_bias_d[...], self.config.layer_norm_eps)
