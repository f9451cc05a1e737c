"""Mathematical equality by math-verify, which reads LaTeX and plain expressions and compares them with SymPy.

Loaded by its path, in a process of its own like any reward, so that the time limit of a row ends an expression which SymPy never finishes.
"""

from __future__ import annotations

import logging

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError(f"math_equal needs math-verify ({error}); pip install 'hybridflow[math]'") from error

# It warns once a call that its own time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_equal(response: str, answer: object) -> float:
    """1.0 if the last expression of the response equals the answer, as sets, equations and numbers do, else 0.0.

    The response's expression is in `\\boxed{}` or `$...$`, or the last number or expression of the text. An answer without an expression
    raises ValueError, so the row is an error. Numbers count as equal when they agree to 6 digits behind the point. A response that
    SymPy cannot read, as one with digits that are not ASCII, is worth 0.0.
    Source: math-verify, with the answer as its gold. Differs: any other fault of its own is an error row and not a 0.
    """
    wanted = _parse(f"${answer}$") or _parse(str(answer))
    if not wanted:
        raise ValueError(f"the answer {str(answer)[-40:]!r} holds no expression")
    try:
        found = _parse(response)
    except ValueError:
        return 0.0
    return float(verify(wanted, found, timeout_seconds=None, raise_on_error=True))


def _parse(text: str) -> list[object]:
    # Its own time limits are alarms, which a C call does not feel; the process of a reward has a hard one.
    found: list[object] = parse(text, parsing_timeout=None, raise_on_error=True)
    return found
