"""Ranks in one process: alone nothing changes, and what is seen without a second process. The rest is in tests/multiproc."""

from __future__ import annotations

import os
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.train_engine import DriftError, Layout, Mesh, Ranks, join_ranks
from hybridflow.train_engine.gradients import plan_buckets, sum_gradients
from hybridflow.train_engine.mesh import Axis
from hybridflow.train_engine.optimizer import AdamW, OptimizerSettings
from hybridflow.train_engine.ranks import check_same
from hybridflow.types import PeerLostError

CPU = torch.device("cpu")


def join(**changes: Any) -> Ranks:
    return join_ranks(**{"rank": 0, "size": 2, "rendezvous": None, "device": CPU, "timeout_s": 1.0, **changes})


def test_alone_every_collective_is_the_identity_and_there_is_no_process_group() -> None:
    ranks = join(size=1)
    tensor = torch.tensor([1.0, -0.0])
    ranks.sum_(tensor)
    assert (tensor.tolist(), ranks.total(2.5), ranks.gather([1.0, 2.0])) == ([1.0, -0.0], 2.5, [[1.0, 2.0]])
    assert (ranks.rank, ranks.size, dist.is_initialized()) == (0, 1, False)
    ranks.leave()


def test_a_gang_without_a_rendezvous_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 0 of 2 has no rendezvous"):
        join()


@pytest.mark.parametrize(
    ("rendezvous", "chosen", "expected"),
    [
        ("file:///tmp/meet", None, "lo"),
        ("tcp://127.0.0.1:29500", None, "lo"),
        ("tcp://localhost:29500", None, "lo"),
        ("tcp://10.0.0.7:29500", None, None),
        ("file:///tmp/meet", "eth7", "eth7"),
    ],
)
def test_gloo_listens_on_the_loopback_alone_where_all_ranks_are_here(
    rendezvous: str, chosen: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get("GLOO_SOCKET_IFNAME")))
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if chosen:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    join(rendezvous=rendezvous)
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "net0")])
    join(rendezvous=rendezvous)
    assert seen == [expected, chosen]
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen


def test_an_error_of_gloo_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("[/a/b/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:45. This is typical. Bye")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(
        PeerLostError,
        match=r"^rank 1 of 2 did not meet all others at file:///m within 1 s \(Connection closed by peer \[127.0.0.1\]:45\); see",
    ):
        join(rank=1, rendezvous="file:///m")
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_numbers_that_differ_name_the_first_odd_rank() -> None:
    nan = float("nan")
    check_same("it", [0.5, 0.5])
    check_same("it", [nan, nan])
    for values, odd in (([1.0, 1.0, 1.0 + 2**-52], 2), ([1.0, nan], 1), ([nan, 1.0], 1)):
        with pytest.raises(
            DriftError, match=f"ranks 0 and {odd} are no replicas of each other: it is .* on rank 0 and"
        ):
            check_same("it", values)


def test_a_checksum_sees_one_bit_and_no_order() -> None:
    ranks = Echo()
    mesh = Mesh(Layout(data=2), dict.fromkeys(get_args(Axis), ranks))

    def checksum(weight: torch.Tensor) -> float:
        optimizer = AdamW({"w": torch.nn.Parameter(weight)}, OptimizerSettings(), mesh)
        return float(optimizer.compute_checksums()[()].double())

    weight = torch.randn(301, 7, generator=torch.Generator().manual_seed(0))
    moved = weight.clone()
    moved[300, 6] = torch.nextafter(moved[300, 6], torch.tensor(9.0))
    for dtype in (torch.float32, torch.float64):
        assert checksum(weight.to(dtype)) == checksum(weight.to(dtype).flip(0))
        assert checksum(weight.to(dtype)) != checksum(moved.to(dtype))
    assert AdamW({"w": torch.nn.Parameter(weight)}, OptimizerSettings()).compute_checksums() == {}


class Echo(Ranks):
    """Two ranks with the same gradients, in one process; counts what is sent."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.sent: list[int] = []

    def sum_(self, tensor: torch.Tensor) -> None:
        self.sent.append(tensor.numel())
        tensor.mul_(2)


def test_gradients_are_summed_in_buckets() -> None:
    gradients = [torch.full(shape, value) for shape, value in (((2, 3), 1.0), ((4, 4), 3.0), ((1,), 4.0))]
    gradients[1] = gradients[1].t().contiguous().t()
    ranks = Echo()
    sum_gradients(gradients, ranks, bucket_bytes=4 * 7)
    assert ranks.sent == [6, 16, 1]
    assert [gradient.unique().tolist() for gradient in gradients] == [[2.0], [6.0], [8.0]]


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.sampled_from([torch.float32, torch.float64]), st.integers(1, 50)), max_size=20),
    st.integers(1, 60),
)
def test_buckets_hold_all_in_order_within_bounds(sizes: list[tuple[torch.dtype, int]], max_bytes: int) -> None:
    runs = [sizes[bucket] for bucket in plan_buckets(sizes, max_bytes)]
    assert [size for run in runs for size in run] == sizes
    for run in runs:
        assert len({dtype for dtype, _ in run}) == 1
        assert sum(size for _, size in run) <= max_bytes or len(run) == 1
    for run, following in zip(runs, runs[1:], strict=False):
        assert run[0][0] != following[0][0] or sum(size for _, size in run) + following[0][1] > max_bytes
