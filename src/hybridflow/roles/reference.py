"""The reference policy: frozen, scores what the actor sampled."""

from __future__ import annotations

from hybridflow.batch import Batch
from hybridflow.roles.parts import TOKENS, add_columns, cut_columns
from hybridflow.roles.policy import ModelSpec, build_policy
from hybridflow.runtime.api import Pieces, Runtime, Seat
from hybridflow.train_engine import compute_batch_logprobs
from hybridflow.types import BatchRef, SamplingParams, Shaping


class ReferenceWorker:
    """A frozen model on its device."""

    def __init__(self, seat: Seat, spec: ModelSpec, micro_batch_tokens: int) -> None:
        self.model = build_policy(spec, seat).model
        self.model.module.requires_grad_(False)
        self.micro_batch_tokens = micro_batch_tokens

    def log_prob(self, batch: Batch, sizes: tuple[int, ...], temperature: float, shaping: Shaping) -> Pieces[Batch]:
        """Column `ref_logprobs` [tokens of the row] float32: of each counted token, 0.0 elsewhere; in chunks of these numbers of rows."""
        logprobs = compute_batch_logprobs(
            self.model, batch, temperature=temperature, micro_batch_tokens=self.micro_batch_tokens, shaping=shaping
        )
        return cut_columns(Batch.from_columns(ref_logprobs=logprobs), sizes)

    def close(self) -> None:
        """Nothing runs outside this process."""


class Reference:
    """Verbs of the reference policy on the page. sampling: how rows were drawn, of which it takes temperature and penalty and no cut."""

    def __init__(self, runtime: Runtime, spec: ModelSpec, sampling: SamplingParams, *, micro_batch_tokens: int) -> None:
        self._runtime = runtime
        self._sampling = sampling
        self._workers = runtime.place("reference", ReferenceWorker, spec, micro_batch_tokens)

    def log_prob(self, batch: BatchRef) -> BatchRef:
        """Log-probabilities of the sampled tokens under the reference, cut nowhere: it knows tokens that the policy no longer draws."""
        tokens, verb = batch.only(TOKENS), ReferenceWorker.log_prob
        drawn = (self._sampling.temperature, self._sampling.shaping.uncut)
        return add_columns(self._runtime, self._workers, verb, tokens, "reference", *drawn)
