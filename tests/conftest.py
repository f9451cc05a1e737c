"""What tests of several rooms share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One small Ray cluster for all tests that want one; a `RayRuntime` joins it instead of starting its own."""
    ray = pytest.importorskip("ray", reason="ray is an extra; pip install 'hybridflow[ray]'")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
