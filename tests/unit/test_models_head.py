"""The head against a written-out float64 reference: values, gradients, memory, and the shift by one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.models import Head, compute_log_softmax, compute_logits, compute_logprobs, predicted_positions

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
