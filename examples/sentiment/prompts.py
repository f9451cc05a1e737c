"""Beginnings of stories, as the prompts of sentiment.yaml: `python examples/sentiment/prompts.py prompts.jsonl`."""

from __future__ import annotations

import itertools
import json
import sys

WHEN = ("Once upon a time", "One day", "One morning", "Yesterday", "Long ago")
WHO = ("a little girl named Lily", "a boy named Tim", "a cat", "a big dog", "a bird", "a man", "an old bear", "a mouse")
VERBS = ("was", "saw", "went", "had", "wanted")


def main(path: str) -> None:
    """Writes all combinations."""
    with open(path, "w") as file:
        for when, who, verb in itertools.product(WHEN, WHO, VERBS):
            file.write(json.dumps({"prompt": f"{when}, {who} {verb}"}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
