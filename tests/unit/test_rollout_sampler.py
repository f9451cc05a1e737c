import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.models import cut_logits
from hybridflow.models.head_shaping import keep_most_likely
from hybridflow.rollout.native.sampler import sample_tokens
from hybridflow.types import Shaping


def reference_distribution(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """One row in float64, written out: cut at min-p, sort, cut, renormalise. Logits must be distinct."""
    probs = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-probs)
    kept = order[probs[order] >= min_p][: top_k or len(order)]
    within = probs[kept] / probs[kept].sum()
    enough = int(np.searchsorted(np.cumsum(within), top_p * (1 - 1e-12))) + 1
    kept = kept[:enough]
    result = np.zeros(len(probs))
    result[kept] = probs[kept] / probs[kept].sum()
    return result


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 40), st.integers(0, 45), st.sampled_from([1.0, 0.95, 0.6, 0.1, 1e-6]),
    st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]), st.integers(0, 2**31),
)  # fmt: skip
def test_logprobs_are_those_of_the_cut_distribution(vocab, top_k, top_p, min_p, seed):
    logits = np.random.default_rng(seed).normal(size=(9, vocab)).astype(np.float32) * 2
    uniforms = np.random.default_rng(seed + 1).random(9)
    shaping = Shaping(min_p=min_p, top_k=top_k, top_p=top_p)
    tokens, logprobs, kept = sample_tokens(torch.from_numpy(logits), torch.from_numpy(uniforms), shaping)
    assert (kept is not None) == shaping.cuts
    for row in range(9):
        expected = reference_distribution(logits[row], top_k, top_p, min_p)
        assert kept is None or int(kept[row]) == np.count_nonzero(expected)
        cumulative = np.cumsum(expected)
        token = int(tokens[row])
        assert expected[token] > 0
        assert cumulative[token] - expected[token] - 1e-6 <= uniforms[row] <= cumulative[token] + 1e-6
        assert float(logprobs[row]) == pytest.approx(np.log(expected[token]), abs=2e-6)


def test_frequencies_follow_the_distribution():
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.0, -3.0]])
    uniforms = torch.from_numpy((np.arange(100_000) + 0.5) / 100_000)
    tokens, *_ = sample_tokens(logits.expand(len(uniforms), -1), uniforms)
    shares = np.bincount(tokens.numpy(), minlength=5) / len(uniforms)
    assert shares == pytest.approx(logits[0].double().softmax(0).numpy(), abs=2e-5)


def test_greedy_takes_the_largest_and_reports_the_whole_distribution():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, -1.0]])
    tokens, logprobs, kept = sample_tokens(logits, None, Shaping(top_k=1, top_p=0.1))
    assert tokens.tolist() == [1, 0] and kept is None
    assert logprobs.tolist() == pytest.approx(logits.double().log_softmax(-1)[[0, 1], [1, 0]].tolist(), abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_ends_of_the_unit_interval_never_leave_the_kept_tokens(uniform):
    logits = torch.tensor([[-5.0, 1.0, 0.5, -5.0]])
    tokens, logprobs, _ = sample_tokens(logits, torch.tensor([uniform], dtype=torch.float64), Shaping(top_k=2))
    assert tokens.item() == (1 if uniform == 0.0 else 2) and logprobs.isfinite().all()


def test_equal_logits_at_the_border_are_kept_together():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    kept = cut_logits(logits, Shaping(top_k=2)).isfinite()[0]
    assert kept.tolist() == [True, True, True, False]
    kept = cut_logits(logits, Shaping(top_p=0.6)).isfinite()[0]
    assert kept.tolist() == [True, True, True, False]


def test_min_p_cuts_before_top_p_and_by_a_share_of_the_greatest_probability():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]).log()
    # Of 0.4, 0.3 and 0.2 alone the first two reach 0.75; of all five they do not.
    for shaping, count in (
        (Shaping(min_p=0.45), 3),
        (Shaping(top_p=0.75), 3),
        (Shaping(min_p=0.45, top_p=0.75), 2),
        (Shaping(min_p=0.12), 4),
        (Shaping(min_p=0.05, top_k=3), 3),
        (Shaping(min_p=1.0), 1),
    ):
        assert int(cut_logits(logits, shaping).isfinite().sum()) == count, shaping


def test_what_was_drawn_is_kept_in_place_of_the_least_likely_of_the_others():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).expand(5, -1)
    counts, drawn = torch.tensor([1, 1, 2, 2, 4]), torch.tensor([0, 1, 0, 3, 0])
    kept = keep_most_likely(logits, counts, drawn).isfinite()
    assert kept.int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1]]


def test_of_equal_logits_at_the_border_as_many_are_kept_as_were():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]])
    for count, expected in ((2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 4])):
        kept = keep_most_likely(logits, torch.tensor([count]), torch.tensor([3])).isfinite()
        assert kept[0].nonzero().flatten().tolist() == expected


def test_which_of_equal_logits_stay_does_not_depend_on_the_rows_beside():
    rng = np.random.default_rng(0)
    for _ in range(50):
        logits = torch.from_numpy(np.concatenate([rng.normal(size=20) + 3, np.zeros(60)]).astype(np.float32))
        drawn, count = torch.tensor([int(rng.integers(80))]), torch.tensor([int(rng.integers(20, 70))])
        alone = keep_most_likely(logits[None], count, drawn)
        beside = [torch.cat(pair) for pair in ((count, torch.tensor([78])), (drawn, drawn))]
        assert torch.equal(keep_most_likely(logits.expand(2, -1), *beside)[:1], alone)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("drawn", [0, 2])
def test_a_logit_that_is_not_a_number_is_seen_whatever_is_kept(count, drawn):
    logits = torch.tensor([[1.0, 0.5, float("nan"), 2.0]])
    kept = keep_most_likely(logits, torch.tensor([count]), torch.tensor([drawn]))
    assert not kept.log_softmax(-1)[0, drawn].isfinite()


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 60), st.integers(0, 65), st.sampled_from([1.0, 0.95, 0.6, 1e-6]), st.sampled_from([0.0, 0.02, 0.9]),
    st.sampled_from([0.0, 1e-4, 0.1, 1.0]), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_a_count_says_the_set_and_rounding_moves_no_logprob_by_a_jump(vocab, top_k, top_p, min_p, apart, coarse, seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(7, vocab)) * 2
    # Coarse logits are often equal, at the border too.
    logits = torch.from_numpy(np.round(logits * 2) / 2 if coarse else logits)
    shaping = Shaping(min_p=min_p, top_k=top_k, top_p=top_p)
    tokens, _, kept = sample_tokens(logits, torch.from_numpy(rng.random(7)), shaping)
    if kept is None:
        return
    cut = cut_logits(logits, shaping)
    assert torch.equal(keep_most_likely(logits, kept, tokens), cut)
    moved = logits + torch.from_numpy(rng.uniform(-apart, apart, logits.shape))
    found = keep_most_likely(moved, kept, tokens).log_softmax(-1).gather(1, tokens[:, None])
    recorded = cut.log_softmax(-1).gather(1, tokens[:, None])
    assert float((found - recorded).abs().max()) <= 2 * apart + 1e-12


def test_non_finite_logits_show_as_a_non_finite_logprob_in_their_own_row_only():
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("nan")
    tokens, logprobs, _ = sample_tokens(logits, torch.full((3,), 0.5, dtype=torch.float64))
    assert logprobs.isfinite().tolist() == [True, False, True]
    assert tokens.max() < 4
