"""The other systems of `bench_decode.py`: transformers' `generate`, and llama.cpp in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtool.data import ChatPrompts, smollm2


def _torch() -> Any:
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    return torch


class TorchRetriever:
    """Beam search over tools of one token and END, as ToolGen's evaluation runs it."""

    def __init__(self, shape: dict[str, Any], rows: int, tools: range, prompts: ChatPrompts) -> None:
        import transformers

        self.torch = _torch()
        self.torch.manual_seed(0)
        config = transformers.LlamaConfig(**{**shape, "vocab_size": rows}, bos_token_id=1, eos_token_id=2)
        self.model = transformers.LlamaForCausalLM(config).eval()
        self.prompts, self.tools, self.first = prompts, list(tools), tools.start

    def retrieve(self, texts: Sequence[str], batch: int) -> list[Any]:
        """The five best tools of each text."""
        found = []
        encoded = sorted((self.prompts.prompt(text).ids for text in texts), key=len)
        for start in range(0, len(encoded), batch):
            ids, mask = _left_padded(self.torch, encoded[start : start + batch])
            length = ids.shape[1]

            def allowed(_: int, tokens: Any, length: int = length) -> list[int]:
                return self.tools if len(tokens) == length else [2]

            with self.torch.inference_mode():
                tokens = self.model.generate(
                    ids,
                    attention_mask=mask,
                    num_beams=5,
                    num_return_sequences=5,
                    max_new_tokens=2,
                    do_sample=False,
                    prefix_allowed_tokens_fn=allowed,
                    pad_token_id=0,
                )
            found.append(tokens[:, length] - self.first)
        return found


class TorchGenerator:
    """Greedy generation with the model of a folder."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self.torch = _torch()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
        self.model.generation_config.eos_token_id = None  # each call says what ends a text

    def generate(
        self, prompts: Sequence[Sequence[int]], limit: int, stop_ids: Sequence[int], batch: int
    ) -> dict[int, list[int]]:
        """The new tokens of each prompt; prompts of about one length are in a batch."""
        found = {}
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            ids, mask = _left_padded(self.torch, [prompts[i] for i in rows])
            with self.torch.inference_mode():
                tokens = self.model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=limit,
                    do_sample=False,
                    eos_token_id=list(stop_ids),
                    pad_token_id=0,
                )
            for i, row in zip(rows, tokens[:, ids.shape[1] :].tolist(), strict=True):
                end = next((place + 1 for place, token in enumerate(row) if token in stop_ids), len(row))
                found[i] = row[:end]
        return found

    def uniform(self, prompts_bs: np.ndarray, new: int) -> list[list[int]]:
        """So many new tokens of each."""
        ids = self.torch.tensor(prompts_bs, dtype=self.torch.long)
        with self.torch.inference_mode():
            tokens = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [row[prompts_bs.shape[1] :] for row in tokens.tolist()]


def _left_padded(torch: Any, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


# Reads lines [prompts, new tokens] and answers each with the tokens. All rows are decoded in one batch.
_SERVER = """
import json, sys
import numpy as np
import llama_cpp as c

path, rows, slots = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
quiet = c.llama_log_callback(lambda *_: None)
c.llama_log_set(quiet, None)
c.llama_backend_init()
settings = c.llama_model_default_params()
model = c.llama_model_load_from_file(path.encode(), settings)
options = c.llama_context_default_params()
options.n_ctx, options.n_batch, options.n_ubatch = rows * slots, max(rows * slots, 512), 512
options.n_seq_max, options.n_threads, options.n_threads_batch = rows, int(sys.argv[4]), int(sys.argv[4])
options.type_k = options.type_v = 0  # float32
context = c.llama_init_from_model(model, options)
vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
batch = c.llama_batch_init(rows * slots, 0, 1)

def add(token, place, row, wanted):
    n = batch.n_tokens
    batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.seq_id[n][0], batch.logits[n] = token, place, 1, row, wanted
    batch.n_tokens = n + 1

def best(n):
    return int(np.ctypeslib.as_array(c.llama_get_logits_ith(context, n), (vocabulary,)).argmax())

print("ready", flush=True)
for line in sys.stdin:
    prompts, new = json.loads(line)
    c.llama_memory_clear(c.llama_get_memory(context), True)
    batch.n_tokens, last = 0, []
    for row, prompt in enumerate(prompts):
        for place, token in enumerate(prompt):
            add(token, place, row, place == len(prompt) - 1)
        last.append(batch.n_tokens - 1)
    assert c.llama_decode(context, batch) == 0
    made = [[best(n)] for n in last]
    for step in range(1, new):
        batch.n_tokens = 0
        for row, prompt in enumerate(prompts):
            add(made[row][-1], len(prompt) + step - 1, row, True)
        assert c.llama_decode(context, batch) == 0
        for row in range(len(prompts)):
            made[row].append(best(row))
    print(json.dumps(made), flush=True)
"""


class LlamaCpp:
    """llama.cpp behind a pipe."""

    def __init__(self, python: str, model: Path, rows: int, slots: int) -> None:
        command = [python, "-c", _SERVER, str(model), str(rows), str(slots), str(os.cpu_count() or 1)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", "llama.cpp could not load the model"

    @classmethod
    def start(cls, folder: Path, *, rows: int, slots: int) -> LlamaCpp | None:
        """A server for SmolLM2 in float32, converted in `folder`; None unless LLAMA_CPP_PYTHON names an interpreter."""
        python = os.environ.get("LLAMA_CPP_PYTHON")
        if not python:
            return None
        model = folder / "float32.gguf"
        if not model.exists():
            _write_float32(smollm2(), model)
        return cls(python, model, rows, slots)

    def generate(self, prompts_bs: np.ndarray, new: int) -> list[list[int]]:
        """So many new tokens of each prompt."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([prompts_bs.tolist(), new]) + "\n")
        self.process.stdin.flush()
        found: list[list[int]] = json.loads(self.process.stdout.readline())
        return found

    def stop(self) -> None:
        """Ends the server."""
        self.process.kill()
        self.process.wait()


def _write_float32(source: Path, target: Path) -> None:
    """A GGUF file with the same fields and every tensor in float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, element)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape([int(n) for n in reversed(tensor.shape)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
