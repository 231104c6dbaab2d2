"""Retrieval with names as ids: a tool is named in tokens of text, by beam search over the trie of all names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxtool.decoding import BeamSearch, DecodeModel, ToolTrie, TrieHead, decode_model, padded, prefill, rank_tools
from jaxtool.decoding.buckets import SHORTEST_READ, power
from jaxtool.decoding.rows import shares
from jaxtool.models import LanguageModel
from jaxtool.toolgen.retrieval import Retrieved


def name_ids(tokenizer: Any, names: Sequence[str]) -> list[list[int]]:
    """Token ids of names; special tokens that they spell out stay text.

    Raises:
        ValueError: the tokenizer doesn't give a name back from its ids, or two names have the same; names them.
    """
    ids: list[list[int]] = tokenizer(list(names), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    first: dict[tuple[int, ...], int] = {}
    for number, (name, tokens) in enumerate(zip(names, ids, strict=True)):
        if not name:
            raise ValueError(f"tool {number}: its name is empty, expected text")
        again = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        if again != name:
            raise ValueError(f"tool {number}, {name!r}: the tokenizer gives {again!r} back, expected the name")
        other = first.setdefault(tuple(tokens), number)
        if other != number:
            raise ValueError(f"tools {other} and {number} have the same name {name!r}")
    return ids


class NameRetriever:
    """Ranks tools by the probability of their names behind prompts.

    Args:
        model: the model, its parameters on `mesh`; its layers are taken apart here (see `decode_model`).
        tokenizer: of the model.
        names: of the tools, T.
        end_token: what ends a name, the model's EOS as a rule.
        mesh: the mesh of the model.
        search: beams and scores; its `keep` is the most that can be asked for.
        no_tool: a name for "none of the tools", ranked among them with the id T (None: there is none).
        batch_size: prompts that are searched for together; must divide by the batch axes of the mesh.
        read_tokens: tokens of prompts that are read at once, at most; one prompt for each share of a batch always fits.
        donate: give up the memory of the model's layers, which must not be used again; without, they exist twice.

    Attributes:
        longest: tokens of the longest name, its end included: as many positions must be left behind a prompt.

    Raises:
        ValueError: as `name_ids` and `ToolTrie.build`; `no_tool` is the name of a tool; or a batch that the mesh
            doesn't divide.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,
        names: Sequence[str],
        mesh: Mesh,
        *,
        end_token: int,
        search: BeamSearch,
        no_tool: str | None = None,
        batch_size: int = 16,
        read_tokens: int = 4096,
        donate: bool = False,
    ) -> None:
        self.tools, self.no_tool = len(names), no_tool is not None
        self.search, self.mesh, self.batch_size, self.read_tokens = search, mesh, batch_size, read_tokens
        if no_tool in names:
            raise ValueError(
                f"no_tool is {no_tool!r}, the name of tool {names.index(no_tool)}; expected a text that names none"
            )
        all_names = [*names, no_tool] if no_tool is not None else list(names)
        text_rows = model.config.text_tokens or model.config.vocab_size
        trie = ToolTrie.build(name_ids(tokenizer, all_names), end_token=end_token, vocab_rows=text_rows)
        self.longest: int = trie.max_depth
        with jax.set_mesh(mesh):
            self._parts = shares(model.rules)
            if batch_size < 1 or batch_size % self._parts:
                raise ValueError(
                    f"batch_size {batch_size} is not a positive multiple of the {self._parts} devices that share a "
                    "batch"
                )
            self._model: DecodeModel = decode_model(model, donate=donate)
            self._trie = jax.device_put(trie)
            self._head = TrieHead.build(self._model, self._trie, search.normalize)

    def rank(
        self,
        prompts: Sequence[Sequence[int]],
        k: int,
        *,
        allowed_qt: np.ndarray | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Retrieved:
        """The k best tools behind each prompt; `log_probs_qk` are scores as the search defines them.

        Args:
            prompts: token ids, none empty, with room for the longest name among the model's positions.
            k: places to fill.
            allowed_qt: bool [Q, T] (None: all tools); "none of the tools" is always allowed.
            progress: called with the number of prompts of each finished search.

        Raises:
            ValueError: k below 1 or above `search.keep`, a mask of another shape, or a prompt for which no tool has a
                finite score although some are allowed.
        """
        if not 1 <= k <= self.search.keep:
            raise ValueError(f"k is {k}, expected 1 to {self.search.keep}, what the search keeps")
        count = len(prompts)
        if allowed_qt is not None:
            if allowed_qt.shape != (count, self.tools) or allowed_qt.dtype != np.bool_:
                raise ValueError(
                    f"allowed_qt is {allowed_qt.dtype} {allowed_qt.shape}, expected bool {count, self.tools}"
                )
            if self.no_tool:
                allowed_qt = np.pad(allowed_qt, ((0, 0), (0, 1)), constant_values=True)
        found = Retrieved(
            tools_qk=np.full((count, k), -1, np.int32),
            log_probs_qk=np.full((count, k), -np.inf, np.float32),
            valid_qk=np.zeros((count, k), bool),
            cut=0,
        )
        queue = sorted(range(count), key=lambda i: (-len(prompts[i]), i))
        while queue:
            # Sizes are powers of two, so that few programs serve all prompts.
            length = power(len(prompts[queue[0]]), SHORTEST_READ)
            most = max(min(self.read_tokens // length, self.batch_size) // self._parts, 1)
            together = min(1 << (most.bit_length() - 1), power(-(-len(queue) // self._parts), 1)) * self._parts
            some, queue = queue[:together], queue[together:]
            ids = [list(prompts[i]) for i in some] + [[0]] * (together - len(some))
            allowed_bt = None
            if allowed_qt is not None:
                missing = ((0, together - len(some)), (0, 0))
                allowed_bt = jnp.asarray(np.pad(allowed_qt[some], missing, constant_values=True))
            with jax.set_mesh(self.mesh):
                hidden_bd, cache = prefill(self._model, *padded(ids, length))
                ranked = rank_tools(self._model, self._trie, cache, hidden_bd, self.search, allowed_bt, head=self._head)
                arrays = [np.asarray(x)[: len(some), :k] for x in (ranked.tools_bk, ranked.scores_bk, ranked.valid_bk)]
            found.tools_qk[some], found.log_probs_qk[some], found.valid_qk[some] = arrays
            if progress is not None:
                progress(len(some))
        for number in np.flatnonzero(~found.valid_qk[:, 0]):
            if allowed_qt is None or allowed_qt[number].any():
                raise ValueError(f"prompt {number}: the model's scores are not finite, its weights are damaged")
        return found
