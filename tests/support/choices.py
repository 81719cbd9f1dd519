"""Checks of the explanation of a choice among an operation's variants."""

from __future__ import annotations

from typing import Any


def assert_first_that_serves(explanation: Any, operation: str, chosen: str, problem: str) -> None:
    """Asserts the chosen variant; each other one has a reason, and the text names the choice, its knobs and the problem."""
    assert explanation.chosen.variant == chosen
    assert [c.variant for c in explanation.candidates] == [f"sm90_{operation}", f"sm80_{operation}", "cpu_reference"]
    assert all(bool(c.reasons) != (c is explanation.chosen) for c in explanation.candidates)
    assert explanation.chosen.knobs in str(explanation)
    assert chosen in str(explanation) and problem in str(explanation)
    assert explanation.to_dict()["candidates"][0]["variant"] == f"sm90_{operation}"
