"""The rollout's storages, and which version of the weights lies in them: whole, or torn by a transfer that broke off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from hybridflow.config import HybridflowError


class VersionError(HybridflowError, ValueError):
    """Weights that were offered are older than those at hand."""


class TornWeightsError(HybridflowError, RuntimeError):
    """A transfer broke off, and the storages hold some of one version and some of another."""


def refuse_older(version: int, here: int) -> None:
    """Raises VersionError for a version that is older than the one that is here."""
    if version < here:
        raise VersionError(
            f"version {version} of the weights was offered, but version {here} is here already and stays; after a return to "
            "older weights call forget() first"
        )


class TargetWeights:
    """Storages by name, which keep their addresses, and the version in them.

    They are filled in place: after a transfer that breaks off they are torn, and `check_whole` raises until the next has come through.

    buffers: this rank's box of each tensor, contiguous or not; the engine reads the same memory.
    version: the last that came whole; None: none has yet.
    """

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.buffers = {name: buffer.detach() for name, buffer in buffers.items()}
        self.version: int | None = None
        self._torn = ""

    def check_whole(self) -> None:
        """Raises TornWeightsError unless one version lies here: to be called before anything is generated."""
        if self._torn:
            raise TornWeightsError(
                f"the weights are no whole version: {self._torn}; send a version again before anything is generated"
            )

    def check_version(self, version: int) -> None:
        """Raises VersionError for one that is older than what is here; the same one may come again."""
        if self.version is not None:
            refuse_older(version, self.version)

    def forget(self) -> None:
        """Takes any version from here on, such as an older one after a restored snapshot."""
        self.version = None

    @contextmanager
    def receiving(self, version: int) -> Iterator[Mapping[str, Tensor]]:
        """Storages to fill with all of this version; it counts as here when the block ends, and not if that raises."""
        self.check_version(version)
        self._torn = f"version {version} broke off on its way in, over version {self.version}"
        yield self.buffers
        self.version, self._torn = version, ""
