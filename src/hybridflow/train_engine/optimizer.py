"""AdamW over float32 masters. Live weights change in place and never move, because the rollout reads the same storage."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from hybridflow.config import Field, settings
from hybridflow.train_engine.gradients import sum_gradients
from hybridflow.train_engine.ranks import Ranks

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


class AdamW:
    """AdamW (arXiv:1711.05101) with the storage of one device.

    parameters: live weights by name, bfloat16, float32 or float64; those without `requires_grad` are left out.

    A float32 or float64 weight is its own master. A bfloat16 weight gets a float32 master and a float32 gradient: as soon as
    autograd has a weight's gradient of one micro-batch, a hook adds it to the master's and frees it, so nothing is ever
    summed over micro-batches in bfloat16. (A tied weight's two uses inside one micro-batch are summed by autograd, in the
    live type.) `step` writes the rounded masters into the live weights in place.

    Surprises: a weight that no gradient reached takes no step, weight decay included. A bfloat16 weight has one optimizer at a
    time; the hooks go when the optimizer does.
    """

    def __init__(self, parameters: Mapping[str, Parameter], settings: OptimizerSettings) -> None:
        self._settings = settings
        self._live = {name: live for name, live in parameters.items() if live.requires_grad}
        if not self._live:
            raise ValueError(
                "the model has no weight to train: every one has requires_grad=False; leave some trainable"
            )
        self._masters = {name: _build_master(name, live) for name, live in self._live.items()}
        self._rounded = [
            (live, self._masters[name]) for name, live in self._live.items() if live.dtype == torch.bfloat16
        ]
        for live, master in self._rounded:
            hook = live.register_post_accumulate_grad_hook(_GradientAccumulator(master))
            weakref.finalize(self, hook.remove)
        matrices = [master for master in self._masters.values() if master.dim() >= 2]
        vectors = [master for master in self._masters.values() if master.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        for master in self._masters.values():
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def gradients(self) -> dict[str, Tensor]:
        """What the backward passes have summed up so far, by name, in the master's type; not copies."""
        return {name: master.grad for name, master in self._masters.items() if master.grad is not None}

    def sum_gradients(self, ranks: Ranks) -> None:
        """Makes the gradients those of all ranks together; see `hybridflow.train_engine.gradients.sum_gradients`."""
        sum_gradients(list(self._masters.values()), ranks)

    def discard_gradients(self) -> None:
        """Forgets the gradients and frees them."""
        self._adamw.zero_grad(set_to_none=True)

    def compute_grad_norm(self) -> Tensor:
        """Global L2 norm of the gradients, before clipping: a scalar on the device, so that the caller picks when to wait for it."""
        return torch.nn.utils.get_total_norm(list(self.gradients().values()))

    def compute_checksum(self) -> Tensor:
        """Sum of the masters' bits, a whole number that float64 carries: another one where a weight differs, but for chance.

        Integers add up to the same in any order and on any device. Within a tensor they wrap at 32 bits, which is as fast as memory.
        """
        bits = (master.detach().reshape(-1).view(torch.int32) for master in self._masters.values())
        return torch.stack([words.sum(dtype=torch.int32) for words in bits]).sum()

    @torch.no_grad()
    def step(self, lr: float, grad_norm: Tensor) -> None:
        """Clips by `grad_norm` (from `compute_grad_norm`), takes one step at `lr`, updates the live weights, frees the gradients."""
        if self._settings.max_grad_norm > 0.0:
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._settings.max_grad_norm, grad_norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        for live, master in self._rounded:
            live.copy_(master)
        self.discard_gradients()

    def state_tensors(self) -> dict[str, Tensor]:
        """`master/<name>` (where it is not the weight itself), `exp_avg/<name>`, `exp_avg_sq/<name>`, and `steps`: float32 [weights].

        The named ones are the tensors themselves, not copies: write them out before the next step.
        """
        tensors = {
            f"master/{name}": self._masters[name] for name, live in self._live.items() if live.dtype == torch.bfloat16
        }
        for name, master in self._masters.items():
            tensors[f"exp_avg/{name}"] = self._adamw.state[master]["exp_avg"]
            tensors[f"exp_avg_sq/{name}"] = self._adamw.state[master]["exp_avg_sq"]
        tensors["steps"] = torch.stack([self._adamw.state[master]["step"] for master in self._masters.values()])
        return tensors

    @torch.no_grad()
    def load_steps(self, steps: Tensor) -> None:
        """Sets the step counts, float32 [weights], in the order of the names; `state_tensors` gives all else to copy into."""
        for master, step in zip(self._masters.values(), steps, strict=True):
            self._adamw.state[master]["step"].copy_(step)


class _GradientAccumulator:
    """Moves a live weight's gradient into its master's float32 sum."""

    def __init__(self, master: Tensor) -> None:
        self._master = master

    def __call__(self, live: Tensor) -> None:
        if live.grad is None:
            raise RuntimeError(
                "two optimizers hold the same bfloat16 weight; let go of the first before the second is built"
            )
        if self._master.grad is None:
            self._master.grad = live.grad.to(self._master.dtype)
        else:
            self._master.grad.add_(live.grad)
        live.grad = None


def _build_master(name: str, live: Parameter) -> Tensor:
    if live.dtype not in _MASTER_DTYPES:
        raise ValueError(
            f"weight '{name}' is {live.dtype}, which cannot be trained here; load the model in bfloat16 or float32"
        )
    return live if live.dtype == _MASTER_DTYPES[live.dtype] else live.detach().to(_MASTER_DTYPES[live.dtype])
