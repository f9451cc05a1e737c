"""Exact mode's kernels, in Triton's interpreter and in a process of its own: Triton decides at its import whether it compiles."""

from importlib.util import find_spec

import pytest
from test_rollout_kernels import HERE, run_python


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which torch's CPU build comes without")
def test_kernels_in_the_interpreter():
    arguments = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "exact_kernels_cases.py")]
    run = run_python(*arguments, TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_models_import_without_triton():
    run = run_python("-c", "import sys; sys.modules['triton'] = None; import hybridflow.models")
    assert run.returncode == 0, run.stderr[-2000:]
