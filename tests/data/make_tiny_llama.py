"""Makes tests/data/tiny_llama: a random Llama with a tokenizer, and the log-probabilities that torch computes for it.

Run `python tests/data/make_tiny_llama.py` where torch is installed. Tests read the folder; none runs this.

The tokenizer is made to be worked out by hand: byte b is token 3 + b, behind it come five merged tokens. The weights
are stored in bfloat16, which halves the file and is exact in float32, where torch computes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

FOLDER = Path(__file__).parent / "tiny_llama"
POSITIONS = 64

SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("i", "n"), ("Ċ", "Ċ")]
TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, with a chat template that inserts a system turn where the messages have none."""
    symbols = bytes_to_unicode()
    tokens = [*SPECIAL, *(symbols[byte] for byte in range(256)), *("".join(pair) for pair in MERGES)]
    backend = Tokenizer(models.BPE(vocab={token: row for row, token in enumerate(tokens)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[2],
        model_max_length=128,
        chat_template=TEMPLATE,
    )


def model() -> LlamaForCausalLM:
    """Untied, two query heads for each key-value head; weights large enough that every layer matters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=3 + 256 + len(MERGES),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
        attn_implementation="eager",
    )
    network = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return network.to(torch.bfloat16)


def main() -> None:
    """Writes the folder anew."""
    FOLDER.mkdir(exist_ok=True)
    model().save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink()
    tokenizer().save_pretrained(FOLDER, save_jinja_files=False)
    tokens = np.random.default_rng(0).integers(3 + 256 + len(MERGES), size=POSITIONS, dtype=np.int32)
    # Read back, because `to(bfloat16)` also rounded the rotary frequencies, which the file doesn't hold.
    network = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = network(torch.tensor(tokens[None].astype(np.int64))).logits[0]
    log_probs = torch.log_softmax(logits.double(), dim=-1).float().numpy()
    np.savez_compressed(FOLDER / "golden.npz", tokens=tokens, log_probs=log_probs)


if __name__ == "__main__":
    main()
