"""Bounds of settings: checks that the dataclasses share, and the sizes behind which a value is a slip of the pen."""

from __future__ import annotations

# Sizes behind these are slips of the pen: no published run comes near, and they'd be noticed when memory has run out.
MOST_EPOCHS = 1_000
MOST_ROWS = 65_536
MOST_TOKENS = 131_072  # of a row or prompt
MOST_BATCH_TOKENS = 2**26
MOST_RANK = 4_096
MOST_SAMPLES = 4_096  # of a prompt


def within(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raises ValueError unless `least <= value`, and `value <= most` if there is such."""
    if value < least or (most is not None and value > most):
        expected = f"{least} or more" if most is None else f"{least} to {most:,}"
        raise ValueError(f"{name} is {value}, expected {expected}")


def share(name: str, value: float) -> None:
    """Raises ValueError unless the value is from 0 to below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value}, expected a share from 0 to below 1")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
