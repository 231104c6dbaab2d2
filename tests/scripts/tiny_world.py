"""A complete tiny world for the scripts: a model folder, a tokenizer with a chat template, a BEIR folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
TOPICS = ("weather", "flight", "hotel", "stock", "recipe", "music", "movie", "news", "translate", "currency")
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def environment(devices: int = 1) -> dict[str, str]:
    return os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error::DeprecationWarning:jaxtool",
        "COLUMNS": "160",
    }


def write_model(folder: Path) -> None:
    folder.mkdir()
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|start|>", "<|end|>", *symbols])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    v, d, f, n, k, layers = len(vocabulary), 32, 64, 4, 2, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": v,
        "hidden_size": d,
        "intermediate_size": f,
        "num_hidden_layers": layers,
        "num_attention_heads": n,
        "num_key_value_heads": k,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    ones = np.ones(d, np.float32)
    tensors = {"model.embed_tokens.weight": matrix(v, d), "model.norm.weight": ones}
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (d, d),
            "self_attn.k_proj": (d // 2, d),
            "self_attn.v_proj": (d // 2, d),
            "self_attn.o_proj": (d, d),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {
            f"model.layers.{layer}.{name}.weight": ones for name in ("input_layernorm", "post_attention_layernorm")
        }
    save_file(tensors, folder / "model.safetensors")


def write_set(folder: Path) -> None:
    (folder / "qrels").mkdir(parents=True)
    with (folder / "corpus.jsonl").open("w") as file:
        for i, topic in enumerate(TOPICS):
            file.write(json.dumps({"_id": f"d{i}", "title": f"get_{topic}", "text": f"about {topic}"}) + "\n")
    rng = np.random.default_rng(1)
    with (
        (folder / "queries.jsonl").open("w") as queries,
        (folder / "qrels/train.tsv").open("w") as train,
        (folder / "qrels/test.tsv").open("w") as test,
    ):
        for file in (train, test):
            file.write("query-id\tcorpus-id\tscore\n")
        for i in range(240):
            first, second = rng.choice(len(TOPICS), 2, replace=False)
            both = i % 3 == 0
            text = f"{TOPICS[first]} {TOPICS[second]}" if both else TOPICS[first]
            queries.write(json.dumps({"_id": f"q{i}", "text": f"{text} {i}"}) + "\n")
            for tool in [first, second] if both else [first]:
                (train if i < 200 else test).write(f"q{i}\td{tool}\t1\n")
