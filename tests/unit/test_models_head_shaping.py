"""Log-probabilities of tokens drawn from shaped distributions, and their gradients, against float64 written out token by token."""

import dataclasses

import pytest
import torch
from sampling_reference import shape_reference

from hybridflow.models import Head, Shaped, compute_logprobs, find_seen, penalize_repetition
from hybridflow.types import Shaping

VOCAB, WIDTH = 23, 6
# Two rows of tokens, and for each target its row's start and its own place.
TOKENS = [3, 7, 7, 11, 0, 5, 22, 7, 4, 4, 9, 3, 4, 16, 2]
STARTS, PLACES = [0, 0, 0, 6, 6, 6, 6], [3, 4, 5, 9, 10, 12, 14]
SHAPINGS = {
    "penalty": Shaping(repetition_penalty=1.3),
    "reward": Shaping(repetition_penalty=0.7),
    "min-p": Shaping(min_p=0.1),
    "top-k": Shaping(top_k=6),
    "top-p": Shaping(top_p=0.8),
    "all": Shaping(repetition_penalty=1.2, min_p=0.02, top_k=15, top_p=0.95),
}


def build_case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(PLACES), WIDTH, generator=generator, dtype=torch.float64).mul_(1.2).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, weight, torch.tensor([TOKENS[place] for place in PLACES])


def build_shaped(shaping: Shaping, kept: list[int] | None = None) -> Shaped:
    shaped = Shaped(shaping, torch.tensor(TOKENS), torch.tensor(STARTS), torch.tensor(PLACES))
    if not shaping.cuts:
        return shaped
    kept = kept or [2 + at % 5 for at in range(len(PLACES))]
    return dataclasses.replace(shaped, num_kept_M=torch.tensor(kept))


def reference(hidden, weight, softcap, temperature, shaping):
    """(log-probability, entropy) of each target, one after the other, and how many tokens each was among."""
    logprobs, entropies, kept = [], [], []
    for row, (start, place) in enumerate(zip(STARTS, PLACES, strict=True)):
        logits = [0.5 * (hidden[row] @ weight[token]) for token in range(VOCAB)]
        if softcap is not None:
            logits = [softcap * torch.tanh(logit / softcap) for logit in logits]
        found = shape_reference(logits, TOKENS[start:place], TOKENS[place], temperature, shaping)
        logprobs.append(found[0])
        entropies.append(found[1])
        kept.append(found[2])
    return torch.stack(logprobs), torch.stack(entropies), kept


@pytest.mark.parametrize("chunk_tokens", [64, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", SHAPINGS)
def test_values_and_gradients_against_float64(name, softcap, chunk_tokens):
    shaping = SHAPINGS[name]
    hidden, weight, targets = build_case()
    up = torch.linspace(-1.0, 1.5, len(PLACES), dtype=torch.float64)
    *expected, kept = reference(hidden, weight, softcap, 0.6, shaping)
    found = compute_logprobs(
        hidden, targets, Head(weight, softcap=softcap, logit_scale=0.5), temperature=0.6, with_entropy=True,
        chunk_tokens=chunk_tokens, shaped=build_shaped(shaping, kept),
    )  # fmt: skip
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((up * found[0]).sum() + (up.flip(0) * found[1]).sum(), (hidden, weight))
    theirs = torch.autograd.grad((up * expected[0]).sum() + (up.flip(0) * expected[1]).sum(), (hidden, weight))
    for one, other in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_gradient_against_finite_differences():
    hidden, weight, targets = build_case(seed=1)
    shaped = build_shaped(SHAPINGS["all"])

    def total(hidden, weight):
        return compute_logprobs(hidden, targets, Head(weight), temperature=0.8, shaped=shaped)[0].sum()

    assert torch.autograd.gradcheck(total, (hidden, weight), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("name", SHAPINGS)
def test_in_exact_mode_chunks_change_no_bit(name):
    hidden, weight, targets = (part.detach() for part in build_case())
    hidden, weight = hidden.float(), weight.float()
    whole, parts = (
        compute_logprobs(
            hidden, targets, Head(weight, exact=True), chunk_tokens=size, shaped=build_shaped(SHAPINGS[name])
        )[0]
        for size in (64, 2)
    )
    assert torch.equal(whole, parts)


def test_a_token_seen_twice_is_penalised_once_and_none_from_other_rows():
    seen = find_seen(torch.tensor([[3, 7, 7, 3], [1, 1, 1, 1]]), 9)
    assert [row.nonzero().flatten().tolist() for row in seen] == [[3, 7], [1]]
    logits = torch.tensor(
        [[1.0, -1.0, 0.0, 3.0, 2.0, 2.0, 2.0, -4.0, 0.5], [1.0, -1.0, 0.0, 3.0, 2.0, 2.0, 2.0, -4.0, 0.5]]
    )
    penalised = penalize_repetition(logits, seen, 2.0)
    assert penalised[0].tolist() == [1.0, -1.0, 0.0, 1.5, 2.0, 2.0, 2.0, -8.0, 0.5]
    assert penalised[1].tolist() == [1.0, -2.0, 0.0, 3.0, 2.0, 2.0, 2.0, -4.0, 0.5]


def test_passes_that_cannot_shape_are_refused():
    hidden, weight, targets = build_case()
    for passes in ("fused", "compiled"):
        with pytest.raises(ValueError, match='needs passes "softmax" and the whole vocabulary; leave passes out'):
            compute_logprobs(hidden, targets, Head(weight), passes=passes, shaped=build_shaped(SHAPINGS["penalty"]))
