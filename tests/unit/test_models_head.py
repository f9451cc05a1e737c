"""The head against a written-out float64 reference: values, gradients, memory, and the shift by one."""

import dataclasses
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.models import (
    Head,
    compute_log_softmax,
    compute_logits,
    compute_logprobs,
    head_chunks,
    predicted_positions,
)
from hybridflow.models.head import VocabularyShard
from hybridflow.models.head_chunks import choose_chunk_tokens, compute_head_bytes
from hybridflow.models.head_shaping import Shaped
from hybridflow.types import UNSHAPED, Shaping

CASES = {
    "plain": dict(),
    "softcap": dict(softcap=3.0),
    "scale": dict(logit_scale=0.25),
    "both": dict(softcap=2.0, logit_scale=1.5),
}


def draw(num_rows=11, width=6, vocab_size=13, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab_size, (num_rows,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def reference(hidden, weight, targets, temperature, softcap=None, logit_scale=1.0):
    logits = hidden.double() @ weight.double().t() * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    normaliser = torch.log(torch.exp(logits).sum(1, keepdim=True))
    logp = logits - normaliser
    return logp[torch.arange(len(targets)), targets], -(torch.exp(logp) * logp).sum(1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [4, 11, 100])
def test_values_and_gradients_against_float64(case, temperature, chunk_tokens):
    hidden, weight, targets = draw()
    head = Head(weight, **CASES[case])

    def ours(hidden, weight):
        head = Head(weight, **CASES[case])
        return compute_logprobs(
            hidden, targets, head, temperature=temperature, chunk_tokens=chunk_tokens, with_entropy=True
        )

    logprobs, entropy = ours(hidden, weight)
    expected = reference(hidden, weight, targets, temperature, **CASES[case])
    torch.testing.assert_close((logprobs, entropy), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        compute_log_softmax(compute_logits(hidden, head, temperature)).gather(1, targets[:, None])[:, 0], logprobs
    )
    assert torch.autograd.gradcheck(ours, (hidden, weight))


@pytest.mark.parametrize("passes", ["softmax", "fused"])
@pytest.mark.parametrize("used", [0, 1], ids=["log-probabilities alone", "entropy alone"])
def test_one_of_two_outputs_may_be_without_a_gradient(used, passes):
    hidden, weight, targets = draw()
    upstream = torch.linspace(-1, 1, 11, dtype=torch.float64)
    outputs = compute_logprobs(
        hidden, targets, Head(weight, softcap=2.0), temperature=0.6, with_entropy=True, passes=passes
    )
    expected = reference(hidden, weight, targets, 0.6, softcap=2.0)
    found, wanted = (torch.autograd.grad((out[used] * upstream).sum(), (hidden, weight)) for out in (outputs, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shaping", [UNSHAPED, Shaping(1.3)], ids=str)
def test_the_size_of_a_block_changes_no_bit(shaping, exact, monkeypatch):
    hidden, weight, targets = draw(50, 16, 40, torch.float32 if exact else torch.bfloat16)
    starts, ends = torch.zeros_like(targets), 1 + torch.arange(50) % 7
    shaped = None if shaping == UNSHAPED else Shaped(shaping, targets, starts, ends)
    found = []
    for logits in (2**20, 7 * 40, 1):
        monkeypatch.setitem(head_chunks._BLOCK_LOGITS, "cpu", logits)
        outputs = compute_logprobs(
            hidden, targets, Head(weight, exact=exact), chunk_tokens=16, with_entropy=True, shaped=shaped
        )
        found.append((*outputs, *torch.autograd.grad((outputs[0] * outputs[1]).sum(), (hidden, weight))))
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


@pytest.mark.parametrize("exact", [False, True])
def test_float32_against_float64(exact):
    hidden, weight, targets = draw(50, 16, 40, torch.float32)
    upstream = torch.linspace(-1, 1, 50)
    logprobs, entropy = compute_logprobs(
        hidden, targets, Head(weight, softcap=2.0, exact=exact), temperature=0.8, chunk_tokens=32, with_entropy=True
    )
    (logprobs * upstream + 0.3 * entropy).sum().backward()
    hidden64, weight64 = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logprobs64, entropy64 = reference(hidden64, weight64, targets, 0.8, softcap=2.0)
    (logprobs64 * upstream + 0.3 * entropy64).sum().backward()
    for got, expected in (
        (logprobs, logprobs64),
        (entropy, entropy64),
        (hidden.grad, hidden64.grad),
        (weight.grad, weight64.grad),
    ):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_selected_rows_equal_a_gather():
    hidden, weight, _ = draw()
    rows = torch.tensor([7, 2, 9, 0])
    targets = torch.tensor([1, 5, 12, 0])
    grads = []
    for chosen, kept in ((hidden, rows), (hidden[rows], None)):
        logprobs, none = compute_logprobs(chosen, targets, Head(weight), rows=kept, chunk_tokens=3)
        assert none is None
        grads.append((logprobs.detach(), *torch.autograd.grad(logprobs.square().sum(), (hidden, weight))))
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right)


def test_no_targets():
    hidden, weight, _ = draw()
    none = torch.zeros(0, dtype=torch.long)
    logprobs, entropy = compute_logprobs(hidden, none, Head(weight), rows=none, with_entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.abs().sum() == 0 and weight.grad.abs().sum() == 0


def test_weight_gradient_is_summed_in_float32():
    """2,048 chunks that each add a half: a bf16 sum stops growing at 128, a float32 one does not."""
    num_rows = 2048
    hidden = torch.full((num_rows, 1), 1.0, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(num_rows, dtype=torch.long)
    compute_logprobs(hidden, targets, Head(weight), chunk_tokens=1)[0].sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad[:, 0].tolist() == [num_rows / 2, -num_rows / 2]


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    logprobs, entropy = compute_logprobs(hidden, torch.tensor([0, 0]), Head(weight), with_entropy=True)
    assert logprobs.tolist() == [0.0, -2e4] and entropy.tolist() == [0.0, 0.0]
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation's result has."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def test_the_logits_of_all_tokens_never_exist():
    num_rows, vocab_size, chunk = 640, 500, 64
    hidden = torch.randn(num_rows, 8, requires_grad=True)
    weight = torch.randn(vocab_size, 8, requires_grad=True)
    targets = torch.randint(0, vocab_size, (num_rows,))
    with LargestTensor() as largest:
        logprobs, entropy = compute_logprobs(hidden, targets, Head(weight), chunk_tokens=chunk, with_entropy=True)
        (logprobs + entropy).sum().backward()
    assert largest.numel == chunk * vocab_size


def test_predicted_positions_by_hand():
    hidden_index, token_index = predicted_positions(torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32))
    assert hidden_index.tolist() == [0, 1, 4]
    assert token_index.tolist() == [1, 2, 5]


def test_a_temperature_of_zero_is_refused():
    hidden, weight, targets = draw()
    with pytest.raises(ValueError, match="temperature is 0.0"):
        compute_logprobs(hidden, targets, Head(weight), temperature=0.0)
    with pytest.raises(ValueError, match="temperature is 0.0"):
        compute_logits(hidden, Head(weight), 0.0)


@pytest.mark.parametrize("keep_logits_bytes", [0, 500, 10**9])
@pytest.mark.parametrize("case", CASES)
def test_fused_passes_against_float64(case, keep_logits_bytes):
    hidden, weight, targets = draw()

    def ours(hidden, weight):
        return compute_logprobs(
            hidden, targets, Head(weight, **CASES[case]), temperature=0.6, chunk_tokens=4, with_entropy=True,
            passes="fused", keep_logits_bytes=keep_logits_bytes,
        )  # fmt: skip

    expected = reference(hidden, weight, targets, 0.6, **CASES[case])
    torch.testing.assert_close(ours(hidden, weight), expected, rtol=1e-12, atol=1e-12)
    # Runs backward more than once over one forward: kept logits are overwritten by the first.
    assert torch.autograd.gradcheck(ours, (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_change_no_bit(dtype):
    hidden, weight, targets = draw(50, 16, 40, dtype)
    found = []
    for keep_logits_bytes in (0, 2 * 16 * 40 * 4, 10**9):
        logprobs, entropy = compute_logprobs(
            hidden, targets, Head(weight, softcap=2.0), chunk_tokens=16, with_entropy=True,
            passes="fused", keep_logits_bytes=keep_logits_bytes,
        )  # fmt: skip
        found.append((logprobs, *torch.autograd.grad((logprobs * entropy).sum(), (hidden, weight))))
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


class Products(TorchDispatchMode):
    """Counts products that make logits of the given width."""

    def __init__(self, width):
        super().__init__()
        self.width, self.count = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten.mm.default and out.shape[1] == self.width
        return out


@pytest.mark.parametrize(("room", "products"), [(0, 8), (2, 6), (3.5, 5), (99, 4)])
def test_kept_logits_are_not_multiplied_again_and_stay_within_their_room(room, products):
    hidden, weight, targets = draw(64, 6, 13, torch.float32)
    with Products(13) as counted:
        logprobs, _ = compute_logprobs(
            hidden, targets, Head(weight), chunk_tokens=16, passes="fused", keep_logits_bytes=int(room * 16 * 13 * 4)
        )
        logprobs.sum().backward()
    assert counted.count == products


class Shards:
    """Ranks that are threads: each sees the others' tensors between two barriers."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=20)
        self.posted = [None] * size

    def axis(self, rank):
        def combine(tensor, reduce):
            self.posted[rank] = tensor.clone()
            self.barrier.wait()
            result = reduce(torch.stack(list(self.posted)))
            self.barrier.wait()
            tensor.copy_(result)

        return SimpleNamespace(
            sum_=lambda tensor: combine(tensor, lambda parts: parts.sum(0)),
            max_=lambda tensor: combine(tensor, lambda parts: parts.amax(0)),
        )

    def run(self, work):
        with ThreadPoolExecutor(len(self.posted)) as threads:
            return list(threads.map(work, range(len(self.posted))))


def compute_on_shards(size, hidden, weight, targets, upstream, case, **settings):
    """Log-probabilities, entropy, gradient at hidden states and at its rows of the weight, of each shard."""
    shards = Shards(size)
    parts = weight.detach().chunk(size)

    def work(rank):
        own_hidden, own = hidden.detach().clone().requires_grad_(), parts[rank].clone().requires_grad_()
        offset = sum(part.shape[0] for part in parts[:rank])
        head = Head(own, **case, vocabulary=VocabularyShard(offset, shards.axis(rank)))
        logprobs, entropy = compute_logprobs(own_hidden, targets, head, with_entropy=True, **settings)
        (logprobs * upstream + 0.3 * entropy).sum().backward()
        return logprobs.detach(), entropy.detach(), own_hidden.grad, own.grad

    return shards.run(work)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("case", CASES)
def test_shards_of_the_vocabulary_equal_the_whole(case, size):
    """13 entries are 7 + 6, 5 + 5 + 3 and 3 + 3 + 3 + 3 + 1; every entry is a target."""
    hidden, weight, _ = draw(num_rows=15)
    targets = torch.arange(15) % 13
    rows = torch.tensor([14, 0, 3, 7, 1, 2, 9, 4, 5, 6, 8, 10, 11])
    targets, upstream = targets[: len(rows)], torch.linspace(-1, 1, len(rows), dtype=torch.float64)
    logprobs, entropy = reference(hidden[rows], weight, targets, 0.6, **CASES[case])
    (logprobs * upstream + 0.3 * entropy).sum().backward()
    found = compute_on_shards(
        size, hidden, weight, targets, upstream, CASES[case], rows=rows, chunk_tokens=4, temperature=0.6,
        keep_logits_bytes=800,
    )  # fmt: skip
    for own_logprobs, own_entropy, hidden_grad, _ in found:
        torch.testing.assert_close(own_logprobs, logprobs.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own_entropy, entropy.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(hidden_grad, hidden.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[3] for part in found]), weight.grad, rtol=1e-10, atol=1e-12)


def test_logits_far_apart_on_two_shards_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    for found in compute_on_shards(2, hidden, weight, torch.tensor([0, 0]), torch.ones(2), {}):
        assert found[0].tolist() == [0.0, -2e4] and found[1].tolist() == [0.0, 0.0]
        assert all(part.isfinite().all() for part in found)


def test_no_targets_on_shards_meet_no_one():
    hidden, weight, _ = draw()
    none = torch.zeros(0, dtype=torch.long)
    alone = SimpleNamespace(sum_=lambda tensor: pytest.fail("summed"), max_=lambda tensor: pytest.fail("compared"))
    head = Head(weight, vocabulary=VocabularyShard(13, alone))
    logprobs, entropy = compute_logprobs(hidden, none, head, rows=none, with_entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.abs().sum() == 0 and weight.grad.abs().sum() == 0


def test_what_a_split_head_cannot_do_is_refused():
    hidden, weight, targets = draw()
    shard = VocabularyShard(13, SimpleNamespace())
    with pytest.raises(ValueError, match="no row of the head is on this rank"):
        compute_logprobs(hidden, targets, Head(weight[:0], vocabulary=shard))
    with pytest.raises(ValueError, match="logits are not gathered"):
        compute_logits(hidden, Head(weight, vocabulary=shard))
    with pytest.raises(ValueError, match='passes "softmax" needs the whole vocabulary'):
        compute_logprobs(hidden, targets, Head(weight, vocabulary=shard), passes="softmax")
    with pytest.raises(ValueError, match="keep_logits_bytes is 100"):
        compute_logprobs(hidden, targets, Head(weight), keep_logits_bytes=100)


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made within it that are alive, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        inputs = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        for tensor in made if isinstance(made, tuple) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in inputs:
                self.now += tensor.untyped_storage().nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(tensor, self._free, tensor.untyped_storage().nbytes())
        return made

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


SHAPINGS = (
    Shaping(1.3), Shaping(min_p=0.05), Shaping(top_k=20, top_p=0.9), Shaping(1.3, 0.05, 20, 0.9),
    Shaping(top_p=0.9), Shaping(1.3, top_p=0.9), Shaping(top_k=1500),
)  # fmt: skip


BOTH, TYPES = (False, True), (torch.bfloat16, torch.float32)
# A block of few targets, beside which the padding of exact products counts, and one of many.
SAID = [
    *itertools.product([(32000, 200), (32000, 240)], BOTH, TYPES, (UNSHAPED, *SHAPINGS[:2])),
    *itertools.product([(2048, 1000)], BOTH, TYPES, (UNSHAPED, *SHAPINGS)),
    *itertools.product([(2048, 512), (4096, 512)], [False], TYPES, SHAPINGS[1:]),
    ((2048, 1000), False, torch.float64, UNSHAPED),
    # Two chunks, of which one is held at a time.
    *itertools.product([(32000, 2500)], [False], TYPES, [UNSHAPED]),
]


@pytest.mark.parametrize(("sizes", "exact", "dtype", "shaping"), SAID)
def test_the_bytes_a_head_is_said_to_need_are_those_that_live_at_once(
    sizes: tuple[int, int], exact: bool, dtype: torch.dtype, shaping: Shaping
) -> None:
    vocab_size, num_targets = sizes
    weight = torch.randn(vocab_size, 16).to(dtype).requires_grad_()
    hidden = torch.randn(num_targets, 16).to(dtype).requires_grad_()
    targets = torch.arange(num_targets)
    starts, ends = torch.zeros_like(targets), 1 + targets % 50
    shaped = None if shaping == UNSHAPED else Shaped(shaping, targets, starts, ends)
    if shaped is not None and shaping.cuts:
        # As many as there may be.
        most = shaping.top_k or vocab_size
        shaped = dataclasses.replace(shaped, num_kept_M=torch.full_like(targets, most))
    with LiveBytes() as live:
        compute_logprobs(hidden, targets, Head(weight, exact=exact), shaped=shaped)[0].sum().backward()
    told = compute_head_bytes(
        num_targets, vocab_size, 16, dtype, on_gpu=False, trains=True, exact=exact, shaping=shaping
    )
    assert told == pytest.approx(live.most, rel=0.05)


def test_on_a_gpu_a_head_needs_one_compiled_chunk_and_its_weight_s_gradient() -> None:
    def need(num_targets: int, **changes: Any) -> int:
        asked: dict[str, Any] = {"on_gpu": True, "trains": True, **changes}
        return compute_head_bytes(num_targets, 151936, 1024, torch.bfloat16, **asked)

    chunk = choose_chunk_tokens(151936, "compiled", on_gpu=True)
    assert 0.98 * 2**30 < chunk * 151936 * 2 <= 2**30
    assert need(32768) == need(65536) == chunk * 151936 * 2 + 151936 * 1024 * (4 + 2)
    assert need(32768, trains=False) == chunk * 151936 * 2
    assert need(100, trains=False) == 100 * 151936 * 2
    softmax_chunk = choose_chunk_tokens(151936, "softmax", on_gpu=True)
    block = 2**24 // 151936
    assert need(32768, trains=False, shaping=Shaping(1.1)) == 151936 * (softmax_chunk * 2 + block * 4 * 7.25)
    assert need(32768, trains=False, exact=True) == 151936 * (softmax_chunk * (4 + 2) + block * 4 * 3)
