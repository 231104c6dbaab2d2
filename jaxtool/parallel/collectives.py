"""The transfers between devices in a compiled program, counted from its HLO text.

The text shows a collective several times where the compiler has cut it to overlap it with computation; pieces of one
share kind, shape and channel. How often a loop runs is not in the text, so what is inside loops is kept apart.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|condition)=%?([\w.-]+)|(?:branch|called)_computations=\{([^}]*)\}")
_BODY = re.compile(r"body=%?([\w.-]+)")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)(?:e\d+m\d+\w*)?\[([\d,]*)\]")
_CHANNEL = re.compile(r"channel_id=(\d+)")
# The compiler's fusion of a sum over devices with the cut of its result is what others call reduce-scatter.
_SCATTERED = re.compile(r"^all-reduce-scatter")


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Transfers of one kind.

    Attributes:
        kind: one of `KINDS`.
        count: transfers outside of loops.
        bytes: of the whole arrays, as each device has them after a gather or before a scatter.
        loop_count: transfers of the bodies of loops (over layers, micro-batches, chunks of the loss), each body once.
        loop_bytes: likewise.
    """

    kind: str
    count: int
    bytes: int
    loop_count: int
    loop_bytes: int


def count_collectives(hlo: str) -> tuple[Collectives, ...]:
    """The collectives of a compiled program's text, in the order of `KINDS`; kinds that don't occur are left out."""
    bodies: dict[str, list[str]] = {}
    entry = current = ""
    for line in hlo.splitlines():
        if found := _COMPUTATION.match(line):
            current = found[2]
            bodies[current] = []
            entry = current if found[1] else entry
        elif current:
            bodies[current].append(line)
    count: Counter[tuple[str, bool]] = Counter()
    size: Counter[tuple[str, bool]] = Counter()
    seen: set[tuple[str, str, str]] = set()
    for name, in_loop in _reached(entry, bodies):
        for line in bodies[name]:
            if not (found := _COLLECTIVE.search(line)):
                continue
            if channel := _CHANNEL.search(line):
                transfer = found[2], re.sub(r"\{[^{}]*\}", "", found[1]), channel[1]
                if transfer in seen:
                    continue
                seen.add(transfer)
            kind = "reduce-scatter" if found[2] == "all-reduce" and _SCATTERED.match(name) else found[2]
            count[kind, in_loop] += 1
            whole = _bytes(found[1], started=bool(found[3]) and kind != "all-reduce")
            size[kind, in_loop] += whole * (_group_size(line) if found[2] == "reduce-scatter" else 1)
    return tuple(
        Collectives(
            kind=kind,
            count=count[kind, False],
            bytes=size[kind, False],
            loop_count=count[kind, True],
            loop_bytes=size[kind, True],
        )
        for kind in KINDS
        if count[kind, False] or count[kind, True]
    )


def _reached(entry: str, bodies: dict[str, list[str]]) -> Iterator[tuple[str, bool]]:
    """Computations that the entry reaches, each once, and whether through the body of a loop."""
    open_names, done = [(entry, False)], set()
    while open_names:
        name, in_loop = open_names.pop()
        if name in done or name not in bodies:
            continue
        done.add(name)
        yield name, in_loop
        for line in bodies[name]:
            open_names += [(body, True) for body in _BODY.findall(line)]
            for names in _CALLED.findall(line):
                open_names += [(called.strip(" %"), in_loop) for called in ",".join(names).split(",")]


def _bytes(shapes: str, *, started: bool) -> int:
    """Bytes of an instruction's result; what starts an asynchronous transfer gives its operand and its result."""
    sizes = [
        math.prod(int(size) for size in dimensions.split(",") if size) * _bits(dtype) // 8
        for dtype, dimensions in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", shapes))
    ]
    return max(sizes, default=0) if started else sum(sizes)


def _group_size(line: str) -> int:
    """Devices that take part, by any of the three ways to write groups."""
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'([^']*)'", found[2]))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    found = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    return found[1].count(",") + 1 if found else 1


def _bits(dtype: str) -> int:
    return _BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 32)
