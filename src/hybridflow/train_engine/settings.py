"""Everything that can be set about training."""

from __future__ import annotations

from typing import Literal

from hybridflow.config import ConfigError, Field, settings
from hybridflow.models import LoraSettings
from hybridflow.train_engine.layers import CheckpointingSetting, CompileSetting
from hybridflow.train_engine.mesh import ParallelConfig
from hybridflow.train_engine.optimizer import OptimizerSettings
from hybridflow.train_engine.schedule import ScheduleSettings

SharingSetting = bool | Literal["auto"]


@settings
class TrainSettings:
    """How a model is trained, e.g. `TrainSettings(micro_batch_tokens=8192, optimizer=OptimizerSettings(lr=1e-6))`."""

    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens that go through the model together; more is faster and takes more memory. A longer row goes alone. Changes no
    gradient beyond rounding."""
    share_prompts: SharingSetting = "auto"
    """Computes the tokens that rows begin with, as the samples of a prompt do, once for all of them, forward and backward, where that
    saves an eighth of a group's tokens or more; same gradients but for rounding. `auto` does unless numerics are exact, which computes
    each row apart, or the attention kernel takes whole rows only (cuDNN's)."""
    parallel_config: ParallelConfig = Field(default_factory=ParallelConfig)
    """How trainers share the model: data, tensor and sequence parallel, and over how many its storage is split."""
    lora: LoraSettings | None = None
    """Trains a low-rank adapter and leaves the model's own weights as they are; null trains all weights."""
    gradient_checkpointing: CheckpointingSetting = "auto"
    """What of each layer is computed again in backward instead of kept, for long rows in less memory; same gradients. `none` nothing,
    `selective` all but matrix products and attention, `full` everything but the layer's input, about a third slower. `auto` takes the
    first of these that the memory will hold."""
    activation_offload: bool = False
    """Keeps what backward needs of each layer in the host's memory meanwhile; slower, same gradients."""
    compile: CompileSetting = "auto"
    """Compiles the layers by torch.compile: minutes at the start, faster steps. `auto` does on GPUs, where an attention
    kernel serves packed rows."""
    liger: bool = False
    """Replaces norms and gated MLPs by Liger's kernels, where liger-kernel is installed."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What is kept in the host's memory: `optimizer` moments and the float32 masters of bfloat16 weights, which visit the device in each
    step; `parameters` the sharded weights too, which are then stepped by the CPU (needs parallel_config.shard above 1)."""
    reshard_after_forward: bool = True
    """Where weights are split over trainers: frees a layer's gathered weights after its forward pass and gathers them again in
    backward. false keeps them between: faster, with memory for all gathered weights."""
    max_skipped_steps: int = Field(default=5, ge=0)
    """Steps in a row that may be skipped because their loss or gradient is not finite; one more stops the run."""
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    """AdamW and clipping."""
    schedule: ScheduleSettings = Field(default_factory=ScheduleSettings)
    """Learning rate over optimizer steps."""

    def __post_init__(self) -> None:
        if self.offload == "parameters" and self.parallel_config.shard == 1:
            raise ValueError(
                "offload is 'parameters', but parallel_config.shard is 1, which keeps weights whole; set shard to 0, or offload to "
                "'optimizer'"
            )


def check_sharing(share_prompts: SharingSetting, *, exact: bool) -> None:
    """Raises ConfigError where rows are told to share what they begin with, and may not."""
    if exact and share_prompts is True:
        raise ConfigError(
            "train.share_prompts is true, but numerics 'exact' computes each row by itself; write auto, or numerics=fast"
        )


def resolve_sharing(share_prompts: SharingSetting, *, exact: bool, served: bool) -> bool:
    """Whether rows share what they begin with. Raises ConfigError where `check_sharing` does.

    served: whether the attention of rows that share is as fast as that of others, without which `auto` does not.
    """
    check_sharing(share_prompts, exact=exact)
    return served and not exact if share_prompts == "auto" else share_prompts
