"""SmolLM2-135M from its GGUF file: our reader and model against torch with weights dequantised and laid out here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the parity oracle torch is not installed")

import transformers  # noqa: E402

from jaxtool.data import AssetError, smollm2  # noqa: E402
from jaxtool.models import Llama  # noqa: E402
from jaxtool.weights import load_tokenizer  # noqa: E402
from tests.tiny_models import load_model, log_probs  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.assets]

POSITIONS = 512
CONTINUATION = 64
# Five tokens each, so that torch decodes them as one batch without padding.
PROMPTS = (
    "The capital of France is",
    "Once upon a time,",
    "To make good tea you",
    "The three primary colours are",
    "Dear Sir, I write",
)

# Lewis Carroll, Alice's Adventures in Wonderland (1865), the beginning.
TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice
she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the use
of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid),
whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when
suddenly a White Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit say
to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to her that she ought
to have wondered at this, but at the time it all seemed quite natural); but when the Rabbit actually took a watch out of
its waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it flashed across her mind
that she had never before seen a rabbit with either a waistcoat-pocket, or a watch to take out of it, and burning with
curiosity, she ran across the field after it, and fortunately was just in time to see it pop down a large rabbit-hole
under the hedge.

In another moment down went Alice after it, never once considering how in the world she was to get out again.

The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so suddenly that Alice had
not a moment to think about stopping herself before she found herself falling down a very deep well.

Either the well was very deep, or she fell very slowly, for she had plenty of time as she went down to look about her
and to wonder what was going to happen next. First, she tried to look down and make out what she was coming to, but it
was too dark to see anything; then she looked at the sides of the well, and noticed that they were filled with cupboards
and book-shelves; here and there she saw maps and pictures hung upon pegs. She took down a jar from one of the shelves
as she passed; it was labelled "ORANGE MARMALADE", but to her great disappointment it was empty: she did not like to
drop the jar for fear of killing somebody underneath, so managed to put it into one of the cupboards as she fell past
it.
"""


@pytest.fixture(autouse=True)
def quick_compilation() -> None:
    """Not here: what is compared with torch is compiled as users run it."""


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return smollm2()
    except AssetError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> Any:
    return load_tokenizer(file)


@pytest.fixture(scope="module")
def model(file: Path) -> Llama:
    return load_model(file)


@pytest.fixture(scope="module")
def reference(file: Path) -> Iterator[Any]:
    """transformers' model, eager attention, float32, filled from the file without our reader.

    The numbers below are those of SmolLM2-135M's published config.
    """
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
    )
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in gguf.GGUFReader(file).tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name = names.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{parts[part]}.weight"
            if part in ("attn_q", "attn_k"):
                value = half_split_rows(value, heads=9 if part == "attn_q" else 3)
        state[name] = torch.tensor(value, dtype=torch.float32)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    network = transformers.LlamaForCausalLM(config).eval()
    network.load_state_dict(state, strict=True)
    # Waiting threads of torch spin, which on a busy machine costs ten times what a second thread gains.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield network
    torch.set_num_threads(threads)


def half_split_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head, transformers rows i and i + size/2."""
    size = len(rows) // heads
    ordered = np.empty_like(rows)
    for head in range(heads):
        for pair in range(size // 2):
            ordered[head * size + pair] = rows[head * size + 2 * pair]
            ordered[head * size + size // 2 + pair] = rows[head * size + 2 * pair + 1]
    return ordered


def test_log_probs_on_english_text(reference: Any, model: Llama, tokenizer: Any) -> None:
    tokens = np.array(tokenizer.encode(TEXT))[None, :POSITIONS]
    assert tokens.shape == (1, POSITIONS)
    with torch.no_grad():
        logits = reference(torch.tensor(tokens)).logits[0]
    expected = torch.log_softmax(logits.double(), dim=-1).numpy()
    found = log_probs(model, tokens)[0]
    difference = np.abs(found - expected).max()
    assert difference <= 1e-4, f"{difference:.2e}"
    # A model of this size that reads its weights right finds such a text easy; a garbled one is at thousands.
    perplexity = math.exp(-found[np.arange(POSITIONS - 1), tokens[0, 1:]].mean())
    assert 5 < perplexity < 40, perplexity


def test_greedy_continuations(reference: Any, model: Llama, tokenizer: Any) -> None:
    """64 tokens after each prompt, decoded by torch with its KV cache.

    Our greedy continuation is the same iff ours chooses torch's next token after the prompt and after each prefix of
    torch's continuation: the first token at which the two differ would follow on a common prefix. Attention is causal,
    so one forward pass over prompt and continuation gives our choice at all 64 prefixes.
    """
    ids = torch.tensor([tokenizer.encode(prompt) for prompt in PROMPTS])
    start = ids.shape[1]
    with torch.no_grad():
        continued = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=CONTINUATION,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        ).numpy()
    assert continued.shape == (len(PROMPTS), start + CONTINUATION)

    tokens = np.pad(continued, ((0, 0), (0, 11)))
    segments = (np.arange(tokens.shape[1]) < continued.shape[1]) * np.ones_like(tokens)
    choices = log_probs(model, tokens, segments).argmax(axis=-1)
    for row, prompt in enumerate(PROMPTS):
        found, expected = choices[row, start - 1 : start - 1 + CONTINUATION], continued[row, start:]
        assert found.tolist() == expected.tolist(), prompt
    (paris,) = tokenizer.encode(" Paris")
    assert choices[0, start - 1] == paris
