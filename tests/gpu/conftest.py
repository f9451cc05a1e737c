"""GPU tests of several processes share their helpers with those on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "multiproc"))
