"""The rewards that come with hybridflow."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rewards import exact_match, gsm8k

DATA = Path(os.environ.get("HYBRIDFLOW_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [("46", "46", 1.0), (" 46\n", "46", 1.0), ("46", 46, 1.0), ("460", "46", 0.0), ("", "46", 0.0), ("4 6", "46", 0.0)],
)
def test_exact_match(response: str, answer: object, reward: float) -> None:
    assert exact_match(response, answer) == reward


@pytest.mark.parametrize(
    "response",
    [
        "#### 1234",
        "first 5, then #### 1,234 and 7 more",
        "#### $1,234.00",
        "It is 1234.",
        "7 + 1,227 = 1,234",
        "$1234!",
        "#### 9 no, wait: #### 1234.0",
        "(1234)",
        "x=1234",
        "1234%",
    ],
)
def test_gsm8k_takes_the_number_after_the_mark_or_else_the_last(response: str) -> None:
    assert gsm8k(response, "some way\n#### 1,234") == 1.0


@pytest.mark.parametrize(
    "response", ["", "no number", "####", "#### 5, not 1234", "1234 ####", "-1234", "12345", "1234.5", "12 34"]
)
def test_gsm8k_gives_nothing_for_another_number_or_none(response: str) -> None:
    assert gsm8k(response, "#### 1234") == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [("-4", "#### -4"), ("5-9=-4", "#### -4"), ("\N{MINUS SIGN}4", "#### -4"), ("-$4", "-4"), (".5", "0.50")],
)
def test_gsm8k_reads_signs_and_fractions(response: str, answer: str) -> None:
    assert gsm8k(response, answer) == 1.0


def test_a_minus_between_numbers_is_no_sign() -> None:
    assert gsm8k("9-4", "#### 4") == 1.0 and gsm8k("9 -4", "#### -4") == 1.0


def test_an_answer_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="holds no number"):
        gsm8k("4", "four")


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_gsm8k_reads_every_way_to_write_a_number(value) -> None:
    for text in (f"{value}", f"{value:,}", f"about {value:,} in all.", f"1 + 2\n#### {value:,}"):
        assert gsm8k(text, f"#### {value}") == 1.0


@pytest.mark.skipif(not (DATA / "gsm8k").is_dir(), reason="the GSM8K data is not there")
def test_gsm8k_reads_every_answer_of_the_data() -> None:
    answers = [
        json.loads(line)["answer"] for name in ("train", "test") for line in (DATA / "gsm8k" / f"{name}.jsonl").open()
    ]
    assert len(answers) == 8792
    for answer in answers:
        number = answer.rpartition("####")[2].strip()
        assert gsm8k(answer, answer) == gsm8k(f"So it is {number}.", answer) == gsm8k(number, answer) == 1.0
        assert gsm8k(f"{number}1", answer) == 0.0
