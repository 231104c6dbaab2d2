"""Rows that write text and name tools in one loop, against a plain loop over whole forward passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxtool.config import MeshConfig
from jaxtool.decoding import (
    NO_TOOL,
    UNNAMED,
    Constraint,
    Rows,
    RowSampling,
    Sampling,
    ToolTrie,
    constrain,
    decode,
    decode_model,
    padded,
    read,
)
from jaxtool.decoding.rows import FREE
from jaxtool.parallel import make_mesh
from tests.tiny_models import CONFIGS, log_probs, random_model

CONFIG = dataclasses.replace(CONFIGS["llama"], num_tools=9, text_tokens=90)
LIMIT, SLOTS, ROWS, END = 14, 48, 6, 7
GREEDY = Sampling()
# Of different lengths; one is the beginning of another; one is an atomic tool.
IDS = [[3, 4, 5], [3, 4], [3, 9, 9, 9, 9, 2], [11], [104], [11, 12, 13]]
TRIE = ToolTrie.build(IDS, end_token=END, vocab_rows=CONFIG.rows)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(CONFIG)


def prompts_of(rows: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(90, size=int(rng.integers(1, 12))).tolist() for _ in range(rows)]


def generated(
    model: Any,
    prompts: Sequence[Sequence[int]],
    constraint: Constraint,
    *,
    inside: Sequence[bool],
    sampling: Sampling = GREEDY,
    numbers: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[int], list[int]]:
    """Tokens, named tools and nodes of each row."""
    rows = len(prompts)
    settings = RowSampling.of([sampling] * rows, numbers or range(rows))
    limit_b, stop_ids = np.full(rows, LIMIT, np.int32), np.full(1, -1, np.int32)
    more: dict[str, Any] = {"draws": sampling.temperature > 0, "constraint": constraint}
    state = Rows.empty(model, rows=rows, slots=SLOTS, most=LIMIT)
    state = constrain(model, state, np.array(inside))
    state = read(model, state, *padded(prompts), settings, limit_b, stop_ids, **more)
    state = decode(model, state, settings, limit_b, stop_ids, 100, **more)
    tokens = [row[:n].tolist() for row, n in zip(np.asarray(state.tokens_bn), np.asarray(state.count_b), strict=True)]
    return tokens, np.asarray(state.tool_b).tolist(), np.asarray(state.node_b).tolist()


def expected(
    model: Any,
    prompt: Sequence[int],
    *,
    inside: bool,
    triggers: Sequence[int] = (),
    first_tokens: bool = False,
    stop_at_tool: bool = True,
    allowed: Sequence[int] = range(len(IDS)),
) -> tuple[list[int], int]:
    """The same by whole passes and lists of ids: what is written must be the beginning of an allowed id."""
    ids = {(*IDS[tool], END): tool for tool in allowed}
    tokens, named, written = list(prompt), -1, () if inside and ids else None
    while len(tokens) < len(prompt) + LIMIT:
        whole = np.pad([tokens], [(0, 0), (0, SLOTS - len(tokens))])
        logits = log_probs(model, whole)[0, len(tokens) - 1]
        if written is None:
            token = int(logits.argmax())
            if token in triggers and ids:
                written = ()
            elif first_tokens and any(each[0] == token for each in ids):
                written = (token,)
        else:
            place = len(written)
            following = {each[place] for each in ids if each[:place] == written}
            token = max(following, key=lambda each: logits[each])
            written = (*written, token)
        tokens.append(token)
        if written in ids:
            named, written = ids[written], None
            if stop_at_tool:
                break
    return tokens[len(prompt) :], named


def constraint_of(triggers: Sequence[int], **more: Any) -> Constraint:
    return Constraint(trie=TRIE, trigger_ids=np.array([*triggers, -1], np.int32), **more)


def test_rows_that_name_a_tool_beside_rows_that_write_text(model: Any) -> None:
    prompts, inside = prompts_of(ROWS), [True, False, True, True, False, True]
    tokens, tools, _ = generated(decode_model(model), prompts, constraint_of([]), inside=inside)
    for row, prompt in enumerate(prompts):
        assert (tokens[row], tools[row]) == expected(model, prompt, inside=inside[row])
        assert (tools[row] >= 0) == inside[row]
        if inside[row]:
            assert tokens[row] == [*IDS[tools[row]], END]
    # A row alone does the same.
    for row in (0, 1):
        alone, tool, _ = generated(decode_model(model), [prompts[row]], constraint_of([]), inside=[inside[row]])
        assert (alone[0], tool[0]) == (tokens[row], tools[row])


@pytest.mark.parametrize("stop_at_tool", [True, False])
def test_a_trigger_begins_a_name_and_text_goes_on_behind_it(model: Any, stop_at_tool: bool) -> None:
    prompts = prompts_of(ROWS)
    free = [expected(model, prompt, inside=False)[0] for prompt in prompts]
    triggers = sorted({row[2] for row in free})  # so that every row meets one
    found, tools, nodes = generated(
        decode_model(model), prompts, constraint_of(triggers, stop_at_tool=stop_at_tool), inside=[False] * ROWS
    )
    for row, prompt in enumerate(prompts):
        wanted = expected(model, prompt, inside=False, triggers=triggers, stop_at_tool=stop_at_tool)
        assert (found[row], tools[row]) == wanted
        assert nodes[row] == FREE or len(found[row]) == LIMIT
    assert any(tool >= 0 for tool in tools)
    assert any(len(row) > 4 for row in found) or stop_at_tool


def test_the_first_token_of_a_tool_begins_its_name(model: Any) -> None:
    prompts = prompts_of(ROWS)
    first = expected(model, prompts[0], inside=False)[0][1]
    ids = [[first, 4, 5], [first, 6]]
    trie = ToolTrie.build(ids, end_token=None, vocab_rows=CONFIG.rows)
    constraint = Constraint(trie=trie, trigger_ids=np.full(1, -1, np.int32), first_tokens=True)
    tokens, tools, _ = generated(decode_model(model), prompts, constraint, inside=[False] * ROWS)
    assert tools[0] >= 0 and tokens[0][-len(ids[tools[0]]) :] == ids[tools[0]]
    for row in range(ROWS):
        assert (tools[row] >= 0) == (first in tokens[row])


def test_each_row_has_its_own_tools(model: Any) -> None:
    prompts, inside = prompts_of(ROWS), [True] * ROWS
    allowed_bt = np.zeros((ROWS, len(IDS)), bool)
    for row in range(ROWS - 1):
        allowed_bt[row, [row, (row + 2) % len(IDS)]] = True
    made = decode_model(model)  # row 5 may name none: it writes text
    constraint = constraint_of([], allowed_bt=allowed_bt)
    tokens, tools, _ = generated(made, prompts, constraint, inside=inside)
    for row, prompt in enumerate(prompts):
        allowed = np.flatnonzero(allowed_bt[row]).tolist()
        assert (tokens[row], tools[row]) == expected(model, prompt, inside=True, allowed=allowed)
    assert tools[-1] == -1 and len(tokens[-1]) == LIMIT


def test_none_of_the_tools_is_an_outcome_of_its_own(model: Any) -> None:
    """Not that of rows that have named nothing yet; tokens and the end of a row are those of any entry."""
    made, prompts, inside = decode_model(model), prompts_of(ROWS), [True, False, True, True, False, True]
    tokens, tools, nodes = generated(made, prompts, constraint_of([]), inside=inside)
    none = tools[0]
    found = generated(made, prompts, constraint_of([], no_tool=none), inside=inside)
    assert found == (tokens, [NO_TOOL if tool == none else tool for tool in tools], nodes)
    assert NO_TOOL in found[1] and UNNAMED in found[1] and max(found[1]) >= 0
    with pytest.raises(ValueError, match="no_tool is 6, expected an entry of the trie, 0 to 5"):
        generated(made, prompts, constraint_of([], no_tool=6), inside=inside)


def test_drawn_names_are_names(model: Any) -> None:
    prompts, inside = prompts_of(ROWS) * 4, [True] * ROWS * 4
    made, hot = decode_model(model), Sampling(temperature=3.0, seed=2)
    tokens, tools, _ = generated(made, prompts, constraint_of([]), inside=inside, sampling=hot)
    assert all(row == [*IDS[tool], END] for row, tool in zip(tokens, tools, strict=True))
    assert len(set(tools)) > 2
    alone, tool, _ = generated(made, prompts[3:4], constraint_of([]), inside=[True], sampling=hot, numbers=[3])
    assert (alone[0], tool[0]) == (tokens[3], tools[3])


def test_eight_devices(model: Any) -> None:
    prompts, inside = prompts_of(8), [row % 3 > 0 for row in range(8)]
    allowed_bt = np.ones((8, len(IDS)), bool)
    allowed_bt[1, :4] = False
    one = constraint_of([20, 30], allowed_bt=allowed_bt, stop_at_tool=False)
    before = generated(decode_model(model), prompts, one, inside=inside)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    with jax.set_mesh(mesh):
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        trie = jax.device_put(TRIE, everywhere)
        constraint = dataclasses.replace(one, trie=trie)
        made = decode_model(random_model(CONFIG, mesh=mesh))
        assert generated(made, prompts, constraint, inside=inside) == before
