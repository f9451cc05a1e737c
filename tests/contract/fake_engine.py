"""A small engine that keeps the contract, and breaks one promise of it at will: what the contract tests are tested with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.batch import Batch
from hybridflow.rollout.base import RowScores, WatchedWeights, check_prompts
from hybridflow.rollout.native.draws import compute_uniforms
from hybridflow.rollout.requests import Request, RequestPlan, Sample, build_batch, plan_requests, read_served_model
from hybridflow.rollout.turns import Turns
from hybridflow.types import Metrics, SamplingParams

FAULTS = (
    "logprobs before temperature", "top-p before top-k", "greedy draws", "one seed for a group", "seed of the call", "first stop id alone",
    "model's ids in spite of ignore_eos", "stop token dropped", "text not cut", "runs past the context", "raises for a bad prompt",
    "old version", "deaf to abort", "generates asleep", "stale prefixes", "one tensor kept", "head kept", "takes what it gets",
    "scores a token late", "min-p after top-p", "penalty by the response alone",
)  # fmt: skip


class FakeEngine:
    """Draws with one whole forward pass a token; implements `RolloutEngine`, but for its fault."""

    def __init__(self, directory: Path, fault: str | None = None) -> None:
        assert fault is None or fault in FAULTS
        self.model = read_served_model(directory)
        self.module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        self.version = 0
        self._fault = fault
        self._turns = Turns()
        self._calls = 0
        self._head = self.module.lm_head.weight.detach().clone()
        self._prefixes: dict[tuple[int, ...], Tensor] = {}

    @property
    def longest_row(self) -> int:
        return self.model.context

    @torch.inference_mode()
    def generate(self, prompts: Batch, sampling: SamplingParams, *, step: int) -> Batch:
        check_prompts(prompts)
        self._calls += 1
        with self._turns.take("generate", awake=self._fault != "generates asleep"):
            plan = plan_requests(prompts, sampling, step, self.model)
            if self._fault == "raises for a bad prompt" and any(plan.errors):
                raise ValueError(next(filter(None, plan.errors)))
            batch = build_batch(plan, self._run(plan), self.version)
        if self._fault == "text not cut":
            sampled = [
                np.array(t)[np.array(m) == 1] for t, m in zip(*map(batch.pylist, ("tokens", "loss_mask")), strict=True)
            ]
            batch = batch.drop(["response"]).with_column("response", [self._decode(ids.tolist()) for ids in sampled])
        return batch

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]]) -> RowScores:
        scores = []
        for row in rows:
            logprobs = self.module(torch.tensor([row])).logits[0].log_softmax(-1)
            if self._fault != "scores a token late":
                logprobs = logprobs.roll(1, 0)
            own = logprobs.gather(1, torch.tensor(row)[:, None])[:, 0].numpy()
            own[0] = 0.0
            scores.append(own)
        return RowScores(scores, torch.float32)

    @torch.no_grad()
    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        with self._turns.take("load_weights", awake=True):
            own = dict(self.module.named_parameters())
            watched = WatchedWeights(weights or (), {name: weight.shape for name, weight in own.items()})
            for name, weight in watched:
                if self._fault != "one tensor kept" or name != "model.layers.2.mlp.up_proj.weight":
                    own[name].copy_(weight)
            if weights is not None and self._fault != "takes what it gets":
                watched.check()
            if self._fault != "head kept":
                self._head = self.module.lm_head.weight.clone()
            if self._fault != "stale prefixes":
                self._prefixes.clear()
            self.version = 0 if self._fault == "old version" else version

    def sleep(self) -> None:
        with self._turns.take("sleep"):
            self._turns.asleep = True

    def wake(self) -> None:
        self._turns.asleep = False

    def abort(self) -> None:
        if self._fault != "deaf to abort":
            self._turns.aborting.set()

    def metrics(self) -> Metrics:
        """Nothing."""
        return {}

    def close(self) -> None:
        pass

    def _run(self, plan: RequestPlan) -> dict[int, Sample]:
        rows = {request.row: _Row(request) for request in plan.requests}
        self._seeds = {request.row: request.seed for request in plan.requests}
        while (live := [row for row in rows.values() if not row.finish]) and not self._turns.aborting.is_set():
            for row, logits in zip(live, self._forward(live), strict=True):
                self._draw(plan, row, logits.double().numpy())
        drop = self._fault == "stop token dropped"
        return {number: row.sample(drop=drop and row.finish == "stop") for number, row in rows.items()}

    def _forward(self, rows: list[_Row]) -> Tensor:
        """Logits of each row's next token; those of a prompt are kept for the next row that has it."""
        known = [self._prefixes.get(tuple(row.tokens)) for row in rows]
        lacking = [row for row, logits in zip(rows, known, strict=True) if logits is None]
        if lacking:
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row.tokens) for row in lacking], batch_first=True)
            last = torch.tensor([len(row.tokens) - 1 for row in lacking])
            hidden = self.module.model(ids).last_hidden_state[torch.arange(len(lacking)), last]
            computed = iter(hidden @ self._head.T)
            known = [next(computed) if logits is None else logits for logits in known]
        for row, logits in zip(rows, known, strict=True):
            if not row.logprobs:
                self._prefixes[tuple(row.tokens)] = logits
        return torch.stack(known)

    def _draw(self, plan: RequestPlan, row: _Row, logits: np.ndarray) -> None:
        sampling = plan.sampling
        logits = self._penalize(logits, row, sampling.repetition_penalty)
        greedy = sampling.temperature == 0 and self._fault != "greedy draws"
        tempered = logits / (sampling.temperature or 1.0)
        if not np.isfinite(logits).all():
            row.add(0, float("nan"), "length")
            return
        kept = tempered if greedy else self._filter(tempered, sampling)
        probs = np.exp(kept - np.logaddexp.reduce(kept))
        uniform = float(
            compute_uniforms(torch.tensor([self._find_seed(plan, row)]), torch.tensor([len(row.tokens)]))[0]
        )
        token = int(probs.argmax()) if greedy else int(np.searchsorted(np.cumsum(probs), uniform * probs.sum()))
        told = logits if self._fault == "logprobs before temperature" else kept
        row.add(token, float(told[token] - np.logaddexp.reduce(told)), self._find_end(plan, row, token))

    def _penalize(self, logits: np.ndarray, row: _Row, penalty: float) -> np.ndarray:
        seen = np.unique(row.sampled() if self._fault == "penalty by the response alone" else row.tokens).astype(int)
        result = logits.copy()
        result[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        return result

    def _filter(self, logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
        if self._fault == "min-p after top-p" and sampling.min_p:
            return cut_min_p(self._filter(logits, replace(sampling, min_p=0.0)), sampling.min_p)
        logits = cut_min_p(logits, sampling.min_p)
        order = np.argsort(-logits, kind="stable")
        top_k = sampling.top_k or len(order)
        first = order if self._fault == "top-p before top-k" else order[:top_k]
        probs = np.exp(logits[first] - np.logaddexp.reduce(logits[first]))
        nucleus = first[np.cumsum(probs) - probs < sampling.top_p][:top_k]
        result = np.full_like(logits, -np.inf)
        result[nucleus] = logits[nucleus]
        return result

    def _find_seed(self, plan: RequestPlan, row: _Row) -> int:
        number = row.request.row
        if self._fault == "one seed for a group":
            number -= number % plan.sampling.samples_per_prompt
        return self._seeds[number] + self._calls * (self._fault == "seed of the call")

    def _find_end(self, plan: RequestPlan, row: _Row, token: int) -> str:
        ids = set(plan.stops.ids)
        if self._fault == "first stop id alone" and plan.sampling.stop_token_ids:
            ids -= set(plan.sampling.stop_token_ids[1:])
        if self._fault == "model's ids in spite of ignore_eos":
            ids |= self.model.eos_ids
        text = self._decode([*row.sampled(), token]) if plan.stops.strings else ""
        if token in ids or any(string in text for string in plan.stops.strings):
            return "stop"
        room = row.request.max_tokens + (4 if self._fault == "runs past the context" else 0)
        return "length" if len(row.logprobs) + 1 >= room else ""

    def _decode(self, tokens: list[int]) -> str:
        return self.model.tokenizer.decode(tokens, skip_special_tokens=True)


def cut_min_p(logits: np.ndarray, min_p: float) -> np.ndarray:
    """-inf below `min_p` times the greatest probability."""
    return np.where(np.exp(logits - logits.max()) >= min_p, logits, -np.inf)


class _Row:
    def __init__(self, request: Request) -> None:
        self.request, self.tokens, self.logprobs, self.finish = request, list(request.prompt), [], ""

    def add(self, token: int, logprob: float, finish: str) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.finish = finish

    def sampled(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    def sample(self, *, drop: bool) -> Sample:
        end = -1 if drop else None
        return Sample(self.sampled()[:end], self.logprobs[:end], self.finish or "abort")
