"""What this machine can train and generate with: the devices, the versions, and each backend with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hybridflow.config import settings
from hybridflow.train_engine import Backend, describe_devices, find_versions, get_available_backends


@settings
class DoctorConfig:
    """`hybridflow doctor`, which has nothing to set."""


@dataclass(frozen=True)
class Diagnosis:
    """What a machine has.

    devices:  a line each.
    versions: by package.
    backends: by name.
    """

    devices: tuple[str, ...]
    versions: Mapping[str, str]
    backends: Mapping[str, Backend]


def examine(config: DoctorConfig) -> Diagnosis:
    """Looks at this machine; starts nothing."""
    return Diagnosis(tuple(describe_devices()), find_versions(), get_available_backends())


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """As text: devices, versions, and a line for each backend, `vllm            no   vllm is not installed; pip install vllm, or ...`."""
    width = max(map(len, (*diagnosis.backends, *diagnosis.versions)))
    lines = [*diagnosis.devices, ""]
    lines += [f"{name:<{width}}  {version}" for name, version in diagnosis.versions.items()]
    lines.append("")
    for name, backend in diagnosis.backends.items():
        told = "; ".join(filter(None, (backend.reason, backend.remedy)))
        lines.append(f"{name:<{width}}  {'yes' if backend else 'no':<3}  {told}")
    return "".join(f"{line}\n" for line in lines)


def to_record(diagnosis: Diagnosis) -> dict[str, object]:
    """The same for machines.

    `{"devices": [...], "versions": {...}, "backends": {"liger": {"available": false, "reason": "...", "version": null, "remedy": "..."}}}`.
    """
    backends = {name: asdict(backend) for name, backend in diagnosis.backends.items()}
    return {"devices": list(diagnosis.devices), "versions": dict(diagnosis.versions), "backends": backends}
