"""What tests of several rooms share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One small Ray cluster for all tests that want one; a `RayRuntime` joins it instead of starting its own.

    It offers more CPUs than there may be, so that groups of several workers fit on any machine.
    """
    ray = pytest.importorskip("ray", reason="ray is an extra; pip install 'hybridflow[ray]'")
    # `local` starts one even where the machine runs another cluster, which a test must not join.
    ray.init(
        address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=256 * 2**20
    )
    yield
    ray.shutdown()
