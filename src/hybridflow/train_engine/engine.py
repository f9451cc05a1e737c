"""TrainEngine: one optimizer step over a mini-batch of rows, on one device or on several that share rows, tokens, matrices and storage.

Dimensions: T packed tokens of a micro-batch, M those of them that count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from hybridflow.algorithms.losses import LossSum, TokenLoss, compute_denominator
from hybridflow.batch import Batch
from hybridflow.config import HybridflowError
from hybridflow.models import (
    LanguageModel,
    adapter_weights,
    compute_base_checksum,
    has_adapter,
    iter_merged_weights,
    plain_name,
    resolve_lora,
)
from hybridflow.train_engine.building import apply_settings, build_layers
from hybridflow.train_engine.logprobs import (
    build_micro_batches,
    compute_batch_logprobs,
    compute_packed_logprobs,
    find_ranks_in_step,
)
from hybridflow.train_engine.loss_totals import LossTotals
from hybridflow.train_engine.memory import PLAIN_ROW_MEMORY, RowMemory
from hybridflow.train_engine.mesh import build_mesh, plan_layout
from hybridflow.train_engine.optimizer import AdamW
from hybridflow.train_engine.packing import (
    PackedRows,
    Rows,
    build_shaped,
    compute_packed_weights,
    pack_rows,
    read_rows,
    to_device,
)
from hybridflow.train_engine.ranks import ALONE, Ranks
from hybridflow.train_engine.schedule import compute_learning_rate
from hybridflow.train_engine.segments import GroupsOfPass
from hybridflow.train_engine.settings import TrainSettings, resolve_sharing
from hybridflow.train_engine.sharding import (
    compute_box,
    compute_cuts,
    free_gathered,
    gather_whole,
    local_part,
    owns_box,
    read_splits,
    set_last_backward,
)
from hybridflow.types import UNSHAPED, Box, Metrics, Shaping, last, mean, total

_PER_WEIGHT = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")


class StateError(HybridflowError, ValueError):
    """A saved state does not fit this engine."""


class RowTooLongError(HybridflowError, ValueError):
    """A row is longer than the model's context."""


class NonFiniteError(HybridflowError, RuntimeError):
    """Too many steps in a row had a loss or a gradient that is not finite."""


class TrainEngine:
    """Trains a model on one device or on several; whole weights change in place and keep their addresses.

    model: edited in place as the settings say: adapter, tensor parallel, sharding, in this order. From then on its passes go through
           `model.run`, and where the layout shares the model, all ranks take part in each.
    ranks: those that train together, each with an engine like this one; `settings.parallel_config` says who does what. Ranks of one
           `data` index are given the same rows, others their own. All take the same steps with the same gradients, and those that hold
           the same weights stay bit-equal. Collectives of a step, beside those of the layers: the denominator; how many micro-batches
           there are, under sharding; which weights have a gradient, and the gradients, one for each 32 MiB, without sharding; the
           gradient norm, where weights are split; the loss sums with the numbers that have to be the same on all ranks (gradient norm,
           checksum of the weights before the step). Where no token counts, the first alone. Numbers of the host travel by the host, and
           the device is waited for once a step, as alone.
    seed:  draws a new adapter.
    expected: what rows will take beside their tokens, for the memory estimate alone; where prompts are not shared, no copies of keys.

    Determinism: with the same rows in the same order on the same layout of ranks, the same settings and the same number of
    threads, every number is bit-equal on the CPU: micro-batches, their order and the order of all sums follow from the rows'
    lengths and, where rows share it, from what they begin with. In exact mode a row's log-probabilities do not depend on its
    micro-batch either. Gradients of other micro-batch splits or layouts differ by rounding: 1e-5 relative in float32, 1e-10 in
    float64.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: TrainSettings,
        ranks: Ranks = ALONE,
        *,
        seed: int = 0,
        expected: RowMemory = PLAIN_ROW_MEMORY,
    ) -> None:
        self.model = model
        self.settings = settings
        self.ranks = ranks
        self.mesh = build_mesh(ranks, plan_layout(settings.parallel_config, ranks.size), model.device)
        # Before the base is cut up.
        self._adapter = (
            None if settings.lora is None else (resolve_lora(settings.lora).scale, compute_base_checksum(model))
        )
        self._partial = apply_settings(model, settings, self.mesh, seed)
        self._shares_prompts = resolve_sharing(
            settings.share_prompts, exact=model.numerics == "exact", served=model.shares_keys
        )
        expected = expected if self._shares_prompts else replace(expected, keys_per_token=1.0)
        self.layers = build_layers(model, settings, self.mesh, expected)
        parameters = {plain_name(name): weight for name, weight in model.module.named_parameters()}
        self.optimizer = AdamW(parameters, settings.optimizer, self.mesh, on_host=settings.offload == "optimizer")
        self._steps_taken = 0
        self._skipped_in_a_row = 0

    @property
    def steps_taken(self) -> int:
        """Optimizer steps so far, skipped ones left out; the same on all ranks."""
        return self._steps_taken

    def update(self, batch: Batch | None, loss: TokenLoss) -> Metrics:
        """One optimizer step over the rows that are OK, of all ranks: the gradient of sum(loss) / denominator.

        batch:   this rank's rows, None or none where it has none: `tokens`, `loss_mask`, `state`, and the loss's own columns.
                 Every rank calls, as often as the others.
        returns: the loss's metrics, and `train/`: grad_norm (before clipping), lr, rows and tokens (those that went through
                 the model), shared_tokens (of these computed with another row's, with `share_prompts`), micro_batches, skipped_steps
                 and nonfinite_steps (0 or 1 here; they sum). What is the same on all ranks comes from rank 0, the rest from each
                 about its rows: merged over ranks, they are those of one process (but for micro_batches and shared_tokens, of which
                 other splits make other numbers).

        A step is skipped, and counted, when no token counts, or when loss or gradient is not finite; it moves neither
        weights nor optimizer nor schedule, and reports no loss. Only the second kind can stop the run (`NonFiniteError`):
        where every group is constant there is nothing to learn, and nothing wrong.

        An error ends the waits of the other ranks, and this engine takes no further step with them.
        """
        with self.ranks.leaving_on_error():
            totals, metrics = self.layers.attempt(
                lambda: self.accumulate(batch, loss), self.optimizer.discard_gradients, alone=self.ranks.size == 1
            )
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
        denominator = self.mesh.data.total(compute_denominator(counts, loss.normalization))
        totals = LossTotals(denominator, self.mesh)
        plan = build_micro_batches(
            self.model,
            rows,
            rows.loss_mask,
            counts > 0,
            self.settings.micro_batch_tokens,
            find_ranks_in_step(self.mesh),
            share=self._shares_prompts,
        )
        with self.layers:
            for index, micro_batch in enumerate(plan):
                set_last_backward(self.model, index == len(plan) - 1)
                self._pass(rows, micro_batch, loss, totals)
        if denominator:
            self.optimizer.sum_gradients(self._partial)
        return totals, self._count(rows, plan)

    def log_prob(
        self, batch: Batch | None, temperature: float, shaping: Shaping = UNSHAPED, *, only_masked: bool = True
    ) -> list[NDArray[np.float32]]:
        """`compute_batch_logprobs` of this model with the micro-batches of `update`.

        Where the layout shares the model, all ranks call, those of one `data` index with the same rows; None without rows.
        """
        with self.ranks.leaving_on_error(), self.layers:
            found = compute_batch_logprobs(
                self.model,
                batch,
                temperature=temperature,
                micro_batch_tokens=self.settings.micro_batch_tokens,
                only_masked=only_masked,
                mesh=self.mesh,
                share_prompts=self._shares_prompts and only_masked,
                shaping=shaping,
            )
            free_gathered(self.model)
            return found

    def check_weights(self) -> None:
        """Raises NonFiniteError if a weight is not finite, so that no such state replaces a good one."""
        for name, weight in self.optimizer.weights.items():
            if not torch.isfinite(weight.master).all():
                raise NonFiniteError(
                    f"weight '{name}' is not finite after {self._steps_taken} steps, and is not saved; "
                    "go on from the last checkpoint with a lower optimizer.lr"
                )

    def state_tensors(self) -> dict[str, Tensor]:
        """All tensors of the training state, this rank's part of each, by name.

        `model/<weight>` are the trained weights' masters, in float32 (float64), from which live ones are rounded; `optimizer/...` see
        `AdamW`; `rng/cpu` and `rng/cuda` the generators' states, uint8: training draws nothing, whatever else runs in the process may.
        They are the live tensors, not copies: write them out before the next update.
        """
        tensors = {f"model/{name}": weight.master for name, weight in self.optimizer.weights.items()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in self.optimizer.state_tensors().items()}
        tensors["rng/cpu"] = torch.get_rng_state()
        if self.model.device.type == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state(self.model.device)
        return tensors

    def state_layout(self) -> dict[str, Box]:
        """Where each of `state_tensors` lies in the whole tensor."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state_tensors().items()}
        layout = {name: Box(shape, (0,) * len(shape), shape) for name, shape in shapes.items()}
        for name, weight in self.optimizer.weights.items():
            cuts = compute_cuts(weight.splits, self.mesh.layout, self.mesh.world.rank)
            box = compute_box(weight.live.shape, cuts)
            layout |= {f"{kind}/{name}": box for kind in _PER_WEIGHT}
        return layout

    def owned_state(self) -> frozenset[str]:
        """Those of `state_tensors` that this rank writes: over all ranks every value of every tensor once. Empty parts are nobody's."""
        whole = frozenset(self.state_tensors()) if self.mesh.world.rank == 0 else frozenset()
        per_weight = {name: [f"{kind}/{name}" for kind in _PER_WEIGHT] for name in self.optimizer.weights}
        owned = {
            key
            for name, weight in self.optimizer.weights.items()
            if weight.exp_avg.numel() and owns_box(weight.splits, self.mesh.layout, self.mesh.world.rank)
            for key in per_weight[name]
        }
        return (whole - {key for keys in per_weight.values() for key in keys}) | owned

    @torch.no_grad()
    def iter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The whole weights of the plain model, one at a time, in the model's dtype, an adapter merged in, a tied weight once.

        All ranks iterate, to the end. A weight that is whole here may be the live one: copy what is to stay as it is.
        """
        free_gathered(self.model)
        yield from iter_merged_weights(self.model, self._read_whole)

    @torch.no_grad()
    def iter_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's whole tensors by their plain names, in the model's dtype; otherwise as `iter_weights`."""
        free_gathered(self.model)
        for name, parameter in adapter_weights(self.model).items():
            yield name, self._read_whole(parameter).to(self.model.dtype)

    def state_json(self) -> dict[str, Any]:
        """The rest of the state: `{"steps_taken": 20, "skipped_in_a_row": 0}`. The schedule is a function of the first.

        With an adapter, `adapter` too: its scale, and a checksum of its base.
        """
        counts = {"steps_taken": self._steps_taken, "skipped_in_a_row": self._skipped_in_a_row}
        return counts if self._adapter is None else counts | {"adapter": list(self._adapter)}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Takes up what `state_tensors` and `state_json` gave, so that what follows is bit-equal. Addresses stay.

        tensors: this rank's parts; those of another layout first cut to the boxes of `state_layout`.

        Everything is checked before anything is changed; ValueError names the tensor that is missing, odd or of another form.
        """
        ours = self.state_tensors()
        _check_state(ours, tensors)
        if self._adapter is not None:
            _check_adapter(self._adapter, state.get("adapter"), self.model.module.name_or_path)
        for name, tensor in ours.items():
            tensor.copy_(tensors[name])
        self.optimizer.round_masters()
        self.optimizer.load_steps(tensors["optimizer/steps"])
        torch.set_rng_state(ours["rng/cpu"])
        if "rng/cuda" in ours:
            torch.cuda.set_rng_state(ours["rng/cuda"], self.model.device)
        self._steps_taken = int(state["steps_taken"])
        self._skipped_in_a_row = int(state["skipped_in_a_row"])
        self.optimizer.discard_gradients()
        free_gathered(self.model)

    def _pass(self, rows: Rows, micro_batch: GroupsOfPass, loss: TokenLoss, totals: LossTotals) -> None:
        """Forward and backward of one micro-batch."""
        packed = pack_rows(rows, micro_batch.groups, rows.loss_mask, self.model.device, self.mesh.sequence)
        with self.layers.phase("forward", micro_batch.num_tokens):
            loss_sum = self._compute_loss(rows, packed, loss)
            scaled = self._compute_nothing(packed) if loss_sum is None else loss_sum.total / totals.denominator
        with self.layers.phase("backward", micro_batch.num_tokens):
            scaled.backward()
        if loss_sum is not None:
            totals.add(loss_sum)

    def _compute_nothing(self, packed: PackedRows) -> Tensor:
        """0 with a gradient of zeros, where others wait for this rank's part of weights, keys, values and gradients."""
        logprobs_M, _ = compute_packed_logprobs(
            self.model,
            packed,
            temperature=1.0,
            with_entropy=False,
            keep_logits_bytes=self.layers.keep_logits_bytes,
        )
        return logprobs_M.sum()

    def _count(self, rows: Rows, plan: tuple[GroupsOfPass, ...]) -> Metrics:
        """What went through the model, told once for the ranks that share the rows."""
        if self.mesh.at.sequence or self.mesh.at.tensor:
            return {}
        chosen = [row for micro_batch in plan for group in micro_batch.groups for row in group.rows]
        num_tokens = int(rows.lengths[chosen].sum())
        shared = num_tokens - sum(micro_batch.num_tokens for micro_batch in plan)
        return {
            "train/rows": total(len(chosen)),
            "train/tokens": total(num_tokens),
            "train/micro_batches": total(sum(1 for micro_batch in plan if micro_batch.groups)),
        } | ({"train/shared_tokens": total(shared)} if self._shares_prompts else {})

    def _read_whole(self, parameter: Parameter) -> Tensor:
        """The whole tensor that a live parameter stands for: an adapter's master, of others the live value in the model's dtype."""
        part = local_part(parameter)
        if has_adapter(self.model) and parameter.requires_grad:
            part = next(weight.master for weight in self.optimizer.weights.values() if weight.live is parameter)
        elif part.is_floating_point():
            part = part.to(self.model.dtype)
        return gather_whole(part.to(self.model.device), parameter.shape, read_splits(parameter), self.mesh)

    def _take_step(self, totals: LossTotals) -> Metrics:
        """Steps by the gradients that `accumulate` has left, or skips; the metrics of that."""
        lr = compute_learning_rate(self._steps_taken, self.settings.optimizer.lr, self.settings.schedule)
        if not totals.denominator:
            return self._report_step(lr, skipped=1)
        grad_norm = self.optimizer.compute_grad_norm()
        mean_loss, grad_norm_value = totals.read({"the gradient norm": grad_norm}, self.optimizer.compute_checksums())
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm_value)):
            self._skip_nonfinite(mean_loss, grad_norm_value)
            return self._report_step(lr, skipped=1, nonfinite=1)
        with self.layers.phase("optimizer"):
            self.optimizer.step(lr, grad_norm)
        self._steps_taken += 1
        self._skipped_in_a_row = 0
        return totals.metrics() | self._report_step(lr, {"train/grad_norm": mean(grad_norm_value)})

    def _report_step(self, lr: float, more: Metrics | None = None, *, skipped: int = 0, nonfinite: int = 0) -> Metrics:
        """What is the same on all ranks, from the first of them alone."""
        if self.ranks.rank:
            return {}
        counts = {"train/skipped_steps": total(skipped), "train/nonfinite_steps": total(nonfinite)}
        return {"train/lr": last(lr)} | counts | (more or {})

    def _compute_loss(self, rows: Rows, packed: PackedRows, loss: TokenLoss) -> LossSum | None:
        """None where no token counts here: no loss is asked about nothing, since it might divide by it."""
        device = self.model.device
        if not packed.places_T.size:
            return None
        mask_T, weights_T = compute_packed_weights(rows, packed, loss.normalization)
        if not mask_T.any():
            return None
        logprobs_M, entropy_M = compute_packed_logprobs(
            self.model,
            packed,
            temperature=loss.temperature,
            with_entropy=loss.needs_entropy,
            keep_logits_bytes=self.layers.keep_logits_bytes,
            shaped=build_shaped(rows, packed, loss.shaping, device),
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
                f"{self._skipped_in_a_row} steps in a row had a loss or gradient that is not finite (train.max_skipped_steps is "
                f"{self.settings.max_skipped_steps}; the last had loss {mean_loss:.6g} and gradient norm {grad_norm:.6g}, after "
                f"{self._steps_taken} steps taken); lower train.optimizer.lr, or look at the rows of this step"
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
    return values_M.new_zeros(packed.places_T.size).index_copy(0, packed.token_index_M, values_M)


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


def _check_adapter(ours: tuple[float, str], saved: Sequence[Any] | None, path: str) -> None:
    """The same adapter under another scale, or beside another base, is another policy."""
    if saved is None:
        raise StateError(
            "the checkpoint is of an older version of hybridflow, which did not note what its adapter was trained on; go on with that "
            "version, or export the adapter and start a new run with train.lora.path"
        )
    scale, base = saved
    if ours[0] != scale:
        raise StateError(
            f"the saved adapter was trained at a scale of {scale:g}, and train.lora makes it {ours[0]:g} (alpha / rank); resume with the "
            "train.lora.alpha and rslora of the run's config.yaml"
        )
    dtype, there = ours[1].split(":")[0], str(base).split(":")[0]
    if dtype == there and ours[1] != base:
        where = f"'{path}' holds" if path else "this model has"
        raise StateError(
            f"the adapter was trained on other base weights than {where}; resume with the model.path of the run's config.yaml"
        )
