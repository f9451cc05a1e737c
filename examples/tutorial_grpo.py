"""GRPO in one file: a small model learns to add from rewards alone. Plain PyTorch and Transformers, a few minutes on a CPU.

    python examples/tutorial_grpo.py

It does what `hybridflow quickstart` does, and nothing that makes it fast, large or safe: no KV cache, no packing, no processes, no
checkpoints. A test holds its rewards to the framework's, step by step.

The idea. For each prompt draw a *group* of answers from the model. Reward each one. An answer better than its siblings has a positive
*advantage*: make its tokens more likely; one that is worse, less likely. The siblings serve as the baseline, so no value model is needed
(GRPO, arXiv:2402.03300). Since two updates share one set of samples, the second is made by a policy that has moved from the one that drew
them; each token is therefore weighted by the ratio of the two probabilities, and a ratio that has gone far enough earns no more
(PPO's clip, arXiv:1707.06347, with two bounds as in DAPO, arXiv:2503.14476).

Dimensions: P prompts, G samples of each, N = P * G rows, L tokens of a row, V vocabulary.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

PAD, BOS, EOS = 0, 1, 2
CHARACTERS = "0123456789+="
ID_OF = {character: 4 + index for index, character in enumerate(CHARACTERS)}
CHARACTER_OF = {token_id: character for character, token_id in ID_OF.items()}
VOCABULARY = 4 + len(CHARACTERS)
PROMPT_TOKENS = 7
"""The start token and `37+48=`: all prompts have one length, so that no row needs padding on its left."""
MAX_NEW_TOKENS = 5


@dataclass(frozen=True)
class Settings:
    """What can be tuned; the defaults are the quickstart's but for fewer steps."""

    steps: int = 200
    prompts: int = 64
    samples: int = 8
    updates: int = 2
    lr: float = 3e-4
    warmup: int = 10
    min_lr_ratio: float = 0.1
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Sum:
    """A problem and its answer, written last digit first, so that each digit follows from what stands before it: `37+48=`, `58`."""

    prompt: str
    answer: str


# The task ------------------------------------------------------------------------------------------------------------


def make_sums(seed: int) -> tuple[list[Sum], list[Sum]]:
    """All sums of two numbers of two digits: those to train on, and 256 to test on."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    sums = [Sum(f"{a}+{b}=", str(a + b)[::-1]) for a, b in pairs]
    return sums[768:], sums[:256]


def compute_reward(response: Sequence[int], answer: str) -> float:
    """1 for the right answer, else 0. This is all that the model is ever told."""
    return float("".join(CHARACTER_OF.get(token_id, "") for token_id in response) == answer)


def encode(sums: Sequence[Sum]) -> Tensor:
    """Prompts as token ids, [P, PROMPT_TOKENS]."""
    return torch.tensor([[BOS, *(ID_OF[character] for character in each.prompt)] for each in sums])


def iter_prompts(sums: Sequence[Sum], count: int, seed: int) -> Iterator[list[Sum]]:
    """Prompts in batches, in a new order each epoch."""
    taken: list[Sum] = []
    epoch = 0
    while True:
        if len(taken) < count:
            draws = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(len(sums))
            taken += [sums[index] for index in np.argsort(draws, kind="stable")]
            epoch += 1
        yield taken[:count]
        taken = taken[count:]


# Rollout: the policy answers -----------------------------------------------------------------------------------------

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(state: np.ndarray) -> np.ndarray:
    """SplitMix64's output function: 64 bits in, 64 well-mixed bits out."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def draw_keys(seed: int, step: int, groups: int, samples: int) -> np.ndarray:
    """A key for each row, [N] uint64, from (seed, step, group, sample): a row's draws do not depend on what is drawn beside it."""
    first_group = (step - 1) * groups
    group_ids = np.repeat(np.arange(first_group, first_group + groups, dtype=np.uint64), samples)
    sample_ids = np.tile(np.arange(samples, dtype=np.uint64), groups)
    keys = np.zeros(groups * samples, np.uint64)
    for part in (np.uint64(seed), np.uint64(step), group_ids, sample_ids):
        keys = mix(keys + part + GOLDEN)
    return keys


def draw_uniforms(keys: np.ndarray, position: int) -> Tensor:
    """One number in [0, 1) a row, [N] float64, for the token at this position."""
    bits = mix(keys + np.array([position + 1], np.uint64) * GOLDEN) >> np.uint64(11)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)


@torch.no_grad()
def generate(model: LlamaForCausalLM, prompts: Tensor, keys: np.ndarray | None) -> tuple[Tensor, Tensor, Tensor]:
    """Continues prompts token by token until the end token; without keys always by the most likely one.

    prompts: [N, PROMPT_TOKENS].
    returns: tokens [N, L], PAD after the end; mask [N, L], True where the policy chose the token; log-probabilities [N, L] of those.
    """
    tokens, ended = prompts, torch.zeros(len(prompts), dtype=torch.bool)
    mask, logprobs = torch.zeros_like(prompts, dtype=torch.bool), torch.zeros(prompts.shape)
    for _ in range(MAX_NEW_TOKENS):
        log_softmax_NV = model(tokens).logits[:, -1].float().log_softmax(-1)
        if keys is None:
            chosen = log_softmax_NV.argmax(-1)
        else:
            # The token at which the running sum of probabilities passes the uniform.
            cumulative_NV = log_softmax_NV.exp().double().cumsum(-1)
            target_N = draw_uniforms(keys, tokens.shape[1]) * cumulative_NV[:, -1]
            chosen = torch.searchsorted(cumulative_NV, target_N[:, None], right=True)[:, 0].clamp(max=VOCABULARY - 1)
        chosen_logprobs = log_softmax_NV.gather(1, chosen[:, None])[:, 0]
        tokens = torch.cat([tokens, torch.where(ended, PAD, chosen)[:, None]], dim=1)
        mask = torch.cat([mask, ~ended[:, None]], dim=1)
        logprobs = torch.cat([logprobs, torch.where(ended, 0.0, chosen_logprobs)[:, None]], dim=1)
        ended = ended | (chosen == EOS)
        if ended.all():
            break
    return tokens, mask, logprobs


def responses(tokens: Tensor, mask: Tensor) -> list[list[int]]:
    """What was sampled, row by row, without the prompt."""
    return [row[counted].tolist() for row, counted in zip(tokens, mask, strict=True)]


def measure_accuracy(model: LlamaForCausalLM, sums: Sequence[Sum]) -> float:
    """Share of sums whose most likely answer is right."""
    tokens, mask, _ = generate(model, encode(sums), None)
    right = [compute_reward(row, each.answer) for row, each in zip(responses(tokens, mask), sums, strict=True)]
    return sum(right) / len(sums)


# Learning ------------------------------------------------------------------------------------------------------------


def compute_advantages(rewards_PG: Tensor) -> Tensor:
    """Each sample's reward minus the mean of its group, over the group's standard deviation; 0 in a group of equal rewards."""
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    std_P1 = rewards_PG.std(1, keepdim=True)
    return torch.where(std_P1 > 0, centred_PG / std_P1.clamp(min=1e-12), 0.0)


def score(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Log-probability of each token given those before it, [N, L], with gradient. The first has none before it: 0."""
    log_softmax_NLV = model(tokens[:, :-1]).logits.float().log_softmax(-1)
    logprobs = log_softmax_NLV.gather(2, tokens[:, 1:, None])[:, :, 0]
    return torch.nn.functional.pad(logprobs, (1, 0))


def compute_policy_loss(
    logprobs: Tensor, old: Tensor, advantages_N: Tensor, mask: Tensor, settings: Settings
) -> Tensor:
    """-min(r A, clip(r) A), summed over the sampled tokens and divided once by their number, over all rows of the update."""
    ratio = (logprobs - old)[mask].exp()
    advantage = advantages_N[:, None].expand_as(mask)[mask]
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -torch.minimum(ratio * advantage, clipped * advantage).sum() / mask.sum()


def learning_rate(taken: int, settings: Settings) -> float:
    """Rises over the warm-up, then falls in a line to its floor."""
    total = settings.steps * settings.updates
    if taken < settings.warmup:
        return settings.lr * (taken + 1) / (settings.warmup + 1)
    progress = min((taken - settings.warmup) / (total - settings.warmup), 1.0)
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * (1 - progress))


def step_optimizer(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, loss: Tensor, lr: float, max_norm: float
) -> None:
    """Backward, clip to the norm, step."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def train_grpo(model: LlamaForCausalLM, sums: Sequence[Sum], settings: Settings) -> Iterator[dict[str, float]]:
    """The loop: rollout, reward, advantages, updates. Yields what each step saw."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    batches = iter_prompts(sums, settings.prompts, settings.seed)
    taken = 0
    for step in range(1, settings.steps + 1):
        problems = next(batches)
        prompts = encode(problems).repeat_interleave(settings.samples, dim=0)
        keys = draw_keys(settings.seed, step, settings.prompts, settings.samples)
        tokens, mask, old = generate(model, prompts, keys)
        answers = [each.answer for each in problems for _ in range(settings.samples)]
        rewards = torch.tensor([compute_reward(r, a) for r, a in zip(responses(tokens, mask), answers, strict=True)])
        rewards_PG = rewards.view(settings.prompts, settings.samples)
        advantages_N = compute_advantages(rewards_PG).flatten()
        # A group of equal rewards teaches nothing; its tokens would only thin out the others in the mean.
        useful_N = (rewards_PG.amax(1) > rewards_PG.amin(1)).repeat_interleave(settings.samples)
        loss_sum, counted = 0.0, 0
        for part in torch.arange(len(tokens)).chunk(settings.updates):
            rows = part[useful_N[part]]
            if len(rows):
                logprobs = score(model, tokens[rows])
                loss = compute_policy_loss(logprobs, old[rows], advantages_N[rows], mask[rows], settings)
                step_optimizer(model, optimizer, loss, learning_rate(taken, settings), settings.max_grad_norm)
                taken, counted = taken + 1, counted + int(mask[rows].sum())
                loss_sum += loss.item() * int(mask[rows].sum())
        seen = {
            "reward": float(rewards.double().mean()),
            "loss": loss_sum / max(counted, 1),
            "rows": int(useful_N.sum()),
        }
        yield {"step": step, **seen}


# The start: a model that is right now and then, or no reward would ever come -----------------------------------------


def build_model(seed: int) -> LlamaForCausalLM:
    """A new Llama of a third of a million parameters."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True,
            pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
        )
    )  # fmt: skip


def train_sft(model: LlamaForCausalLM, sums: Sequence[Sum], held_out: Sequence[Sum], until: float, seed: int) -> int:
    """Supervised learning on worked sums until so many held-out ones come out right; returns the steps that it took."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step, batch in enumerate(iter_prompts(sums, 256, seed), start=1):
        answers = [[*(ID_OF[character] for character in each.answer), EOS, PAD][:4] for each in batch]
        tokens = torch.cat([encode(batch), torch.tensor(answers)], dim=1)
        mask = (tokens != PAD) & (torch.arange(tokens.shape[1]) >= PROMPT_TOKENS)
        loss = -score(model, tokens)[mask].mean()
        step_optimizer(model, optimizer, loss, 1e-3 * min(1.0, step / 20), 1.0)
        if step % 10 == 0 and measure_accuracy(model, held_out) >= until:
            return step
    raise AssertionError("iter_prompts never ends")


def main() -> None:
    """SFT until it is right now and then, then GRPO."""
    parser = argparse.ArgumentParser(description="GRPO in one file: a small model learns to add from rewards alone.")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="steps of GRPO")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="keys the data, the weights and every draw")
    settings = Settings(**vars(parser.parse_args()))
    started_s, (train, held_out), model = time.perf_counter(), make_sums(settings.seed), build_model(settings.seed)
    steps = train_sft(model, train, held_out, until=0.3, seed=settings.seed)
    accuracy = measure_accuracy(model, held_out)
    print(f"SFT: {steps} steps, {accuracy:.1%} right, {time.perf_counter() - started_s:.0f} s", flush=True)
    for seen in train_grpo(model, train, settings):
        if seen["step"] % 20 == 0:
            accuracy, seconds = measure_accuracy(model, held_out), time.perf_counter() - started_s
            print(
                f"step {seen['step']}: reward {seen['reward']:.3f}, {accuracy:.1%} right, {seconds:.0f} s", flush=True
            )


if __name__ == "__main__":
    main()
