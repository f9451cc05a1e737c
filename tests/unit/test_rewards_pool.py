"""Rewards by any Python function: what it may do to itself, and that it does nothing to anybody else."""

import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.rewards import RewardPool, RewardSettings, check_reward, source_hash
from hybridflow.rewards.child import load_function
from hybridflow.rewards.process import RewardProcess, wait
from hybridflow.types import RowState

MISBEHAVE = f"{Path(__file__).parent}/rewards_cases.py:misbehave"
misbehave = load_function({"file": MISBEHAVE.rpartition(":")[0], "name": "misbehave"})


def rows(*responses: str, **columns: list) -> Batch:
    return Batch.from_columns(response=list(responses), **columns)


def score(function, batch: Batch, **limits) -> list[tuple[float | None, str | None]]:
    named = {"function": function} if isinstance(function, str) else {}
    settings = RewardSettings(**({"workers": 1, "timeout_s": 0.4} | limits | named))
    with RewardPool(settings, None if named else function) as pool:
        result = pool.score(batch)
    return list(zip(result.pylist("reward"), result.pylist("reward_error"), strict=True))


def wait_until(condition, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("hang", "no result within 0.4 s"),
        ("hang in C", "no result within 0.4 s"),
        ("raise", r"ValueError: no number here \(rewards_cases.py:\d+\)"),
        ("exit", "SystemExit: 3"),
        ("hard exit", "exit code 7"),
        ("segfault", "SIGSEGV"),
        ("read", "EOFError"),
        ("babble", "into the pipe of the rewards"),
        ("close", "."),
        ("recurse", "RecursionError"),
        ("interrupt", "SIGINT"),
        ("nan", "nan, which is not a finite number"),
        ("inf", "-inf, which is not a finite number"),
        ("none", "NoneType, which is not a number"),
        ("text", "str, which is not a number"),
        ("list", "list, which is not a number"),
        ("complex", "complex, which is not a number"),
        ("huge", "int, which is not a number"),
    ],
)
def test_a_bad_row_is_an_error_row_and_its_neighbours_are_scored(response: str, error: str) -> None:
    before, bad, *after = score(MISBEHAVE, rows("a", response, "b", "c"))
    assert before == (1.0, None) and after == [(1.0, None)] * 2
    assert bad[0] is None and bad[1] is not None and re.search(error, bad[1]), bad
    assert "\n" not in bad[1] and len(bad[1]) < 400


@pytest.mark.parametrize("response", ["print", "fork", "thread"])
def test_what_a_reward_leaves_behind_changes_no_reward(response: str) -> None:
    assert score(MISBEHAVE, rows("a", response, "b", response, "c")) == [(1.0, None)] * 5


def test_a_mix_of_faults_over_several_processes_keeps_every_row_in_its_place() -> None:
    responses = [("segfault", "ok", "raise", "ok", "hard exit", "nan", "ok")[i % 7] for i in range(28)]
    with RewardPool(RewardSettings(workers=3, function=MISBEHAVE)) as pool:
        result = pool.score(rows(*responses))
        assert [reward is not None for reward in result.pylist("reward")] == [
            response == "ok" for response in responses
        ]
        assert [error is None for error in result.pylist("reward_error")] == [
            response == "ok" for response in responses
        ]
        assert pool.score(rows("ok")).pylist("reward") == [1.0]


def test_memory_beyond_the_limit_is_an_error_row() -> None:
    def hungry(response: str) -> float:
        return float(len(bytearray(int(response))) > 0)

    outcomes = score(hungry, rows("10", str(4 << 30), "10"), max_memory_bytes=1 << 30)
    assert [reward for reward, _ in outcomes] == [1.0, None, 1.0]
    assert "MemoryError" in str(outcomes[1][1])


def test_memory_that_does_not_suffice_to_load_the_function_is_named(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("TABLE = bytearray(1 << 30)\ndef score(response): return 1.0\n")
    settings = RewardSettings(function=f"{tmp_path / 'large.py'}:score", max_memory_bytes=1 << 29)
    expected = r"^reward.function: it cannot be loaded within reward.max_memory_bytes=536870912; raise that, or load less in it$"
    with pytest.raises(ConfigError, match=expected), RewardPool(settings) as pool:
        pool.score(rows("a"))


def test_numbers_of_any_kind_are_rewards() -> None:
    def number(response: str) -> object:
        from fractions import Fraction

        return {
            "bool": True,
            "int": 2,
            "numpy": np.float32(0.5),
            "numpy bool": np.bool_(True),
            "fraction": Fraction(1, 4),
        }[response]

    assert [reward for reward, _ in score(number, rows("bool", "int", "numpy", "numpy bool", "fraction"))] == [
        1.0,
        2.0,
        0.5,
        1.0,
        0.25,
    ]


def test_rewards_are_exact_to_the_last_bit() -> None:
    values = [0.1, 1e-308, 5e-324, 1.7976931348623157e308, -1 / 3]
    assert [reward for reward, _ in score(lambda value: value * 1, rows(*"abcde", value=values))] == values


def test_each_row_is_run_once_unless_its_process_was_killed_before_it(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def record(response: str) -> float:
        with log.open("a") as file:
            file.write(response + "\n")
        if response == "r7":
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    with RewardPool(RewardSettings(workers=2), record) as pool:
        pool.score(rows(*(f"r{i}" for i in range(200))))
    assert sorted(log.read_text().split()) == sorted(f"r{i}" for i in range(200))


# Columns.


def test_a_function_gets_the_columns_it_names_and_its_own_defaults() -> None:
    def reward(answer, *, response, bonus=0.5, sample_id=None) -> float:
        return int(answer == response) + bonus + sample_id

    batch = rows("4", "5", answer=["4", "4"], sample_id=[0, 10], tokens=[[1], [2]])
    assert score(reward, batch) == [(1.5, None), (10.5, None)]


def test_kwargs_get_every_scalar_column_and_named_lists() -> None:
    def reward(tests: list, **others: object) -> float:
        assert sorted(others) == ["level", "ok", "response", "weight"], others
        assert others["weight"] is None or isinstance(others["weight"], float)
        return float(len(tests))

    batch = rows(
        "a", "b", tests=[["x", "y"], []], level=[1, 2], weight=[0.5, None], ok=[True, False], tokens=[[1], [2]]
    )
    assert score(reward, batch) == [(2.0, None), (0.0, None)]


def test_a_column_that_cannot_travel_is_a_config_error() -> None:
    import datetime

    batch = rows("a", when=[datetime.datetime(2026, 1, 1)])
    with pytest.raises(ConfigError, match="'when' is a column of timestamp.*convert the column to text"):
        score(lambda response, when: 1.0, batch)
    assert score(lambda response, **rest: float("when" in rest), batch) == [(0.0, None)]


def test_text_survives_the_way() -> None:
    text = 'line\nbreak \u2028 \x00 \U0001f600 "quoted" ' + "x" * 200_000
    assert score(lambda response, answer: float(response == answer), rows(text, "a", answer=[text, "b"])) == [
        (1.0, None),
        (0.0, None),
    ]


def test_a_parameter_that_is_no_column_is_a_config_error_before_anything_is_scored() -> None:
    def reward(response, anwser) -> float:
        return 0.0

    message = "parameter 'anwser' is no column; the columns are answer, .*response.*: rename"
    with pytest.raises(ConfigError, match=message):
        check_reward(RewardSettings(), reward, columns=("answer",))
    with pytest.raises(ConfigError, match="the columns are response"):
        score(reward, rows("a"))
    check_reward(RewardSettings(), reward)


@pytest.mark.parametrize("inline", [False, True])
def test_functions_that_cannot_be_called_with_columns_are_config_errors(inline: bool) -> None:
    def positional(response, /) -> float:
        return 0.0

    for function, message in ((max, "cannot be read"), (positional, "'response' is positional-only")):
        with pytest.raises(ConfigError, match=message):
            check_reward(RewardSettings(inline=inline), function)


def test_rows_that_are_not_ok_are_neither_scored_nor_counted() -> None:
    batch = rows("raise", "ok", "raise", state=[RowState.FAILED, RowState.OK, RowState.EMPTY])
    with RewardPool(RewardSettings(workers=1, function=MISBEHAVE)) as pool:
        result = pool.score(batch)
        assert result.pylist("reward") == [None, 1.0, None]
        assert result.pylist("reward_error") == ["not scored: the row is FAILED", None, "not scored: the row is EMPTY"]


def test_no_rows_give_no_rewards() -> None:
    batch = Batch.from_columns(response=["a"]).slice(0, 0)
    with RewardPool(RewardSettings(function=MISBEHAVE)) as pool:
        result = pool.score(batch)
    assert result.num_rows == 0 and result.column_names == ("reward", "reward_error")


def test_errors_are_told_once_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    score(MISBEHAVE, rows("a", "none", "raise"))
    (record,) = [record for record in caplog.records if record.name.startswith("hybridflow.rewards")]
    assert record.getMessage().startswith("2 of 3 rewards are errors; the first, row 1: returned NoneType")


# Where functions come from.


def write_module(directory: Path) -> Path:
    (directory / "helper_of_reward.py").write_text("WORTH = 0.25\n")
    path = directory / "my_reward.py"
    path.write_text(
        textwrap.dedent("""
        from helper_of_reward import WORTH

        def worth(response):
            return WORTH * len(response)

        class Judge:
            @staticmethod
            def judge(response):
                return 3
        """)
    )
    return path


@pytest.mark.parametrize("inline", [False, True])
def test_functions_by_file_by_module_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: bool) -> None:
    write_module(tmp_path)
    monkeypatch.chdir(tmp_path)
    batch = rows("ab", answer=["ab"])
    for name, reward in (
        ("my_reward.py:worth", 0.5),
        (f"{tmp_path}/my_reward.py:Judge.judge", 3.0),
        ("exact_match", 1.0),
    ):
        with RewardPool(RewardSettings(function=name, inline=inline, workers=1)) as pool:
            assert pool.score(batch).pylist("reward") == [reward]
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardPool(RewardSettings(function="my_reward:worth", inline=inline, workers=1)) as pool:
        assert pool.score(batch).pylist("reward") == [0.5]


def test_live_functions_travel_with_what_they_close_over() -> None:
    scale = 3

    class Judge:
        def __call__(self, response: str) -> int:
            return scale * len(response)

    for function in (
        Judge(),
        lambda response: scale * len(response),
        functools.partial(lambda k, response: k * len(response), scale),
    ):
        assert score(function, rows("ab")) == [(6.0, None)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "nothing is rewarded"),
        ("gsm9k", "'gsm9k' names no function"),
        ("missing.py:fn", "there is no file 'missing.py'"),
        ("no.such.module:fn", "cannot be loaded: ModuleNotFoundError"),
        ("os:no_such_function", "'os' has no 'no_such_function'; functions there: "),
        ("os:sep", "it is str, not a function"),
    ],
)
def test_a_wrong_name_is_one_sentence(name: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_reward(RewardSettings(function=name))
    assert str(caught.value).startswith("reward.function: ") and "\n" not in str(caught.value)


def test_a_name_and_a_function_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of the two"):
        RewardPool(RewardSettings(function="gsm8k"), misbehave)


def test_a_module_that_ends_or_hangs_while_it_is_imported_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(4)\n")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(100)\n")
    with pytest.raises(ConfigError, match="3 processes in a row.*exit code 4"):
        check_reward(RewardSettings(function=f"{tmp_path}/ends.py:fn", workers=1))
    with pytest.raises(ConfigError, match="did not start within 0.3 s"):
        check_reward(RewardSettings(function=f"{tmp_path}/hangs.py:fn", workers=1, startup_timeout_s=0.3))


def test_the_source_hash_follows_the_source(tmp_path: Path) -> None:
    path = write_module(tmp_path)
    before = source_hash(f"{path}:worth")
    path.write_text(path.read_text() + "\n# more\n")
    assert re.fullmatch("[0-9a-f]{64}", before) and source_hash(f"{path}:worth") != before
    assert source_hash(misbehave) == source_hash(misbehave) != source_hash(write_module)
    assert source_hash("gsm8k") == source_hash("hybridflow.rewards.builtin:gsm8k")
    assert len(source_hash(functools.partial(misbehave, "a"))) == 64


def test_inline_runs_here_and_still_gives_error_rows() -> None:
    seen: list[str] = []

    def reward(response: str) -> object:
        seen.append(response)
        return misbehave(response)

    outcomes = score(reward, rows("a", "raise", "nan", "exit"), inline=True)
    assert seen == ["a", "raise", "nan", "exit"]
    assert [reward is None for reward, _ in outcomes] == [False, True, True, True]


# Processes.


def test_many_rows_cost_little() -> None:
    batch = rows(*(f"= {i}" for i in range(512)), answer=[str(i) for i in range(512)])
    with RewardPool(RewardSettings(function="gsm8k", workers=2)) as pool:
        pool.score(batch)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            assert sum(pool.score(batch).pylist("reward")) == 512
            times.append(time.perf_counter() - start)
    assert min(times) < 0.05


def test_the_process_of_a_reward_imports_no_torch() -> None:
    def reward(response: str) -> bool:
        return bool({"torch", "hybridflow", "numpy"} & set(sys.modules))

    assert score(reward, rows("a")) == [(0.0, None)]


def test_slow_rows_are_shared_out(tmp_path: Path) -> None:
    """No row is done before four processes have one."""

    def meet(response: str) -> float:
        (tmp_path / str(os.getpid())).touch()
        while len(os.listdir(tmp_path)) < 4:
            time.sleep(0.01)
        return float(os.getpid())

    with RewardPool(RewardSettings(workers=4, timeout_s=60.0), meet) as pool:
        pids = pool.score(rows(*"abcdefgh")).pylist("reward")
    assert len(set(pids)) == 4


def list_children() -> set[str]:
    """Children of this process, dead ones that nobody has waited for among them."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    def start_something(response: str) -> float:
        child = subprocess.Popen(["sleep", "100"])
        (tmp_path / response).write_text(f"{os.getpid()} {child.pid}")
        if response == "hang":
            time.sleep(100)
        return 1.0

    fds, children = len(os.listdir("/proc/self/fd")), list_children()
    with RewardPool(RewardSettings(workers=2, timeout_s=0.3), start_something) as pool:
        pool.score(rows("a", "hang", "b"))
    pids = [int(pid) for name in ("a", "hang", "b") for pid in (tmp_path / name).read_text().split()]
    assert wait_until(lambda: all(is_gone(pid) for pid in pids))
    assert len(os.listdir("/proc/self/fd")) == fds
    assert list_children() <= children  # no new one, not even a dead one


def test_a_pool_that_is_dropped_or_closed_twice_leaves_nothing(tmp_path: Path) -> None:
    pool = RewardPool(RewardSettings(), lambda response: float(os.getpid()))
    pids = [int(pid) for pid in pool.score(rows("a", "b")).pylist("reward")]
    pool.close()
    pool.close()
    assert all(is_gone(pid) for pid in pids)
    pids = [int(pid) for pid in pool.score(rows("a", "b")).pylist("reward")]
    del pool
    assert all(is_gone(pid) for pid in pids)


def test_processes_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import os, pathlib, subprocess, time
        from hybridflow.batch import Batch
        from hybridflow.rewards import RewardPool, RewardSettings

        def hang(response):
            child = subprocess.Popen(["sleep", "100"])
            pathlib.Path({str(tmp_path)!r}, response).write_text(f"{{os.getpid()}} {{child.pid}} .")
            time.sleep(100)

        pool = RewardPool(RewardSettings(workers=3, timeout_s=100.0), hang)
        pool.score(Batch.from_columns(response=["a", "b"]))
        """)
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        read = {name: tmp_path / name for name in "ab"}
        assert wait_until(lambda: all(p.exists() and p.read_text().endswith(".") for p in read.values()), 20.0)
    finally:
        parent.kill()
        parent.wait()
    pids = [int(pid) for path in read.values() for pid in path.read_text().split()[:2]]
    assert wait_until(lambda: all(is_gone(pid) for pid in pids), 3.0)


def test_an_interrupted_batch_gives_no_answer_to_the_next() -> None:
    def echo(response: str) -> float:
        time.sleep(0.05)
        return float(response)

    class Interrupt(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    with RewardPool(RewardSettings(workers=2), echo) as pool:
        pool.score(rows("0", "0"))
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.12)
            with pytest.raises(Interrupt):
                pool.score(rows(*(str(i) for i in range(50))))
        finally:
            signal.signal(signal.SIGALRM, before)
        assert pool.score(rows("7", "8", "9")).pylist("reward") == [7.0, 8.0, 9.0]


def test_the_kernel_ends_a_process_whose_interpreter_lock_is_held() -> None:
    import base64

    import cloudpickle

    function = lambda response: re.match(r"(a+)+$", "a" * 64 + "b")  # noqa: E731 it travels without this module
    transport = {"pickle": base64.b64encode(cloudpickle.dumps(function)).decode()}
    hello = {
        "sys_path": sys.path,
        "functions": {"": {"transport": transport, "per": "sample", "arguments": {}, "timeout_s": 60.0}},
        "max_memory_bytes": None,
        "cpu_limit_s": 0.2,
    }
    process = RewardProcess(hello, startup_timeout_s=60.0)
    try:
        assert wait_until(lambda: (process.pump(), process.is_idle)[1])
        process.give("", [(0, {"response": "a"})], 60.0)
        assert wait_until(lambda: (wait([process]), process.pump(), process.fault())[2])
        assert process.fault() == "the process died (SIGVTALRM)"
    finally:
        process.kill()


def test_a_stopped_process_that_reads_nothing_does_not_stop_us() -> None:
    def stop(response: str) -> float:
        if response == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return 1.0

    batch = rows("a", "stop", *["x" * 100_000] * 20)
    outcomes = score(stop, batch)
    assert [reward for reward, _ in outcomes] == [1.0, None] + [1.0] * 20
