import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.rollout.native.sampler import filter_logits, sample_tokens


def reference_distribution(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """One row in float64, written out: sort, cut, renormalise. Logits must be distinct."""
    probs = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-probs)
    kept = order[: top_k or len(order)]
    within = probs[kept] / probs[kept].sum()
    enough = int(np.searchsorted(np.cumsum(within), top_p * (1 - 1e-12))) + 1
    kept = kept[:enough]
    result = np.zeros(len(probs))
    result[kept] = probs[kept] / probs[kept].sum()
    return result


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40), st.integers(0, 45), st.sampled_from([1.0, 0.95, 0.6, 0.1, 1e-6]), st.integers(0, 2**31))
def test_logprobs_are_those_of_the_filtered_distribution(vocab, top_k, top_p, seed):
    logits = np.random.default_rng(seed).normal(size=(9, vocab)).astype(np.float32) * 2
    uniforms = np.random.default_rng(seed + 1).random(9)
    tokens, logprobs = sample_tokens(torch.from_numpy(logits), torch.from_numpy(uniforms), top_k=top_k, top_p=top_p)
    for row in range(9):
        expected = reference_distribution(logits[row], top_k, top_p)
        cumulative = np.cumsum(expected)
        token = int(tokens[row])
        assert expected[token] > 0
        assert cumulative[token] - expected[token] - 1e-6 <= uniforms[row] <= cumulative[token] + 1e-6
        assert float(logprobs[row]) == pytest.approx(np.log(expected[token]), abs=2e-6)


def test_frequencies_follow_the_distribution():
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.0, -3.0]])
    uniforms = torch.from_numpy((np.arange(100_000) + 0.5) / 100_000)
    tokens, _ = sample_tokens(logits.expand(len(uniforms), -1), uniforms, top_k=0, top_p=1.0)
    shares = np.bincount(tokens.numpy(), minlength=5) / len(uniforms)
    assert shares == pytest.approx(logits[0].double().softmax(0).numpy(), abs=2e-5)


def test_greedy_takes_the_largest_and_reports_the_whole_distribution():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, -1.0]])
    tokens, logprobs = sample_tokens(logits, None, top_k=1, top_p=0.1)
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == pytest.approx(logits.double().log_softmax(-1)[[0, 1], [1, 0]].tolist(), abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_ends_of_the_unit_interval_never_leave_the_kept_tokens(uniform):
    logits = torch.tensor([[-5.0, 1.0, 0.5, -5.0]])
    tokens, logprobs = sample_tokens(logits, torch.tensor([uniform], dtype=torch.float64), top_k=2, top_p=1.0)
    assert tokens.item() == (1 if uniform == 0.0 else 2) and logprobs.isfinite().all()


def test_equal_logits_at_the_border_are_kept_together():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    kept = filter_logits(logits, top_k=2, top_p=1.0).isfinite()[0]
    assert kept.tolist() == [True, True, True, False]
    kept = filter_logits(logits, top_k=0, top_p=0.6).isfinite()[0]
    assert kept.tolist() == [True, True, True, False]


def test_non_finite_logits_show_as_a_non_finite_logprob_in_their_own_row_only():
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("nan")
    tokens, logprobs = sample_tokens(logits, torch.full((3,), 0.5, dtype=torch.float64), top_k=0, top_p=1.0)
    assert logprobs.isfinite().tolist() == [True, False, True]
    assert tokens.max() < 4
