"""A reward that varies before any sum is right."""


def near_miss(response: str, answer: str) -> float:
    """Fraction of the answer's digits that stand in the right place."""
    return sum(ours == theirs for ours, theirs in zip(response, answer, strict=False)) / len(answer)
