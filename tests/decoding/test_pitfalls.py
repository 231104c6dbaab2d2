"""The list in README.md beside this file names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_named_tests_exist() -> None:
    text = (HERE / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", text)
    assert len(named) > 40
    for file, test in named:
        found = [path for path in HERE.parent.rglob(file) if not test or f"def {test}(" in path.read_text()]
        assert found, f"{file}::{test}"
