"""Faults that training systems have really had, planted one by one in a gang of processes: the check of `test_layouts.py` reports each.

A plant replaces a function of the package by a faulty variant, in the worker processes alone. Without one, nothing is reported.
Kinds of fault, for more than one process: the plant here, and in brackets what holds the same without a plant:

1.  mean of means over micro-batches: `mean_of_means` (every split of test_layouts).
2.  loss scaled by the data-parallel size: `data_parallel_scale`, `averaged_gradients` (data 2 and 4, shard 2 and 4).
3.  denominator of another mask, dummy rows, nothing left to count: `rows_in_denominator`, `repeated_micro_batches`,
    `asked_about_nothing` (0/0)
    (splits `idle` and `masked`, a mini-batch without a token).
4.  several devices without gradient sync: `no_sync` (data 2; test_data_parallel: replicas that drift are named).
5.  labels at shard borders, loss scale, kv heads fewer than the degree: `rolled_labels`, `tiled_kv_heads` (sequence 2 and 4).
9.  dropout in a pass, schedule at the wrong grain: `dropout`, `schedule_by_micro_batch` (`train/lr` of every step).
10. tied embedding trained twice: `untied` (model `tied` in every layout).
18. packed rows that see each other: `rows_in_one` (no row sees its neighbours).
19. attention that falls back to another path: `another_attention` (test_models_attention).
23. adapter merged with the wrong scale: `unscaled_merge` (an adapter trains as by hand).
29. checkpoint bound to the number of ranks: `first_boxes` (a state goes on in any layout).
And the fused head: `own_vocabulary` with tensor parallel, `shifted_hidden_states` with sequence parallel.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import (
    TRAIN_LOSSES,
    Case,
    Expected,
    Found,
    Key,
    accumulate,
    adapter_reference_worker,
    adapter_worker,
    assemble,
    build_rows,
    find_own_rows,
    list_gaps,
    list_gradient_gaps,
    list_metric_gaps,
    perturb_worker,
    reference_worker,
    resume_worker,
    save_worker,
    start_engine,
    start_ranks,
    take_rows,
)
from processes import Place
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from hybridflow.algorithms import losses
from hybridflow.algorithms.losses import LossSum, SFTLoss
from hybridflow.config import HybridflowError
from hybridflow.models import LanguageModel, Packed, compute_merged
from hybridflow.train_engine import TrainEngine, micro_batches, packing, ranks, schedule, sequence_parallel
from hybridflow.train_engine.segments import RowGroup, Segments, build_segments
from hybridflow.types import Metrics

SFT = Case("tied", "sft, tokens", "idle", micro_batch_tokens=30)
POLICY = Case("tied", "policy, tokens", "uneven")
DROPOUT = Case("dropout", "policy, tokens", "uneven")
COUNTED = sum(sum(mask[1:]) for row, mask in enumerate(build_rows(0).pylist("loss_mask")) if row != 9)
"""Tokens of the first mini-batch that count; row 9 is rejected."""
MICRO_BATCHES = 3
"""Of `SFT`, all on one data rank."""
SETTINGS: dict[str, tuple[int, dict[str, int], Case]] = {
    "alone": (1, {}, SFT),
    "data 2": (2, {}, SFT),
    "shard 2": (2, {"shard": 2}, SFT),
    "shard 2, uneven": (2, {"shard": 2}, dataclasses.replace(SFT, split="uneven")),
    "tensor 2": (2, {"tp": 2}, POLICY),
    "sequence 2": (2, {"sp": 2}, POLICY),
    "sequence 2, row by row": (2, {"sp": 2}, dataclasses.replace(SFT, micro_batch_tokens=1)),
    "sequence 4": (4, {"sp": 4}, POLICY),
    "dropout, sequence 2": (2, {"sp": 2}, DROPOUT),
}


# --- the faulty variants --------------------------------------------------------------------------------------------


def replace_everywhere(right: Any, faulty: Any) -> None:
    """In each module of the package that knows the function by a name of its own."""
    found = 0
    for module in [module for name, module in sys.modules.items() if name.startswith("hybridflow")]:
        for name in [name for name, value in vars(module).items() if value is right]:
            setattr(module, name, faulty)
            found += 1
    assert found, f"nothing in the package is {right}"


def change_loss(change: Callable[[LossSum], Tensor]) -> None:
    """SFT's total by another formula."""
    right = SFTLoss.__call__

    def faulty(self: SFTLoss, *args: Any) -> LossSum:
        found = right(self, *args)
        return dataclasses.replace(found, total=change(found))

    SFTLoss.__call__ = faulty  # type: ignore[method-assign]


def plant_mean_of_means(place: Place) -> None:
    change_loss(lambda found: found.total / found.weight * COUNTED / MICRO_BATCHES)


def plant_data_parallel_scale(place: Place) -> None:
    change_loss(lambda found: found.total * place.size)


def plant_averaged_gradients(place: Place) -> None:
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]
    FSDPModule.set_force_sum_reduction_for_comms = lambda self, enabled: None  # type: ignore[method-assign]


def plant_rows_in_denominator(place: Place) -> None:
    right = losses.compute_denominator
    replace_everywhere(right, lambda counts, normalization: right(counts, normalization) + len(counts))


def plant_repeated_micro_batches(place: Place) -> None:
    """Where rows run out, the last micro-batch goes through the model again."""
    right = micro_batches.pad_plan
    replace_everywhere(right, lambda plan, count: plan + plan[-1:] * (count - len(plan)))


def plant_zero_by_zero(place: Place) -> None:
    """If the loss were asked where a rank's part of the tokens holds none that counts."""
    change_loss(lambda found: found.total / found.weight * found.weight)


def plant_asked_about_nothing(place: Place) -> None:
    """The same loss, asked there: a mask that lets a micro-batch pass whose weights are all 0."""
    plant_zero_by_zero(place)
    right = packing.compute_packed_weights

    def faulty(*args: Any) -> tuple[Tensor, Tensor]:
        mask_T, weights_T = right(*args)
        return (mask_T if mask_T.any() else torch.ones_like(mask_T)), weights_T

    replace_everywhere(right, faulty)


def plant_no_sync(place: Place) -> None:
    from hybridflow.train_engine import gradients

    replace_everywhere(gradients.sum_gradients, lambda *args, **named: None)


def plant_rolled_labels(place: Place) -> None:
    right = packing.pack_rows

    def faulty(*args: Any, **named: Any) -> Any:
        packed = right(*args, **named)
        return dataclasses.replace(packed, targets_M=packed.tokens_T.roll(-1)[packed.hidden_index_M])

    replace_everywhere(right, faulty)


def plant_tiled_kv_heads(place: Place) -> None:
    right = sequence_parallel._repeat_heads
    replace_everywhere(right, lambda rows_TNK, copies: rows_TNK.repeat(1, copies, 1))


def plant_shifted_hidden_states(place: Place) -> None:
    right = packing.pack_rows

    def faulty(*args: Any, **named: Any) -> Any:
        packed = right(*args, **named)
        size = packed.tokens_T.numel()
        return dataclasses.replace(packed, hidden_index_M=(packed.hidden_index_M + place.rank) % size)

    replace_everywhere(right, faulty)


def plant_unscaled_merge(place: Place) -> None:
    right = compute_merged
    replace_everywhere(right, lambda base, lora_A, lora_B, scale, **named: right(base, lora_A, lora_B, 1.0, **named))


def plant_rows_in_one(place: Place) -> None:
    right = packing._build_attention

    def faulty(segments: Segments, *args: Any) -> Packed:
        one = RowGroup((0,))
        return right(build_segments([one], segments.lengths.sum(keepdims=True)), *args)

    replace_everywhere(right, faulty)


def plant_dropout(place: Place) -> None:
    PreTrainedModel.eval = lambda self: self.train()  # type: ignore[method-assign]


def plant_schedule_by_micro_batch(place: Place) -> None:
    right = schedule.compute_learning_rate
    replace_everywhere(right, lambda steps, *args: right(2 * steps, *args))


def plant_another_attention(place: Place) -> None:
    right = TrainEngine.__init__

    def faulty(self: TrainEngine, model: LanguageModel, *args: Any) -> None:
        right(self, model, *args)
        model.config._attn_implementation = "sdpa"

    TrainEngine.__init__ = faulty  # type: ignore[method-assign]


def plant_untied(place: Place) -> None:
    """Embedding and head part ways where the model is cut up, as if each had been wrapped by itself."""
    right = TrainEngine.__init__

    def faulty(self: TrainEngine, model: LanguageModel, *args: Any) -> None:
        head = model.module.lm_head
        head.weight = Parameter(head.weight.detach().clone())
        right(self, model, *args)

    TrainEngine.__init__ = faulty  # type: ignore[method-assign]


def plant_own_vocabulary(place: Place) -> None:
    """Each rank takes its part of the head for the whole."""
    ranks.Ranks.max_ = lambda self, tensor: None  # type: ignore[method-assign]
    right = ranks.Ranks.sum_

    def faulty(self: ranks.Ranks, tensor: Tensor) -> None:
        if sys._getframe(1).f_globals["__name__"].startswith("hybridflow.models"):
            return
        right(self, tensor)

    ranks.Ranks.sum_ = faulty  # type: ignore[method-assign]


def plant_first_boxes(place: Place) -> None:
    right = TrainEngine.state_layout
    TrainEngine.state_layout = lambda self: {  # type: ignore[method-assign]
        name: dataclasses.replace(box, offsets=(0,) * len(box.offsets)) for name, box in right(self).items()
    }


def plant_nothing(place: Place) -> None:
    """The control."""


# --- the check ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """One rank's gradient of the first mini-batch, what two updates reported, and the error that ended it."""

    gradient: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: list[Metrics] = dataclasses.field(default_factory=list)
    error: str = ""


def work(place: Place, plant: Callable[[Place], None], case: Case, parallel: Mapping[str, int]) -> Outcome:
    """Trains with a planted fault."""
    plant(place)
    found = Outcome()
    own = find_own_rows(place, parallel, case.split)
    trained = start_engine(place, case, parallel)
    # As whoever had the module before may have left it.
    trained.model.module.train()
    try:
        found.gradient = accumulate(trained, take_rows(build_rows(0), own), case)
        for step in range(2):
            found.metrics.append(trained.update(take_rows(build_rows(step), own), TRAIN_LOSSES[case.loss]))
    except (HybridflowError, RuntimeError, ValueError) as error:
        found.error = f"{type(error).__name__}: {error}"
    trained.ranks.leave()
    return found


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, Expected]:
    """What the cases give by hand."""
    keys = [case.reference for case in (SFT, POLICY, DROPOUT)]
    (found,) = start_ranks(1, reference_worker, keys, torch.float64, directory=tmp_path_factory.mktemp("reference"))
    return found


def report(setting: str, plant: Callable[[Place], None], references: dict[Key, Expected], directory: Path) -> list[str]:
    """What the invariance check says, and each error."""
    size, parallel, case = SETTINGS[setting]
    expected = references[case.reference]
    outcomes = start_ranks(size, work, plant, case, parallel, directory=directory)
    lines = [outcome.error for outcome in outcomes if outcome.error]
    if all(outcome.gradient for outcome in outcomes):
        lines += list_gradient_gaps([Found(outcome.gradient) for outcome in outcomes], expected, torch.float64)
    for step in range(min(len(outcome.metrics) for outcome in outcomes)):
        metrics = [outcome.metrics[step] for outcome in outcomes]
        lines += [f"step {step}: {line}" for line in list_metric_gaps(metrics, expected.metrics[step], 1e-9)]
    return lines


@pytest.mark.parametrize("setting", SETTINGS)
def test_without_a_fault_nothing_is_reported(setting: str, references: dict[Key, Expected], tmp_path: Path) -> None:
    assert report(setting, plant_nothing, references, tmp_path) == []


def test_the_mean_of_means_is_one_of_several(tmp_path: Path) -> None:
    (outcome,) = start_ranks(1, work, plant_nothing, SFT, {}, directory=tmp_path)
    assert outcome.metrics[0]["train/micro_batches"].value == MICRO_BATCHES
    assert outcome.metrics[0]["sft/loss"].weight == COUNTED


PLANTED: list[tuple[str, Callable[[Place], None], str]] = [
    ("alone", plant_mean_of_means, "gradient 'model.layers.0.self_attn.q_proj.weight' differs"),
    ("data 2", plant_mean_of_means, "gradient 'model.layers.0.self_attn.q_proj.weight' differs"),
    ("data 2", plant_data_parallel_scale, "gradient 'model.norm.weight' differs"),
    ("shard 2", plant_data_parallel_scale, "gradient 'model.norm.weight' differs"),
    ("shard 2", plant_averaged_gradients, "gradient 'model.norm.weight' differs"),
    ("data 2", plant_rows_in_denominator, "the loss's weights add up to"),
    ("shard 2", plant_rows_in_denominator, "gradient 'model.norm.weight' differs"),
    ("shard 2, uneven", plant_repeated_micro_batches, "the loss's weights add up to"),
    ("shard 2, uneven", plant_repeated_micro_batches, "gradient 'model.norm.weight' differs"),
    ("sequence 2, row by row", plant_asked_about_nothing, "metric 'train/nonfinite_steps' is 1 instead of 0"),
    ("data 2", plant_no_sync, "DriftError: ranks 0 and 1 are no replicas of each other: the gradient norm"),
    ("data 2", plant_no_sync, "gradient 'model.norm.weight' on rank 1 has other values than a rank before it"),
    ("sequence 2", plant_no_sync, "gradient 'model.norm.weight' on rank 1 has other values than a rank before it"),
    ("sequence 2", plant_rolled_labels, "metric 'policy/loss' is"),
    ("sequence 4", plant_rolled_labels, "gradient 'model.norm.weight' differs"),
    ("sequence 4", plant_tiled_kv_heads, "gradient 'model.layers.1.self_attn.k_proj.weight' differs"),
    ("sequence 2", plant_shifted_hidden_states, "metric 'policy/entropy' is"),
    ("tensor 2", plant_own_vocabulary, "gradient 'model.layers.0.mlp.up_proj.weight' differs"),
    ("data 2", plant_untied, "gradient 'lm_head.weight' is on one side alone"),
    ("shard 2", plant_untied, "gradient 'model.embed_tokens.weight' differs"),
    ("tensor 2", plant_untied, "gradient 'model.embed_tokens.weight' differs"),
    ("sequence 2", plant_rows_in_one, "gradient 'model.layers.0.self_attn.v_proj.weight' differs"),
    ("shard 2", plant_another_attention, "of 2 layers attended through hybridflow's function"),
    ("sequence 2", plant_another_attention, "of 2 layers attended through hybridflow's function"),
    ("dropout, sequence 2", plant_dropout, "attention dropout is 0.5"),
    ("data 2", plant_schedule_by_micro_batch, "step 1: metric 'train/lr' is"),
]


@pytest.mark.parametrize(
    ("setting", "plant", "line"), PLANTED, ids=[f"{plant.__name__}-{setting}" for setting, plant, _ in PLANTED]
)
def test_a_planted_fault_is_reported(
    setting: str, plant: Callable[[Place], None], line: str, references: dict[Key, Expected], tmp_path: Path
) -> None:
    lines = report(setting, plant, references, tmp_path)
    assert any(line in found for found in lines), "\n".join(lines)


def test_no_loss_is_asked_about_nothing(references: dict[Key, Expected], tmp_path: Path) -> None:
    assert report("sequence 2, row by row", plant_zero_by_zero, references, tmp_path) == []


def work_with(place: Place, plant: Callable[[Place], None], worker: Callable[..., Any], *args: Any) -> Any:
    """Another worker with a fault in it."""
    plant(place)
    return worker(place, *args)


@pytest.mark.parametrize("parallel", [{}, {"shard": 2}], ids=str)
def test_a_merge_without_the_scale_is_reported(parallel: dict[str, int], tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is an extra")
    found = start_ranks(2, work_with, plant_unscaled_merge, adapter_worker, parallel, directory=tmp_path)
    start = assemble([rank.start for rank in found])
    (expected,) = start_ranks(1, adapter_reference_worker, start, directory=tmp_path)
    assert not list_gaps(assemble([rank.weights for rank in found]), expected.weights, 1e-9, "weight")
    lines = list_gaps(found[1].merged, expected.merged, 1e-9, "merged weight")
    assert any("'model.layers.1.mlp.up_proj.weight' differs" in line for line in lines)


def test_boxes_of_the_first_rank_are_reported(references: dict[Key, Expected], tmp_path: Path) -> None:
    parallel, expected = {"shard": 2}, references[POLICY.reference].metrics[-1]
    saved = start_ranks(2, save_worker, POLICY, parallel, directory=tmp_path)
    args = (POLICY, parallel, assemble([rank.boxes for rank in saved]), saved[0].steps)
    right = start_ranks(2, resume_worker, *args, directory=tmp_path)
    assert not list_metric_gaps([rank.metrics[0] for rank in right], expected, 1e-9)
    faulty = start_ranks(2, work_with, plant_first_boxes, resume_worker, *args, directory=tmp_path)
    lines = list_metric_gaps([rank.metrics[0] for rank in faulty], expected, 1e-9)
    assert any("metric 'policy/loss' is" in line for line in lines), "\n".join(lines)


@pytest.mark.parametrize("parallel", [{}, {"sp": 2}], ids=str)
def test_rows_that_see_each_other_are_reported(parallel: dict[str, int], tmp_path: Path) -> None:
    size = 2 if parallel else 1
    for before, after in start_ranks(size, work_with, plant_rows_in_one, perturb_worker, parallel, directory=tmp_path):
        assert max(float(np.abs(before[row] - after[row]).max()) for row in (5, 6, 7)) > 1e-3
