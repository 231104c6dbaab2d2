"""Llama in Flax NNX with the variations of its relatives: Llama 2, 3, 3.1 to 3.3 (scaled rotary), Qwen3 (QK norm).

Numerics follow transformers' `LlamaForCausalLM` and `Qwen3ForCausalLM`: half-split rotary embedding with float32
angles, RMSNorm statistics and attention softmax in float32.
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
from jaxtool.models.norms import rms_norm
from jaxtool.models.rotary import RopeScaling, rotary_frequencies, rotate_half_split
from jaxtool.parallel import AxisRules


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(LanguageModelConfig):
    """A Llama-like model; see `LanguageModelConfig` for the other fields.

    Attributes:
        num_key_value_heads: key-value heads; each serves as many query heads as fit.
        rope_theta: base of the rotary frequencies.
        rope_scaling: rescaling of the frequencies (Llama 3.1 to 3.3).
        rms_norm_eps: added to the mean square in every norm.
        qk_norm: RMSNorm over each head of queries and keys, before the rotary embedding (Qwen3).
    """

    architecture: ClassVar[str] = "llama"
    fused_projections: ClassVar[tuple[tuple[str, ...], ...]] = (("query", "key", "value"), ("gate", "up"))
    projections: ClassVar[Mapping[str, Projection]] = {
        "query": Projection(letters="dnh", axes=("embed", "heads", "head_size")),
        "key": Projection(letters="dkh", axes=("embed", "kv_heads", "head_size")),
        "value": Projection(letters="dkh", axes=("embed", "kv_heads", "head_size")),
        "output": Projection(letters="nhd", axes=("heads", "head_size", "embed"), inputs=2),
        "gate": Projection(letters="df", axes=("embed", "mlp")),
        "up": Projection(letters="df", axes=("embed", "mlp")),
        "down": Projection(letters="fd", axes=("mlp", "embed")),
    }

    num_key_value_heads: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    qk_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.rope_theta < 1e30:
            raise ValueError(f"rope_theta is {self.rope_theta}, expected a number above 1 and below 1e30")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""
        return self.num_key_value_heads

    def frequencies(self) -> np.ndarray:
        """Rotary frequencies, float32 [H / 2]."""
        return rotary_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)


class LlamaBlock(DecoderBlock):
    """One decoder layer: pre-norm grouped-query attention, then a pre-norm SwiGLU MLP."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig, rules: AxisRules, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rules, rngs=rngs)
        self.attention_norm_d = self.vector(1.0, config.hidden_size, "activation")
        self.mlp_norm_d = self.vector(1.0, config.hidden_size, "activation")
        if config.qk_norm:
            self.query_norm_h = self.vector(1.0, config.head_dim, "head_size")
            self.key_norm_h = self.vector(1.0, config.head_dim, "head_size")

    def __call__(self, x_bsd: jax.Array, attend: Attend, rotary: Rotary) -> jax.Array:
        """x [B, S, D], rotary tables 2 x [B, S, H/2] -> [B, S, D]; `attend` mixes the tokens."""
        eps = self.config.rms_norm_eps
        x_bsd = x_bsd + self._attention(rms_norm(x_bsd, self.attention_norm_d[...], eps), attend, rotary)
        return x_bsd + self._mlp(rms_norm(x_bsd, self.mlp_norm_d[...], eps))

    def _attention(self, x_bsd: jax.Array, attend: Attend, rotary: Rotary) -> jax.Array:
        with jax.named_scope("attention"):
            q_bsnh, k_bskh, v_bskh = self.project_all(("query", "key", "value"), x_bsd)
            v_bskh = checkpoint_name(v_bskh, "kept")
            if self.config.qk_norm:
                q_bsnh, k_bskh = checkpoint_name(q_bsnh, "kept"), checkpoint_name(k_bskh, "kept")
                q_bsnh = rms_norm(q_bsnh, self.query_norm_h[...], self.config.rms_norm_eps)
                k_bskh = rms_norm(k_bskh, self.key_norm_h[...], self.config.rms_norm_eps)
            q_bsnh = checkpoint_name(rotate_half_split(q_bsnh, *rotary), "kept")
            k_bskh = checkpoint_name(rotate_half_split(k_bskh, *rotary), "kept")
            mixed_bsnh = attend(q_bsnh, k_bskh, v_bskh)
            return self.project("output", mixed_bsnh)

    def _mlp(self, x_bsd: jax.Array) -> jax.Array:
        with jax.named_scope("mlp"):
            gate_bsf, up_bsf = (checkpoint_name(y, "kept") for y in self.project_all(("gate", "up"), x_bsd))
            return self.project("down", jax.nn.silu(gate_bsf) * up_bsf)


class Llama(LanguageModel):
    """The network of a `LlamaConfig`. Beside the shared parameters it has `final_norm_d` [D]."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig, rules: AxisRules = DEFAULT_RULES, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, LlamaBlock, rules, rngs=rngs)
        self.final_norm_d = final_vector(1.0, config, rules)

    def final_norm(self, x_bsd: jax.Array) -> jax.Array:
        """RMSNorm between the last block and the head."""
        return rms_norm(x_bsd, self.final_norm_d[...], self.config.rms_norm_eps)
