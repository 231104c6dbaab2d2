"""The tensor tables of the ports: which tensor of a checkpoint fills which parameter. Data, no code to speak of.

The language of the rules and the check that each tensor maps exactly once are in `tensor_map`.
"""

from __future__ import annotations

from jaxtool.models import GPTJConfig, LanguageModelConfig, LlamaConfig
from jaxtool.weights.tensor_map import TensorRule

_PLAIN = ((0,),)
_ROWS = ((0,), (1,))  # one row per token, in the file as here
_TURNED = ((1,), (0,))  # torch keeps [out, in], the parameters are [in, out]
_HEADS = ((1, 2), (0,))  # [N*H, D] in the file, [D, N, H] here
_FROM_HEADS = ((2,), (0, 1))  # [D, N*H] in the file, [N, H, D] here


def _llama_layer(name: str, hf: str, gguf: str, axes: tuple[tuple[int, ...], ...], rotary: bool = False) -> TensorRule:
    return TensorRule(
        path=f"blocks.{name}",
        hf=f"model.layers.{{layer}}.{hf}.weight",
        gguf=f"blk.{{layer}}.{gguf}.weight",
        axes=axes,
        rotary=rotary,
    )


LLAMA_TENSORS: tuple[TensorRule, ...] = (
    TensorRule(
        path="embedding_vd", hf="model.embed_tokens.weight", gguf="token_embd.weight", axes=_ROWS, vocabulary=True
    ),
    _llama_layer("attention_norm_d", "input_layernorm", "attn_norm", _PLAIN),
    _llama_layer("query_dnh", "self_attn.q_proj", "attn_q", _HEADS, rotary=True),
    _llama_layer("key_dkh", "self_attn.k_proj", "attn_k", _HEADS, rotary=True),
    _llama_layer("value_dkh", "self_attn.v_proj", "attn_v", _HEADS),
    _llama_layer("output_nhd", "self_attn.o_proj", "attn_output", _FROM_HEADS),
    _llama_layer("mlp_norm_d", "post_attention_layernorm", "ffn_norm", _PLAIN),
    _llama_layer("gate_df", "mlp.gate_proj", "ffn_gate", _TURNED),
    _llama_layer("up_df", "mlp.up_proj", "ffn_up", _TURNED),
    _llama_layer("down_fd", "mlp.down_proj", "ffn_down", _TURNED),
    TensorRule(path="final_norm_d", hf="model.norm.weight", gguf="output_norm.weight", axes=_PLAIN),
    TensorRule(path="head_vd", hf="lm_head.weight", gguf="output.weight", axes=_ROWS, vocabulary=True),
)

QWEN3_TENSORS: tuple[TensorRule, ...] = (
    *LLAMA_TENSORS,
    _llama_layer("query_norm_h", "self_attn.q_norm", "attn_q_norm", _PLAIN),
    _llama_layer("key_norm_h", "self_attn.k_norm", "attn_k_norm", _PLAIN),
)


def _gptj_layer(name: str, hf: str, axes: tuple[tuple[int, ...], ...]) -> TensorRule:
    return TensorRule(path=f"blocks.{name}", hf=f"transformer.h.{{layer}}.{hf}", axes=axes)


# No GGUF names: llama.cpp has no GPT-J.
GPTJ_TENSORS: tuple[TensorRule, ...] = (
    TensorRule(path="embedding_vd", hf="transformer.wte.weight", axes=_ROWS, vocabulary=True),
    _gptj_layer("norm_d", "ln_1.weight", _PLAIN),
    _gptj_layer("norm_bias_d", "ln_1.bias", _PLAIN),
    _gptj_layer("query_dnh", "attn.q_proj.weight", _HEADS),
    _gptj_layer("key_dnh", "attn.k_proj.weight", _HEADS),
    _gptj_layer("value_dnh", "attn.v_proj.weight", _HEADS),
    _gptj_layer("output_nhd", "attn.out_proj.weight", _FROM_HEADS),
    _gptj_layer("up_df", "mlp.fc_in.weight", _TURNED),
    _gptj_layer("up_bias_f", "mlp.fc_in.bias", _PLAIN),
    _gptj_layer("down_fd", "mlp.fc_out.weight", _TURNED),
    _gptj_layer("down_bias_d", "mlp.fc_out.bias", _PLAIN),
    TensorRule(path="final_norm_d", hf="transformer.ln_f.weight", axes=_PLAIN),
    TensorRule(path="final_norm_bias_d", hf="transformer.ln_f.bias", axes=_PLAIN),
    TensorRule(path="head_vd", hf="lm_head.weight", axes=_ROWS, vocabulary=True),
    TensorRule(path="head_bias_v", hf="lm_head.bias", axes=_PLAIN, vocabulary=True),
)


def tensor_rules(config: LanguageModelConfig) -> tuple[TensorRule, ...]:
    """The table of a model's checkpoint format."""
    if isinstance(config, LlamaConfig):
        return QWEN3_TENSORS if config.qk_norm else LLAMA_TENSORS
    if isinstance(config, GPTJConfig):
        return GPTJ_TENSORS
    raise ValueError(f"no tensor table for {type(config).__name__}")
