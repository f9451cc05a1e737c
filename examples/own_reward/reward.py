"""A reward of one's own for the quickstart's sums: a part of an answer is worth something too."""

from __future__ import annotations


def digits(response: str, answer: str) -> float:
    """The share of the answer's digits that stand in their places, less one digit for each one too many; at least 0.

    `digits("58", "58")` is 1, `digits("57", "58")` 0.5, `digits("581", "58")` 0.5.
    """
    given = response.strip()
    right = sum(mine == wanted for mine, wanted in zip(given, answer, strict=False))
    return max(right - max(len(given) - len(answer), 0), 0) / len(answer)
