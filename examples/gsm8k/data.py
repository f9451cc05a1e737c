"""Writes GSM8K as this recipe reads it: `train.jsonl`, `valid.jsonl` and `test.jsonl`.

    python examples/gsm8k/data.py path/to/gsm8k data/gsm8k

The source holds `train.jsonl` and `test.jsonl` with `question` and `answer`, as published. A row has `question`, `solution` (without the
calculator's `<<48/2=24>>`, which a model this small has to write twice) and `answer`, the number alone. The last 256 rows of the training
set are held out for the curves of a run, so that no choice is made on the test set.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

NUM_VALID = 256


def convert(row: dict[str, str]) -> dict[str, str]:
    """`{"question": ..., "answer": "48/2 = <<48/2=24>>24 clips.\\n#### 24"}` with its solution and the number apart."""
    solution = re.sub(r"<<[^>]*>>", "", row["answer"])
    answer = solution.rpartition("####")[2].strip().replace(",", "")
    return {"question": row["question"], "solution": solution, "answer": answer}


def main(source: Path, output: Path) -> None:
    """Reads both files, writes three."""
    output.mkdir(parents=True, exist_ok=True)
    train, test = (
        [convert(json.loads(line)) for line in (source / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("train", "test")
    )
    for name, rows in (("train", train[:-NUM_VALID]), ("valid", train[-NUM_VALID:]), ("test", test)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (output / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{output / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
