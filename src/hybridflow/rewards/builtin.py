"""Rewards that come with hybridflow. Only the standard library: each is loaded in a fresh process."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"(?<![0-9.])-?\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
_MARK = "####"


def exact_match(response: str, answer: object) -> float:
    """1.0 if the response is the answer, blanks around either left aside, else 0.0."""
    return float(response.strip() == str(answer).strip())


def format_match(response: str, pattern: str) -> float:
    """1.0 if the whole response has the form of the regular expression, blanks around it left aside, else 0.0. `.` is a line's end too.

    `arguments: {pattern: "<think>.+</think>.+"}` asks for a thought before the answer. A pattern that backtracks without end meets the time
    limit.
    """
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def gsm8k(response: str, answer: object) -> float:
    """1.0 if the response's number equals the answer's, else 0.0.

    The number is the first one after the last `####`, or where there is none, the last one of the text. `$1,234.50` is read as 1234.5 and
    `18.0` equals `18`. A response without a number is worth 0.0; an answer without one raises ValueError, so the row is an error.
    Source: GSM8K, arXiv:2110.14168. Differs: a response without `####` is judged by its last number instead of being wrong.
    """
    wanted = _final_number(str(answer))
    if wanted is None:
        raise ValueError(f"the answer {str(answer)[-40:]!r} holds no number")
    return float(_final_number(response) == wanted)


def _final_number(text: str) -> Decimal | None:
    _, mark, tail = text.replace("\N{MINUS SIGN}", "-").rpartition(_MARK)
    found = _NUMBER.findall(tail)
    if not found:
        return None
    return Decimal((found[0] if mark else found[-1]).replace(",", "").replace("$", ""))
