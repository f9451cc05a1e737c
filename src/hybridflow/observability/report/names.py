"""What metrics are called for a reader, what they count, and in which order they are shown.

Names and units are those of docs/metrics.md, which a test holds them to.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """A metric for a reader: `Name("Time of a step", "s", "Wall clock, from one step's end to the next")`. unit: '' for a pure number."""

    title: str
    unit: str
    meaning: str = ""


NAMES: dict[str, Name] = {
    "reward/mean": Name("Mean reward", "reward", "Over the rows that have one, before groups are dropped"),
    "reward/std": Name("Spread of reward in a group", "reward", "Standard deviation within a prompt's samples, mean over prompts"),
    "reward/kl": Name("KL in the reward", "nats/token", "Taken off the reward, before its coefficient"),
    "reward/errors": Name("Reward failures", "rows", "Rows for which the reward function gave no number"),
    "eval/reward_mean": Name("Held-out reward", "reward", "Mean over the held-out prompts; a failed row counts 0"),
    "eval/response_length_mean": Name("Held-out response length", "tokens", "Mean over the held-out prompts"),
    "eval/failed": Name("Held-out failures", "rows", "Rows that failed, counted as reward 0"),
    "sft/loss": Name("Training loss", "nats/token", "Negative log-likelihood of the counted tokens"),
    "policy/loss": Name("Policy loss", "", "The whole loss, divided as the algorithm divides it"),
    "policy/entropy": Name("Entropy", "nats", "Of the policy at sampled tokens, mean"),
    "policy/kl_to_rollout": Name("KL to the sampling policy", "nats", "k3 estimate, mean over tokens"),
    "policy/kl_to_reference": Name("KL to the reference", "nats", "Mean over tokens"),
    "policy/ratio_mean": Name("Probability ratio, mean", "", "Trained policy to sampling policy, at sampled tokens"),
    "policy/ratio_max": Name("Probability ratio, largest", "", "Of all sampled tokens"),
    "policy/logprob_gap_mean": Name("Log-probability gap, mean", "nats", "|log ratio| of trained and sampling policy"),
    "policy/logprob_gap_max": Name("Log-probability gap, largest", "nats", "|log ratio| of trained and sampling policy"),
    "policy/clip_fraction_low": Name("Clipped below", "share", "Tokens without gradient because of the lower clip"),
    "policy/clip_fraction_high": Name("Clipped above", "share", "Tokens without gradient because of the upper clip"),
    "policy/clip_fraction_dual": Name("Clipped by the dual clip", "share", "Tokens without gradient because of it"),
    "advantages/mean": Name("Advantage before normalising, mean", "reward", "Over the counted tokens of the whole batch"),
    "advantages/std": Name("Advantage before normalising, spread", "reward", "Over the counted tokens of the whole batch"),
    "policy/version": Name("Weight version", "", "Counts steps that changed the weights"),
    "response/length_mean": Name("Response length, mean", "tokens", "Of rows whose rollout did not fail"),
    "response/length_max": Name("Response length, longest", "tokens", "Of rows whose rollout did not fail"),
    "response/cut_off": Name("Cut off", "share", "Responses that reached max_new_tokens or the context"),
    "rows/ok": Name("Rows trained on", "rows"),
    "rows/empty": Name("Empty rows", "rows", "Nothing was sampled"),
    "rows/failed": Name("Failed rows", "rows", "Rollout or reward failed"),
    "rows/rejected": Name("Rejected rows", "rows", "Taken out by a filter, as groups of equal rewards"),
    "groups/total": Name("Groups", "prompts", "Prompts with a scored sample"),
    "groups/constant": Name("Groups of equal rewards", "prompts", "Nothing to learn from"),
    "train/lr": Name("Learning rate", ""),
    "train/grad_norm": Name("Gradient norm", "", "Before clipping"),
    "train/tokens": Name("Tokens trained", "tokens"),
    "train/rows": Name("Rows trained", "rows"),
    "train/micro_batches": Name("Micro-batches", ""),
    "train/skipped_steps": Name("Skipped updates", "updates", "Nothing counted, or a gradient was not finite"),
    "train/nonfinite_steps": Name("Updates not finite", "updates", "Skipped because of a gradient that was not finite"),
    "train/shared_tokens": Name("Shared prompt tokens", "tokens", "Computed once for several rows"),
    "data/rows_dropped": Name("Rows left out", "rows", "So far, for being longer than data.max_tokens"),
    "data/rows_truncated": Name("Rows cut", "rows", "So far, for being longer than data.max_tokens"),
    "data/rows_short": Name("Short rows left out", "rows", "So far, for being shorter than data.min_tokens"),
    "data/rows_unmatched": Name("Rows of other columns", "rows", "Of the files, left out by data.keep_where"),
    "data/rows_filtered": Name("Rows filtered", "rows", "Of the files, left out by data.keep_function"),
    "data/rows_duplicate": Name("Duplicates", "rows", "Of the files, left out by data.deduplicate_by"),
    "data/rows_skipped": Name("Bad rows", "rows", "So far, skipped as data.on_bad_row says"),
    "data/epoch": Name("Epochs", "epochs", "Of the data, counted in rows taken"),
    "time/step_s": Name("Time of a step", "s", "Wall clock, from the end of the step before"),
    "speed/trained_tokens_per_s": Name("Training speed", "tokens/s", "Tokens trained over the wall clock of the whole step"),
    "speed/rollout_occupancy": Name("Rollout occupancy", "share", "Seats of decoding steps in which a row drew a token"),
    "speed/rollout_tail_share": Name("Rollout tail", "share", "Time in which at most a tenth of the rows was unfinished"),
    "speed/rollout_preemptions": Name("Preemptions", "rows", "Rows that lost their cache to others"),
    "speed/rollout_prefill_tokens": Name("Prefill", "tokens"),
    "speed/rollout_beside_tokens": Name("Decoded beside prefill", "tokens"),
    "memory/peak_rss_bytes": Name("Host memory, peak", "bytes", "Largest resident size of any worker so far"),
    "hybrid/switch_ms": Name("Switch to rollout", "ms", "Bringing new weights to generation"),
    "hybrid/memory_before_bytes": Name("Memory before the switch", "bytes", "Of the device, before new weights come to generation"),
    "hybrid/memory_after_bytes": Name("Memory after the switch", "bytes", "Of the device, when they are there"),
    "hybrid/memory_peak_bytes": Name("Memory in the switch, peak", "bytes"),
    "hybrid/bytes_moved": Name("Weights moved", "bytes"),
    "hybrid/bytes_stored": Name("Weights moved, through the object store", "bytes", "Where they do not go straight to generators"),
    "probe/max_gap": Name("Sync probe, largest gap", "nats", "Rollout and trainer on fixed prompts"),
    "probe/mean_gap": Name("Sync probe, mean gap", "nats", "Rollout and trainer on fixed prompts"),
    "recovery/deaths": Name("Workers lost", "workers"),
    "controller/cpu_s": Name("Controller CPU", "s"),
    "controller/received_bytes": Name("Controller received", "bytes"),
    "controller/sent_bytes": Name("Controller sent", "bytes"),
}  # fmt: skip

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Learning", ("reward/", "sft/", "eval/")),
    ("Policy", ("policy/", "advantages/")),
    ("Responses and rows", ("response/", "rows/", "groups/", "data/")),
    ("Optimizer", ("train/",)),
    ("Speed and memory", ("time/", "speed/", "memory/", "hybrid/", "controller/")),
    ("Checks and recovery", ("probe/", "recovery/")),
)
"""Headings of the curves, and whose names begin how; what begins otherwise comes last."""

HEADLINES = {
    "rl": ("reward/mean", "eval/reward_mean", "response/length_mean", "policy/entropy"),
    "sft": ("sft/loss", "eval/reward_mean", "train/grad_norm", "train/lr"),
    "run": (),
}
"""Shown large, by kind of run."""

EXPECTED = {
    "rl": {
        "eval/reward_mean": "evaluation.data names no held-out rows, or no evaluation was reached",
        "policy/kl_to_reference": "algorithm.kl_coefficient is 0 and algorithm.report_kl is false",
    },
    "sft": {"eval/reward_mean": "evaluation.data names no held-out rows, or no evaluation was reached"},
    "run": {},
}
"""What a reader may look for, and why a run may not have it."""

_SUFFIXES = (
    ("_per_s", "1/s"),
    ("_bytes", "bytes"),
    ("_tokens", "tokens"),
    ("_ms", "ms"),
    ("_s", "s"),
    ("_fraction", "share"),
)


def name_metric(metric: str) -> Name:
    """How a metric is shown; one that is not known goes by its own name, with the unit that its last word states."""
    if metric in NAMES:
        return NAMES[metric]
    unit = next((unit for suffix, unit in _SUFFIXES if metric.endswith(suffix)), "")
    if metric.startswith("time/"):
        return Name(f"Time of {metric[5:].removesuffix('_s')}", "s", "A phase, by its workers' clocks")
    return Name(metric, unit)


def group_of(metric: str) -> str:
    """The heading that a metric stands under."""
    return next((title for title, starts in GROUPS if metric.startswith(starts)), "Other")
