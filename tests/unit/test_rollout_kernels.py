import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_python(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = [str(HERE), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""} | variables
    return subprocess.run([sys.executable, *args], env=environment, capture_output=True, text=True, timeout=110)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which torch's CPU build comes without")
def test_kernels_in_the_interpreter():
    """In a process of its own: Triton decides at its import whether it compiles."""
    arguments = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "rollout_kernels_cases.py")]
    run = run_python(*arguments, TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_the_native_engine_imports_without_triton():
    run = run_python("-c", "import sys; sys.modules['triton'] = None; import hybridflow.rollout.native")
    assert run.returncode == 0, run.stderr[-2000:]
