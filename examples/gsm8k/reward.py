"""A reward with a first rung: a small model finds the form of an answer before it finds right ones."""

from __future__ import annotations

import re

from hybridflow.rewards import gsm8k


def graded(response: str, answer: str) -> float:
    """1.0 for the right number, 0.1 for a number behind `####` that is wrong, else 0.0."""
    if gsm8k(response, answer) == 1.0:
        return 1.0
    return 0.1 if re.search(r"####\s*-?\$?[0-9]", response) else 0.0
