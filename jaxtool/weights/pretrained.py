"""The one-line entry: from a name to a model that computes, its tokenizer and its special ids.

What the formats are is in `load`; building parts by hand (another mesh, abstract trees) uses those functions directly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from jaxtool.models import LanguageModel, abstract_model, build_model, parameters, with_parameters
from jaxtool.parallel import AxisRules
from jaxtool.weights.load import read_config, read_weights, resolve_model
from jaxtool.weights.tokenizers import check_tokenizer_fits, eos_token_ids, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A loaded model and what belongs to it.

    Attributes:
        model: the network; its config says shapes and dtypes.
        tokenizer: the text tokenizer (tool tokens are ids behind it, not text).
        eos_token_ids: every id that ends a text, ascending.
        path: the local folder or file that was read.
        mesh: where the parameters live; None on a single device.
    """

    model: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    path: Path
    mesh: Mesh | None

    def on_mesh(self) -> AbstractContextManager[object]:
        """A context in which the model may be called: `with loaded.on_mesh(): loaded.model(...)`."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def load(
    source: str | Path,
    *,
    mesh: Mesh | None = None,
    param_dtype: str | None = None,
    compute_dtype: str | None = None,
    remat: str = "elementwise",
    report: Callable[[str], object] | None = None,
) -> Pretrained:
    """Loads a pretrained model: a Hugging Face folder, a hub id (`owner/name`) or a GGUF file.

    Ids that the tokenizer doesn't know (padding rows of the checkpoint) never get probability.

    Args:
        source: what to load.
        mesh: where the parameters go (`jaxtool.parallel.make_mesh`); None: the default device.
        param_dtype: dtype of the stored parameters, "float32" or "bfloat16". None: float32 on CPU, where bfloat16 is
            slow, and bfloat16 elsewhere.
        compute_dtype: dtype of activations; None: as `param_dtype`.
        remat: see `LanguageModelConfig`.
        report: called with a line for each axis that the mesh doesn't divide and so replicates.

    Raises:
        FileNotFoundError: nothing of that name.
        ValueError: another dtype.
        ConfigError: a config that no port can express; the field is named.
        WeightsError: damaged weights, or weights that don't fit the config.
        TokenizerError: no tokenizer, or one with ids that the model lacks.
    """
    for name, dtype in (("param_dtype", param_dtype), ("compute_dtype", compute_dtype)):
        if dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"{name} is {dtype!r}, expected float32 or bfloat16")
    path = resolve_model(source)
    param_dtype = param_dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    config = read_config(path)
    tokenizer = load_tokenizer(path)
    known = check_tokenizer_fits(tokenizer, config, str(path))
    ends = eos_token_ids(path, tokenizer)
    config = dataclasses.replace(
        config,
        text_tokens=0 if known == config.vocab_size else known,
        param_dtype=param_dtype,
        compute_dtype=compute_dtype or param_dtype,
        remat=remat,
    )
    rules = AxisRules()
    if mesh is not None:
        rules, dropped = rules.fit(dict(mesh.shape), config.axis_sizes)
        if report is not None:
            for line in dropped:
                report(line)
    abstract = abstract_model(lambda: build_model(config, rules), mesh)
    model = with_parameters(abstract, read_weights(path, parameters(abstract)))
    return Pretrained(
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=ends,
        path=path,
        mesh=mesh,
    )
