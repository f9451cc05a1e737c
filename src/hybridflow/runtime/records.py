"""What a call is given, and what one worker makes of it, as the controller keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.runtime.dispatch import flatten_refs
from hybridflow.types import Ref


@dataclass(frozen=True)
class Arguments:
    """Arguments of a call with numbered slots where references were."""

    skeleton: Any
    refs: tuple[Ref[Any], ...]

    @classmethod
    def of(cls, args: Sequence[Any]) -> Arguments:
        """Takes the references out."""
        skeleton, refs = flatten_refs(tuple(args))
        return cls(skeleton, tuple(refs))


@dataclass(frozen=True)
class Result:
    """What one worker made: handles of its objects, their digests, and the node that keeps them; or of a change its value."""

    objects: tuple[Any, ...] = ()
    digests: tuple[Any, ...] = ()
    node_id: str = ""
    value: Any = None
