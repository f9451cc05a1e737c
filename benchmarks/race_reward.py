"""The reward of races on GSM8K, apart from them: its process imports nothing else."""

from __future__ import annotations


def digits(response: str) -> float:
    """Share of a response's characters that are digits."""
    return sum(map(str.isdigit, response)) / max(len(response), 1)
