"""Small tokenizers of the kinds that models have, for tests of text and chat samples."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from jaxtool.weights import load_tokenizer
from tests.tiny_models import TINY_LLAMA

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(*, adds_bos: bool = False) -> Any:
    """Byte b is token 3 + b; behind the bytes come he, " t", " the", in and two line breaks."""
    tokenizer = load_tokenizer(TINY_LLAMA)
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)]
        )
    return tokenizer


def sentencepiece(*, legacy: bool) -> Any:
    """Like Llama 2's: BPE with bytes to fall back to, and a blank before every text.

    Args:
        legacy: put the blank behind special tokens too, as Llama 2's does; else at the beginning of a text only.
    """
    letters = "▁ adehilnostuyw:.[]INST/"
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("h", "i"), ("▁", "hi"), ("o", "n"), ("▁", "on")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(letters)]
    tokens += ["".join(pair) for pair in merges]
    backend = Tokenizer(
        models.BPE(
            vocab={token: row for row, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    backend.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokens.index("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
