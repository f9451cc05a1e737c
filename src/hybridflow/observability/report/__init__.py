"""`report.html`: a run as one page that needs nothing else.

reading -> RunRecord -> page -> HTML; curves, distributions and samples are prepared in series.py, charts.py, spreads.py and rollouts.py.
"""

from hybridflow.observability.report.page import build_report, write_report
from hybridflow.observability.report.reading import read_run

__all__ = ["build_report", "read_run", "write_report"]
