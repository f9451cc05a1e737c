"""Weights on their way from trainers to rollout: layouts, the plan between two of them, transports that execute it, and the probe after."""

from hybridflow.weights.collective import CollectiveTransport, Gang
from hybridflow.weights.layout import (
    Cut,
    Held,
    LayoutError,
    Placement,
    WeightLayout,
    build_layout,
    compute_placement,
    plan_rollout,
    plan_trainers,
    read_layout,
    read_tensor_dims,
)
from hybridflow.weights.packing import MergedPart, Source
from hybridflow.weights.plan import WeightPlan
from hybridflow.weights.target import TargetWeights, TornWeightsError, VersionError
from hybridflow.weights.transports import BUCKET_BYTES, SameStorage, Switch, SwitchTimer, WeightTransport

__all__ = [
    "BUCKET_BYTES",
    "CollectiveTransport",
    "Cut",
    "Gang",
    "Held",
    "LayoutError",
    "MergedPart",
    "Placement",
    "SameStorage",
    "Source",
    "Switch",
    "SwitchTimer",
    "TargetWeights",
    "TornWeightsError",
    "VersionError",
    "WeightLayout",
    "WeightPlan",
    "WeightTransport",
    "build_layout",
    "compute_placement",
    "plan_rollout",
    "plan_trainers",
    "read_layout",
    "read_tensor_dims",
]
