"""AdamW over float32 masters. Live weights change in place and never move, because the rollout reads the same storage."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from hybridflow.config import Field, settings
from hybridflow.train_engine.gradients import sum_gradients
from hybridflow.train_engine.mesh import Layout, Mesh, build_mesh
from hybridflow.train_engine.offload import HostMemory, HostState
from hybridflow.train_engine.ranks import ALONE, Ranks
from hybridflow.train_engine.sharding import Split, SplitAxis, local_part, read_splits

_MASTER_DTYPES = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}


@settings
class OptimizerSettings:
    """AdamW and clipping, e.g. `OptimizerSettings(lr=1e-6, max_grad_norm=1.0)`."""

    lr: float = Field(default=1e-6, ge=0.0)
    """Full learning rate, before the schedule; 0 leaves the weights bit-equal."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square, each at least 0 and below 1."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second mean."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay, times the learning rate at each step. Matrices only (embeddings and head among them): norms and
    biases, which have one dimension, are never decayed."""
    max_grad_norm: float = Field(default=1.0, ge=0.0)
    """The gradient of the whole mini-batch is scaled down to this global L2 norm; 0 does not clip."""

    def __post_init__(self) -> None:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(
                f"betas is {self.betas}, but each has to be at least 0 and below 1; the usual is (0.9, 0.999)"
            )


class TrainedWeight:
    """One weight as this rank trains it: its part where it is split over ranks, else all of it.

    live:         the module's parameter; a DTensor where it is split.
    splits:       how it is split.
    host:         where master and moments are kept; None: on the device of the live weight.
    exp_avg(_sq): running means of the gradient and of its square, like `master`.
    num_steps:    steps so far, float32, as torch's kernel takes it.
    """

    def __init__(self, name: str, live: Parameter, host: HostMemory | None) -> None:
        if live.dtype not in _MASTER_DTYPES:
            raise ValueError(
                f"weight '{name}' is {live.dtype}, which cannot be trained here; load the model in bfloat16 or float32"
            )
        self.live = live
        self.splits: tuple[Split, ...] = read_splits(live)
        self.is_rounded = live.dtype != _MASTER_DTYPES[live.dtype]
        self._master: Tensor | None = None
        self._gradient: Tensor | None = None
        part = local_part(live)
        if self.is_rounded:
            master = part.to(_MASTER_DTYPES[live.dtype])
            self._master = master if host is None else host.build_copy(master)
        like = torch.empty_like(part, dtype=_MASTER_DTYPES[live.dtype], device="meta")
        self.exp_avg, self.exp_avg_sq = (_build_zeros(like, part.device, host) for _ in range(2))
        self.num_steps = torch.zeros((), dtype=torch.float32, device=part.device)

    @property
    def master(self) -> Tensor:
        """What the optimizer steps, in float32 or float64: the live weight itself or what that is rounded from."""
        return local_part(self.live) if self._master is None else self._master

    @property
    def gradient(self) -> Tensor | None:
        """Sum of what the backward passes gave, like `master`; None where they gave nothing."""
        if self.is_rounded:
            return self._gradient
        grad = self.live.grad
        return None if grad is None else _matching_part(grad, self.live)

    def accumulate(self, live: Tensor) -> None:
        """Moves the live weight's gradient into the float32 sum; autograd calls it for a rounded weight."""
        if live.grad is None:
            raise RuntimeError(
                "two optimizers hold the same bfloat16 weight; let go of the first before the second is built"
            )
        part = _matching_part(live.grad, self.live)
        if self._gradient is None:
            self._gradient = part.to(_MASTER_DTYPES[live.dtype])
        else:
            self._gradient.add_(part)
        live.grad = None

    def fill_gradient(self) -> Tensor:
        """The gradient, zeros now where there was none."""
        if self.is_rounded and self._gradient is None:
            self._gradient = torch.zeros_like(local_part(self.live), dtype=_MASTER_DTYPES[self.live.dtype])
        elif not self.is_rounded and self.live.grad is None:
            self.live.grad = torch.zeros_like(self.live)
        gradient = self.gradient
        assert gradient is not None
        return gradient

    def discard_gradient(self) -> None:
        """Forgets and frees it."""
        self._gradient, self.live.grad = None, None

    def write_live(self, master: Tensor) -> None:
        """Rounds a master into the live weight."""
        if self.is_rounded:
            local_part(self.live).copy_(master, non_blocking=True)


class AdamW:
    """AdamW (arXiv:1711.05101) over the part of each weight that this rank holds.

    parameters: live weights by name, bfloat16, float32 or float64; those without `requires_grad` are left out.
    mesh:       the ranks that hold the other parts.
    on_host:    keeps moments, and the masters of bfloat16 weights, in the host's memory, and brings them to the device one weight after
                another in a step. Same numbers, slower steps.

    A float32 or float64 weight is its own master. A bfloat16 weight gets a float32 master and a float32 gradient: as soon as
    autograd has a weight's gradient of one micro-batch, a hook adds it to the master's and frees it, so nothing is ever
    summed over micro-batches in bfloat16. (A tied weight's two uses inside one micro-batch are summed by autograd, in the
    live type.) `step` writes the rounded masters into the live weights in place.

    Surprises: a weight that no gradient reached takes no step, weight decay included. A bfloat16 weight has one optimizer at a
    time; the hooks go when the optimizer does.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        settings: OptimizerSettings,
        mesh: Mesh | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        self._settings = settings
        self._mesh = mesh or build_mesh(ALONE, Layout(), torch.device("cpu"))
        self._host = HostState() if on_host else None
        trained = {name: live for name, live in parameters.items() if live.requires_grad}
        if not trained:
            raise ValueError(
                "the model has no weight to train: every one has requires_grad=False; leave some trainable"
            )
        memory = HostMemory() if on_host else None
        self.weights = {name: TrainedWeight(name, live, memory) for name, live in trained.items()}
        for weight in self.weights.values():
            if weight.is_rounded:
                hook = weight.live.register_post_accumulate_grad_hook(weight.accumulate)
                weakref.finalize(self, hook.remove)

    def gradients(self) -> dict[str, Tensor]:
        """What the backward passes have summed up so far, by name, this rank's part in the master's type; not copies."""
        return {name: gradient for name, weight in self.weights.items() if (gradient := weight.gradient) is not None}

    def sum_gradients(self, partial: Collection[str] = ()) -> None:
        """Makes the gradients those of all ranks together; see `hybridflow.train_engine.gradients.sum_gradients`.

        Those that FSDP2 splits are summed over `shard` and `replicate` already.
        partial: names of the weights of which each rank along `tensor` has found a part of the gradient.
        """
        whole = [w for w in self.weights.values() if all(split.axis != "shard" for split in w.splits)]
        self._sum_over(self._mesh.tokens, whole)
        # In the order of the weights: that of a set of names is another one in each process.
        self._sum_over(self._mesh.tensor, [weight for name, weight in self.weights.items() if name in partial])

    def discard_gradients(self) -> None:
        """Forgets the gradients and frees them."""
        for weight in self.weights.values():
            weight.discard_gradient()

    def compute_grad_norm(self) -> Tensor:
        """Global L2 norm of the gradients, before clipping: a scalar on the device, so that the caller picks when to wait for it.

        Collectives where weights are split: one for each axis that some are split over.
        """
        if all(not weight.splits for weight in self.weights.values()):
            return torch.nn.utils.get_total_norm(list(self.gradients().values()))
        ways = sorted({_split_axes(weight) for weight in self.weights.values()})
        squares = torch.stack(
            [self._square_norm([w for w in self.weights.values() if _split_axes(w) == axes]) for axes in ways]
        )
        for axis, ranks in (("shard", self._mesh.shard), ("tensor", self._mesh.tensor)):
            chosen = torch.tensor([axis in axes for axes in ways], device=squares.device)
            if ranks.size > 1 and any(axis in axes for axes in ways):
                summed = squares.clone()
                ranks.sum_(summed)
                squares = torch.where(chosen, summed, squares)
        return squares.sum().sqrt()

    def compute_checksums(self) -> dict[tuple[SplitAxis, ...], Tensor]:
        """Of the weights that are split over these axes: the same number on all ranks that are at one place along them.

        Sum of the masters' bits, a whole number that float64 carries: another one where a weight differs, but for chance. Integers add
        up to the same in any order and on any device. Within a tensor they wrap at 32 bits, which is as fast as memory.
        Empty where no other rank holds the same weights.
        """
        layout = self._mesh.layout
        ways = sorted({_split_axes(weight) for weight in self.weights.values()})
        copied = [axes for axes in ways if math.prod(map(layout.degree, axes)) < layout.size]
        return {axes: self._sum_bits([w for w in self.weights.values() if _split_axes(w) == axes]) for axes in copied}

    @torch.no_grad()
    def step(self, lr: float, grad_norm: Tensor) -> None:
        """Clips by `grad_norm` (from `compute_grad_norm`), takes one step at `lr`, updates the live weights, frees the gradients."""
        gradients = self.gradients()
        if self._settings.max_grad_norm > 0.0:
            _clip(list(gradients.values()), self._settings.max_grad_norm, grad_norm)
        stepping = [self.weights[name] for name in gradients]
        for weights, decay in (
            ([weight for weight in stepping if weight.live.dim() >= 2], self._settings.weight_decay),
            ([weight for weight in stepping if weight.live.dim() < 2], 0.0),
        ):
            if self._host is None:
                self._step(weights, [(w.master, w.exp_avg, w.exp_avg_sq) for w in weights], lr, decay)
            else:
                for weight in weights:
                    self._step_on_host(weight, self._host, lr, decay)
        if self._host is not None:
            self._host.wait()
        self.discard_gradients()

    def state_tensors(self) -> dict[str, Tensor]:
        """`exp_avg/<name>`, `exp_avg_sq/<name>`: this rank's parts; and `steps`: float32 [weights].

        The named ones are the tensors themselves, not copies: write them out before the next step.
        """
        tensors = {}
        for name, weight in self.weights.items():
            tensors[f"exp_avg/{name}"] = weight.exp_avg
            tensors[f"exp_avg_sq/{name}"] = weight.exp_avg_sq
        tensors["steps"] = torch.stack([weight.num_steps for weight in self.weights.values()])
        return tensors

    @torch.no_grad()
    def load_steps(self, steps: Tensor) -> None:
        """Sets the step counts, float32 [weights], in the order of the names; `state_tensors` gives all else to copy into."""
        for weight, step in zip(self.weights.values(), steps, strict=True):
            weight.num_steps.copy_(step)

    @torch.no_grad()
    def round_masters(self) -> None:
        """Writes the masters into the live weights."""
        for weight in self.weights.values():
            weight.write_live(weight.master)

    def _step(
        self, weights: Sequence[TrainedWeight], states: Sequence[tuple[Tensor, Tensor, Tensor]], lr: float, decay: float
    ) -> None:
        gradients = [weight.fill_gradient() for weight in weights]
        held = [index for index, gradient in enumerate(gradients) if gradient.numel()]
        empty = [weight for weight, gradient in zip(weights, gradients, strict=True) if not gradient.numel()]
        beta1, beta2 = self._settings.betas
        adamw(
            [states[index][0] for index in held],
            [gradients[index] for index in held],
            [states[index][1] for index in held],
            [states[index][2] for index in held],
            [],
            [weights[index].num_steps for index in held],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=decay,
            eps=self._settings.eps,
            maximize=False,
        )
        for weight in empty:
            weight.num_steps.add_(1)
        for weight, (master, *_) in zip(weights, states, strict=True):
            weight.write_live(master)

    def _step_on_host(self, weight: TrainedWeight, host: HostState, lr: float, decay: float) -> None:
        kept = [weight.exp_avg, weight.exp_avg_sq, *([weight.master] if weight.is_rounded else [])]
        with host.borrow(kept, local_part(weight.live).device) as (exp_avg, exp_avg_sq, *master):
            self._step([weight], [(master[0] if master else weight.master, exp_avg, exp_avg_sq)], lr, decay)

    def _sum_bits(self, weights: Iterable[TrainedWeight]) -> Tensor:
        # Masters in the host's memory would hold up the device.
        held = (w.master if self._host is None else local_part(w.live) for w in weights)
        bits = (tensor.reshape(-1).view(torch.int32 if tensor.element_size() > 2 else torch.int16) for tensor in held)
        return torch.stack([words.sum(dtype=torch.int32) for words in bits]).sum()

    def _sum_over(self, ranks: Ranks, weights: Sequence[TrainedWeight]) -> None:
        if ranks.size == 1 or not weights:
            return
        reached = torch.tensor([weight.gradient is not None for weight in weights], dtype=torch.int32)
        ranks.sum_(reached)
        sum_gradients([w.fill_gradient() for w, count in zip(weights, reached.tolist(), strict=True) if count], ranks)

    def _square_norm(self, weights: Iterable[TrainedWeight]) -> Tensor:
        norm = torch.nn.utils.get_total_norm([g for weight in weights if (g := weight.gradient) is not None])
        return norm.to(self._norm_device(), torch.float64).square()

    def _norm_device(self) -> torch.device:
        return next(iter(self.weights.values())).num_steps.device


def _build_zeros(like: Tensor, device: torch.device, host: HostMemory | None) -> Tensor:
    return torch.zeros_like(like, device=device) if host is None else host.build_empty(like).zero_()


def _matching_part(grad: Tensor, live: Tensor) -> Tensor:
    """This rank's part of a gradient, split as its weight is."""
    if isinstance(grad, DTensor) and isinstance(live, DTensor) and grad.placements != live.placements:
        grad = grad.redistribute(placements=live.placements)
    return local_part(grad)


def _split_axes(weight: TrainedWeight) -> tuple[SplitAxis, ...]:
    return tuple(sorted(split.axis for split in weight.splits))


def _clip(gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """As `torch.nn.utils.clip_grads_with_norm_`, on gradients that are not of parameters."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if gradients:
        torch._foreach_mul_(gradients, scale)
