"""The reference policy: frozen, scores what the actor sampled."""

from __future__ import annotations

from hybridflow.batch import Batch
from hybridflow.roles.policy import ModelSpec, build_policy
from hybridflow.runtime.api import Runtime
from hybridflow.train_engine import compute_batch_logprobs
from hybridflow.types import BatchRef


class ReferenceWorker:
    """A frozen model on its device."""

    def __init__(self, spec: ModelSpec, micro_batch_tokens: int) -> None:
        self.model = build_policy(spec).model
        self.model.module.requires_grad_(False)
        self.micro_batch_tokens = micro_batch_tokens

    def log_prob(self, batch: Batch, temperature: float) -> Batch:
        """Column `ref_logprobs` [tokens of the row] float32: of each counted token, 0.0 elsewhere."""
        logprobs = compute_batch_logprobs(
            self.model, batch, temperature=temperature, micro_batch_tokens=self.micro_batch_tokens
        )
        return Batch.from_columns(ref_logprobs=logprobs)

    def close(self) -> None:
        """Nothing runs outside this process."""


class Reference:
    """Verbs of the reference policy on the page."""

    def __init__(self, runtime: Runtime, spec: ModelSpec, *, micro_batch_tokens: int, temperature: float) -> None:
        self._runtime = runtime
        self._temperature = temperature
        self._worker = runtime.place("reference", ReferenceWorker, spec, micro_batch_tokens)

    def log_prob(self, batch: BatchRef) -> BatchRef:
        """Log-probabilities of the sampled tokens under the reference, chunk by chunk."""
        chunks = (
            self._runtime.submit(self._worker, ReferenceWorker.log_prob, chunk, self._temperature)
            for chunk in batch.chunks
        )
        return BatchRef(tuple(chunks), batch.chunk_rows)
