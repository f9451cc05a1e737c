"""The rewards that come with hybridflow."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.rewards import RewardPool, RewardSettings, check_reward, exact_match, format_match, gsm8k

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


@pytest.mark.parametrize(
    ("response", "pattern", "reward"),
    [
        (" <think>a\nb</think> 4\n", "<think>.+</think>.+", 1.0),
        ("<think></think>4", "<think>.+</think>.+", 0.0),
        ("x <think>a</think>4", "<think>.+</think>.+", 0.0),
        ("4 and more", "[0-9]", 0.0),
    ],
)
def test_format_match_asks_for_the_whole_response(response: str, pattern: str, reward: float) -> None:
    assert format_match(response, pattern) == reward


MATH = [
    (r"the answer is $\boxed{42}$", "42", 1.0),
    ("0.5", r"\frac{1}{2}", 1.0),
    (r"so it is $\frac{2}{4}$.", "1/2", 1.0),
    ("$(x+1)^2$", "x^2+2x+1", 1.0),
    ("first 7, then 3", "3", 1.0),
    ("I had 7 but then 8", "7", 0.0),
    (r"$\boxed{\{1,2\}}$", r"\{2,1\}", 1.0),
    ("no idea", "3", 0.0),
    ("", "3", 0.0),
    ("-4", "4", 0.0),
    (r"$\frac{1}{", "3", 0.0),
    ("the answer is ６", "6", 0.0),
]


def test_math_equal_compares_expressions_and_no_expression_of_a_response_stops_it() -> None:
    """A tower of powers and a thousand brackets are what math-verify's own time limits do not end."""
    pytest.importorskip("math_verify")
    endless = [("$9^{9^{9^{9}}}$", "3"), ("$" + "(" * 60 + "1" + ")" * 60 + "$", "1"), ("3", "")]
    rows = [(response, answer) for response, answer, _ in MATH] + endless
    batch = Batch.from_columns(response=[response for response, _ in rows], answer=[answer for _, answer in rows])
    with RewardPool(RewardSettings(function="math_equal", timeout_s=2.5)) as pool:
        result = pool.score(batch)
    assert result.pylist("reward") == [reward for *_, reward in MATH] + [None] * 3
    *hangs, empty = result.pylist("reward_error")[len(MATH) :]
    assert hangs == ["no result within 2.5 s; the process was killed"] * 2
    assert empty.startswith("ValueError: the answer '' holds no expression")


def test_math_equal_says_what_to_install_before_anything_is_scored(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"math_equal needs math-verify .*pip install 'hybridflow\[math\]'"):
        check_reward(RewardSettings(function="math_equal", workers=1))
