"""TrainEngine: one optimizer step over a mini-batch of rows, on one device or on several as replicas.

Dimensions: T packed tokens of a micro-batch, M those of them that count.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from hybridflow.algorithms.losses import LossSum, TokenLoss, compute_denominator, compute_token_weights
from hybridflow.batch import Batch
from hybridflow.config import Field, HybridflowError, settings
from hybridflow.models import LanguageModel
from hybridflow.train_engine.logprobs import compute_batch_logprobs, compute_packed_logprobs, plan_rows
from hybridflow.train_engine.loss_totals import LossTotals
from hybridflow.train_engine.optimizer import AdamW, OptimizerSettings
from hybridflow.train_engine.packing import PackedRows, Rows, pack_rows, read_rows, to_device
from hybridflow.train_engine.ranks import Ranks
from hybridflow.train_engine.schedule import ScheduleSettings, compute_learning_rate
from hybridflow.types import Metrics, last, mean, total

_ALONE = Ranks()


@settings
class TrainSettings:
    """How a model is trained, e.g. `TrainSettings(micro_batch_tokens=8192, optimizer=OptimizerSettings(lr=1e-6))`."""

    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens that go through the model together; more is faster and takes more memory. A longer row goes alone. Changes no
    gradient beyond rounding."""
    gradient_checkpointing: bool = False
    """Keeps only the input of each layer for the backward pass and computes the rest again: long rows in less memory, about a
    third slower, same gradients."""
    max_skipped_steps: int = Field(default=5, ge=0)
    """Steps in a row that may be skipped because their loss or gradient is not finite; one more stops the run."""
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    """AdamW and clipping."""
    schedule: ScheduleSettings = Field(default_factory=ScheduleSettings)
    """Learning rate over optimizer steps."""


class StateError(HybridflowError, ValueError):
    """A saved state does not fit this engine."""


class RowTooLongError(HybridflowError, ValueError):
    """A row is longer than the model's context."""


class NonFiniteError(HybridflowError, RuntimeError):
    """Too many steps in a row had a loss or a gradient that is not finite."""


class TrainEngine:
    """Trains a model on one device; the weights change in place and keep their addresses.

    ranks: the replicas that train together, each with its own rows of every mini-batch and an engine like this one. They take the
           same steps with the same gradients and stay bit-equal. Collectives of a step: the denominator; which weights have a
           gradient; the gradients, one for each 32 MiB; the loss sums with the numbers that have to be the same on all ranks
           (gradient norm, checksum of the weights before the step). Where no token counts, the first alone. All but the
           gradients are numbers of the host, and the device is waited for once a step, as alone.

    Determinism: with the same rows in the same order on the same number of ranks, the same settings and the same number of
    threads, every number is bit-equal on the CPU: micro-batches, their order and the order of all sums follow from the row
    lengths. In exact mode a row's log-probabilities do not depend on its micro-batch either. Gradients of other micro-batch
    splits or numbers of ranks differ by rounding: 1e-5 relative in float32, 1e-10 in float64.
    """

    def __init__(self, model: LanguageModel, settings: TrainSettings, ranks: Ranks = _ALONE) -> None:
        self.model = model
        self.settings = settings
        self.ranks = ranks
        self.optimizer = AdamW(dict(model.module.named_parameters()), settings.optimizer)
        self._steps_taken = 0
        self._skipped_in_a_row = 0
        if settings.gradient_checkpointing:
            _enable_checkpointing(model)

    @property
    def steps_taken(self) -> int:
        """Optimizer steps so far, skipped ones left out; the same on all ranks."""
        return self._steps_taken

    def update(self, batch: Batch | None, loss: TokenLoss) -> Metrics:
        """One optimizer step over the rows that are OK, of all ranks: the gradient of sum(loss) / denominator.

        batch:   this rank's rows, None or none where it has none: `tokens`, `loss_mask`, `state`, and the loss's own columns.
                 Every rank calls, as often as the others.
        returns: the loss's metrics, and `train/`: grad_norm (before clipping), lr, rows and tokens (those that went through
                 the model), micro_batches, skipped_steps and nonfinite_steps (0 or 1 here; they sum). What is the same on
                 all ranks comes from rank 0, the rest from each about its rows: merged over ranks, they are those of one
                 process (but for micro_batches, of which other splits make another number).

        A step is skipped, and counted, when no token counts, or when loss or gradient is not finite; it moves neither
        weights nor optimizer nor schedule, and reports no loss. Only the second kind can stop the run (`NonFiniteError`):
        where every group is constant there is nothing to learn, and nothing wrong.

        An error ends the waits of the other ranks, and this engine takes no further step with them.
        """
        with self.ranks.leaving_on_error():
            totals, metrics = self.accumulate(batch, loss)
            return metrics | self._take_step(totals)

    def accumulate(self, batch: Batch | None, loss: TokenLoss) -> tuple[LossTotals, Metrics]:
        """Leaves the gradient of the whole mini-batch in `optimizer.gradients()`, in place of whatever was there.

        Micro-batches by the plan, one backward each; every sum is divided by the denominator of the whole mini-batch, which
        is counted from the same mask beforehand; then gradients are summed over ranks. Nothing waits for the device.
        """
        self.optimizer.discard_gradients()
        # Dropout would change log-probabilities between two passes over the same rows.
        self.model.module.eval()
        rows = read_rows(batch, loss.columns)
        _check_lengths(rows.lengths, self.model.config.max_position_embeddings)
        counts = rows.count_masked()
        totals = LossTotals(self.ranks.total(compute_denominator(counts, loss.normalization)), self.ranks)
        plan = plan_rows(self.model, rows, counts > 0, self.settings.micro_batch_tokens)
        with _checkpointing(self.model, self.settings.gradient_checkpointing):
            for micro_batch in plan:
                packed = pack_rows(rows, micro_batch.rows, rows.loss_mask, self.model.device)
                loss_sum = self._compute_loss(rows, packed, loss)
                (loss_sum.total / totals.denominator).backward()
                totals.add(loss_sum)
        if totals.denominator:
            self.optimizer.sum_gradients(self.ranks)
        return totals, {
            "train/rows": total(sum(len(micro_batch.rows) for micro_batch in plan)),
            "train/tokens": total(sum(micro_batch.num_tokens for micro_batch in plan)),
            "train/micro_batches": total(len(plan)),
        }

    def log_prob(self, batch: Batch, temperature: float, *, only_masked: bool = True) -> list[NDArray[np.float32]]:
        """`compute_batch_logprobs` of this model with the micro-batches of `update`."""
        return compute_batch_logprobs(
            self.model,
            batch,
            temperature=temperature,
            micro_batch_tokens=self.settings.micro_batch_tokens,
            only_masked=only_masked,
        )

    def check_weights(self) -> None:
        """Raises NonFiniteError if a weight is not finite, so that no such state replaces a good one."""
        for name, weight in self.model.module.named_parameters():
            if not torch.isfinite(weight).all():
                raise NonFiniteError(
                    f"weight '{name}' is not finite after {self._steps_taken} steps, and is not saved; "
                    "go on from the last checkpoint with a lower optimizer.lr"
                )

    def state_tensors(self) -> dict[str, Tensor]:
        """All tensors of the training state, by name: `model/<weight>`, `optimizer/...` (see `AdamW`), `rng/cpu`, `rng/cuda`.

        Weights and moments are the live tensors, not copies: write them out before the next update. The generators' states
        are uint8; training draws nothing, whatever else runs in the process may.
        """
        tensors = {f"model/{name}": weight.detach() for name, weight in self.model.module.named_parameters()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in self.optimizer.state_tensors().items()}
        tensors["rng/cpu"] = torch.get_rng_state()
        if self.model.device.type == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state(self.model.device)
        return tensors

    def state_json(self) -> dict[str, Any]:
        """The rest of the state: `{"steps_taken": 20, "skipped_in_a_row": 0}`. The schedule is a function of the first."""
        return {"steps_taken": self._steps_taken, "skipped_in_a_row": self._skipped_in_a_row}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Takes up what `state_tensors` and `state_json` gave, so that what follows is bit-equal. Addresses stay.

        Everything is checked before anything is changed; ValueError names the tensor that is missing, odd or of another form.
        """
        ours = self.state_tensors()
        _check_state(ours, tensors)
        for name, tensor in ours.items():
            tensor.copy_(tensors[name])
        self.optimizer.load_steps(tensors["optimizer/steps"])
        torch.set_rng_state(ours["rng/cpu"])
        if "rng/cuda" in ours:
            torch.cuda.set_rng_state(ours["rng/cuda"], self.model.device)
        self._steps_taken = int(state["steps_taken"])
        self._skipped_in_a_row = int(state["skipped_in_a_row"])
        self.optimizer.discard_gradients()

    def _take_step(self, totals: LossTotals) -> Metrics:
        """Steps by the gradients that `accumulate` has left, or skips; the metrics of that."""
        lr = compute_learning_rate(self._steps_taken, self.settings.optimizer.lr, self.settings.schedule)
        if not totals.denominator:
            return self._report_step(lr, skipped=1)
        grad_norm = self.optimizer.compute_grad_norm()
        mean_loss, grad_norm_value, *_ = totals.read({"the gradient norm": grad_norm, **self._compute_checksum()})
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm_value)):
            self._skip_nonfinite(mean_loss, grad_norm_value)
            return self._report_step(lr, skipped=1, nonfinite=1)
        self.optimizer.step(lr, grad_norm)
        self._steps_taken += 1
        self._skipped_in_a_row = 0
        return totals.metrics() | self._report_step(lr, {"train/grad_norm": mean(grad_norm_value)})

    def _compute_checksum(self) -> dict[str, Tensor]:
        """Of the weights that this step starts from; nothing where there is no other rank to compare with."""
        return {} if self.ranks.size == 1 else {"the checksum of the weights": self.optimizer.compute_checksum()}

    def _report_step(self, lr: float, more: Metrics | None = None, *, skipped: int = 0, nonfinite: int = 0) -> Metrics:
        """What is the same on all ranks, from the first of them alone."""
        if self.ranks.rank:
            return {}
        counts = {"train/skipped_steps": total(skipped), "train/nonfinite_steps": total(nonfinite)}
        return {"train/lr": last(lr)} | counts | (more or {})

    def _compute_loss(self, rows: Rows, packed: PackedRows, loss: TokenLoss) -> LossSum:
        device = self.model.device
        mask_T = torch.from_numpy(rows.loss_mask[packed.places_T])
        weights_T = compute_token_weights(mask_T, packed.attention.cu_seqlens, loss.normalization)
        logprobs_M, entropy_M = compute_packed_logprobs(
            self.model, packed, temperature=loss.temperature, with_entropy=loss.needs_entropy
        )
        return loss(
            _spread(logprobs_M, packed),
            None if entropy_M is None else _spread(entropy_M, packed),
            to_device(mask_T, device),
            to_device(weights_T, device),
            {
                name: to_device(torch.from_numpy(values[packed.places_T]), device)
                for name, values in rows.columns.items()
            },
        )

    def _skip_nonfinite(self, mean_loss: float, grad_norm: float) -> None:
        self.optimizer.discard_gradients()
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row > self.settings.max_skipped_steps:
            raise NonFiniteError(
                f"{self._skipped_in_a_row} steps in a row had a loss or gradient that is not finite (max_skipped_steps is "
                f"{self.settings.max_skipped_steps}; the last had loss {mean_loss:.6g} and gradient norm {grad_norm:.6g}, after "
                f"{self._steps_taken} steps taken); lower optimizer.lr, or look at the rows of this step"
            )


def _check_lengths(lengths: NDArray[np.int64], context: int) -> None:
    if lengths.size and lengths.max() > context:
        row = int(lengths.argmax())
        raise RowTooLongError(
            f"row {row} of a step has {lengths[row]} tokens, more than the model's context of {context}; "
            f"set data.max_tokens to {context} or less"
        )


def _spread(values_M: Tensor, packed: PackedRows) -> Tensor:
    """[M] to [T]: each value at its token, 0 elsewhere."""
    return values_M.new_zeros(packed.tokens_T.numel()).index_copy(0, packed.token_index_M, values_M)


def _enable_checkpointing(model: LanguageModel) -> None:
    with warnings.catch_warnings():
        # The name that all supported versions of Transformers know; the newer ones announce another.
        warnings.simplefilter("ignore", FutureWarning)
        model.module.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


@contextmanager
def _checkpointing(model: LanguageModel, enabled: bool) -> Iterator[None]:
    """Lets the layers checkpoint, which Transformers ties to training mode: the layer's own flag alone, so that no dropout wakes
    up in the modules below it, and only for now, because the rollout runs the same layers."""
    layers = (
        [layer for layer in model.module.modules() if isinstance(layer, GradientCheckpointingLayer)] if enabled else []
    )
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def _check_state(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    odd = sorted(set(ours) ^ set(theirs))
    if odd:
        where = (
            "is missing from the saved state" if odd[0] in ours else "is in the saved state, but this engine has none"
        )
        raise StateError(f"tensor '{odd[0]}' {where} ({len(odd)} such); resume with the same model, device and dtype")
    for name, tensor in ours.items():
        saved = theirs[name]
        if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
            raise StateError(
                f"tensor '{name}' is {saved.dtype} {list(saved.shape)} in the saved state, but {tensor.dtype} "
                f"{list(tensor.shape)} here; resume with the same model, device and dtype"
            )
