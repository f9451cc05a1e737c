"""Rewards stories for being gloomy: minus vaderSentiment's compound score, between -1 and 1."""

from __future__ import annotations

from functools import cache

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer


@cache
def _analyzer() -> SentimentIntensityAnalyzer:
    return SentimentIntensityAnalyzer()


def gloom(response: str) -> float:
    """Minus the compound sentiment of the response."""
    return -float(_analyzer().polarity_scores(response)["compound"])
