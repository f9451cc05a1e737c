"""One worker's end of the links between trainers and generators that live apart, and what it does when one breaks."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hybridflow.models import adapter_weights
from hybridflow.roles.weight_sync import TrainedWeights, build_replica_layout
from hybridflow.rollout import NativeEngine
from hybridflow.runtime.api import Seat
from hybridflow.train_engine import TrainEngine
from hybridflow.train_engine.ranks import listening_near
from hybridflow.types import PeerLostError
from hybridflow.weights import BUCKET_BYTES, CollectiveTransport, Gang, Source, Switch, TargetWeights, WeightLayout
from hybridflow.weights.link import WAIT_S, Link, Meeting, Member, describe_member
from hybridflow.weights.plan import plan_weights

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delivery:
    """What a generator has taken: `Delivery("a3f1", 7)`, version 7, over the link of this key."""

    key: str
    version: int


class LinkEnd:
    """A worker's end, over one link after the other: each with the members that a meeting names, for as long as these live.

    layout:       of what this worker and those that share it hold.
    sources:      what a trainer sends; empty on a generator.
    target:       what a generator fills; None on a trainer.
    bucket_bytes: the same on all.
    """

    def __init__(
        self,
        seat: Seat,
        device: torch.device,
        layout: WeightLayout,
        *,
        sources: Mapping[str, Source],
        target: TargetWeights | None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._token, self._address, self._device = secrets.token_hex(8), seat.address, device
        # A call has several waits in it, and its own bound ends the worker.
        self._wait_s = min(WAIT_S, seat.timeout_s / 4)
        self._layout, self._sources, self._target = layout, sources, target
        self._bucket_bytes, self._broken = bucket_bytes, ""
        self._link: Link | None = None
        self._transport: CollectiveTransport | None = None

    def describe(self) -> Member:
        """Who this is to the others."""
        return describe_member(self._token, self._address, self._device, self._broken)

    def push(self, meeting: Meeting, version: int) -> Switch | None:
        """Sends this version, with what has gone out from this rank; None where a member was lost over it. Collective of all members."""
        return self._move(meeting, version)

    def pull(self, meeting: Meeting) -> Switch | None:
        """Takes the version that the trainers send, whichever that is, an older one after they went back to a snapshot."""
        if self._target is not None:
            self._target.forget()
        return self._move(meeting, None)

    def holds(self, version: int) -> bool:
        """Whether this version is here, whole."""
        if self._target is None:
            return False
        self._target.check_whole()
        return self._target.version == version

    @contextmanager
    def filling(self, version: int) -> Iterator[None]:
        """While weights of this version come another way; they are here when the block ends, and torn if that raises."""
        if self._target is None:
            raise ValueError("a trainer's end has nothing to fill")
        self._target.forget()
        with self._target.receiving(version):
            yield

    def close(self) -> None:
        """Ends the link, so that the others learn of it. May be called twice."""
        link, self._link, self._transport = self._link, None, None
        if link is not None:
            link.close()

    def _move(self, meeting: Meeting, version: int | None) -> Switch | None:
        if self._token not in meeting.tokens:
            return None
        try:
            transport = self._open(meeting)
            if version is None:
                return transport.pull()
            sent = int(transport.plan.sent[meeting.tokens.index(self._token)])
            return replace(transport.push(version), bytes_moved=sent)
        except PeerLostError as error:
            reason = str(error)
        # Not inside the handler: the traceback of the cause would hold the connections open, and others would go on waiting.
        self._broken = meeting.key
        self.close()
        _log.warning("weights go through the object store until the lost member is replaced: %s", reason)
        return None

    def _open(self, meeting: Meeting) -> CollectiveTransport:
        """The transport over the link of this meeting: the one at hand, or where that is of other members a new one."""
        if self._link is not None and self._link.meeting.key == meeting.key and self._transport is not None:
            return self._transport
        self.close()
        rank = meeting.tokens.index(self._token)
        near = listening_near(meeting.rendezvous)
        self._link = Link(meeting, rank, self._device, self._layout, wait_s=self._wait_s, listening=near)
        made = plan_weights(*self._link.layouts, self._bucket_bytes, nodes=meeting.nodes)
        gang = Gang(rank, meeting.size, self._device, self._wait_s, group=self._link.group)
        self._transport = CollectiveTransport(
            made, self._link.layouts, gang, self._sources, self._target, gathers=False
        )
        return self._transport


def build_sending_end(seat: Seat, engine: TrainEngine, *, alone: bool) -> tuple[TrainedWeights, LinkEnd]:
    """A trainer's end, and what it sends. A collective.

    alone: the adapter alone.
    """
    trained = TrainedWeights(engine, alone=alone, timeout_s=seat.timeout_s)
    return trained, LinkEnd(seat, engine.model.device, trained.layout, sources=trained.parts, target=None)


def build_receiving_end(seat: Seat, engine: NativeEngine) -> LinkEnd:
    """A generator's end, which fills the engine's weights, whole or a part of them, or where it has an adapter that alone."""
    engine.prepare()
    filled = adapter_weights(engine.model) or dict(engine.model.module.named_parameters())
    layout = build_replica_layout(filled) if engine.group is None else engine.group.layout
    return LinkEnd(seat, engine.model.device, layout, sources={}, target=TargetWeights(filled))
