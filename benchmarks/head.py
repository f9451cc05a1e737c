"""Speed and memory of the language-model head, forward and backward, on one GPU: every way of computing it in one run.

    python benchmarks/head.py                          # 32768 targets, D 1024 and 1536, V 151936, bfloat16
    python benchmarks/head.py --chunks 2048 4096 8192  # and other chunk lengths

TFLOP/s count 6 * targets * D * V, whatever is multiplied again: 989 is an H200's dense bfloat16 peak. Peak GiB are those above hidden
states and weight. The last columns are the greatest differences from the softmax passes: of log-probabilities, and of the weight's
gradient relative to its largest entry. "keep" is keep_logits_bytes: none, all, or the default.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cases import build_parser
from timing import time_call
from torch import Tensor

from hybridflow.models import Head, compute_logprobs
from hybridflow.models.head_chunks import Passes

KEEP: dict[str, int | None] = {"none": 0, "all": 2**62, "default": None}


@dataclass
class Job:
    """One way of computing the head: `Job("compiled", "all", with_entropy=True, chunk_tokens=None)`."""

    passes: Passes
    keep: str
    with_entropy: bool
    chunk_tokens: int | None

    def run(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward; the log-probabilities."""
        hidden.grad = weight.grad = None
        logprobs, entropy = compute_logprobs(
            hidden,
            targets,
            Head(weight),
            with_entropy=self.with_entropy,
            chunk_tokens=self.chunk_tokens,
            passes=self.passes,
            keep_logits_bytes=KEEP[self.keep],
        )
        (-logprobs.mean() if entropy is None else -(logprobs + 0.01 * entropy).mean()).backward()
        return logprobs.detach()


def main() -> None:
    """Prints one line a job."""
    options = parse_options()
    for width in options.widths:
        generator = torch.Generator(options.device).manual_seed(0)
        draw = {"generator": generator, "device": options.device}
        hidden = torch.randn(options.targets, width, **draw).to(torch.bfloat16).requires_grad_()
        weight = (torch.randn(options.vocabulary, width, **draw) / width**0.5).to(torch.bfloat16).requires_grad_()
        targets = torch.randint(0, options.vocabulary, (options.targets,), **draw)
        print(f"\n{options.targets} targets, D {width}, V {options.vocabulary}, bfloat16, {torch.__version__}")
        for with_entropy in (False, True):
            compare(options, with_entropy, hidden, weight, targets)
        if options.device == "cuda":
            time_weight_gradient(hidden.detach(), options.vocabulary)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = build_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--targets", type=int, default=32768)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 1536])
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="other chunk lengths for the compiled passes")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def compare(options: argparse.Namespace, with_entropy: bool, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """All jobs against the softmax passes."""
    baseline = Job("softmax", "none", with_entropy, None)
    expected = baseline.run(hidden, weight, targets)
    grad = weight.grad.clone()
    jobs = [baseline, *(Job("fused", keep, with_entropy, None) for keep in ("none", "all"))]
    jobs += [Job("compiled", keep, with_entropy, None) for keep in ("none", "all", "default")]
    jobs += [Job("compiled", keep, with_entropy, chunk) for chunk in options.chunks for keep in ("none", "all")]
    for job in jobs:
        if KEEP[job.keep] is None and options.device == "cpu":
            continue
        run_s, peak = measure(lambda job=job: job.run(hidden, weight, targets), options)
        logprobs = job.run(hidden, weight, targets)
        away = (logprobs - expected).abs().max(), (weight.grad - grad).abs().max() / grad.abs().max()
        flops = 6 * hidden.numel() * weight.shape[0]
        print(
            f"  {job.passes:9} keep {job.keep:8} entropy {'on ' if with_entropy else 'off'} chunk {job.chunk_tokens or 'default':>7}: "
            f"{hidden.shape[0] / run_s:9.0f} tokens/s {flops / run_s / 1e12:6.1f} TFLOP/s {peak:6.2f} GiB  "
            f"{away[0]:.1e} {away[1]:.1e}",
            flush=True,
        )


def measure(work: Callable[[], object], options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a run, and peak GiB above what was there."""
    for _ in range(3):
        work()
    if options.device == "cpu":
        return time_runs(work, options.repeats), 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_s = time_runs(work, options.repeats)
    return run_s, (torch.cuda.max_memory_allocated() - before) / 2**30


def time_runs(work: Callable[[], object], repeats: int) -> float:
    """Seconds of a run, the device waited for after the last."""

    def run_all() -> None:
        for _ in range(repeats):
            work()

    return time_call(run_all) / repeats


def time_weight_gradient(hidden: Tensor, vocabulary: int, chunk: int = 4096) -> None:
    """How a chunk's part is added to the float32 gradient: a product and a sum, or one call that adds up in place."""
    rows = hidden[:chunk]
    grad = torch.randn(chunk, vocabulary, device="cuda", dtype=torch.bfloat16)
    total = torch.zeros(vocabulary, rows.shape[1], device="cuda")
    half = total.bfloat16()
    ways: dict[str, Callable[[], object]] = {
        "mm, add_": lambda: total.add_(torch.mm(grad.t(), rows, out_dtype=torch.float32)),
        "addmm out": lambda: torch.addmm(total, grad.t(), rows, out_dtype=torch.float32, out=total),
        "bf16 addmm_": lambda: half.addmm_(grad.t(), rows),
    }
    expected = torch.mm(grad.t(), rows, out_dtype=torch.float32)
    for name, way in ways.items():
        total.zero_()
        way()
        away = (total - expected).abs().max().item() if name != "bf16 addmm_" else 0.0
        torch.cuda.synchronize()
        run_s = time_runs(way, 20)
        flops = 2 * grad.numel() * rows.shape[1]
        print(
            f"  weight gradient of {chunk}: {name:11} {run_s * 1e3:.2f} ms {flops / run_s / 1e12:.0f} TFLOP/s, off by {away:.1e}"
        )


if __name__ == "__main__":
    main()
