"""A run as a page."""

from __future__ import annotations

from pathlib import Path

from hybridflow.config import ConfigError, settings
from hybridflow.observability.report import write_report

RUN_FILES = ("metrics.jsonl", "config.yaml", "environment.json")


@settings
class ReportConfig:
    """The report of a run: `hybridflow report runs/default/first`."""

    run: str
    """The run's directory; the run may be over, under way, or broken off."""
    output: str | None = None
    """HTML file to write; null writes `report.html` in the run's directory."""


def run_report(config: ReportConfig) -> Path:
    """Writes the report and returns where it is. Raises ConfigError where there is no run."""
    run = Path(config.run)
    if not run.is_dir():
        raise ConfigError(f"run: '{run}' is no directory; give a run's directory, as runs/default/first")
    if not any((run / name).exists() for name in RUN_FILES):
        inside = sorted(path.parent.name for path in run.glob("*/config.yaml"))
        hint = f"give one of the runs in it, as {run / inside[-1]}" if inside else "give a run's directory"
        raise ConfigError(f"run: '{run}' holds none of {', '.join(RUN_FILES)}; {hint}")
    output = None if config.output is None else Path(config.output)
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ConfigError(
            f"output: '{output}' is a directory or lies in none; name an HTML file in a directory that is there"
        )
    try:
        return write_report(run, output)
    except OSError as error:
        raise ConfigError(
            f"output: the report cannot be written ({error.strerror}); name another file by output=FILE"
        ) from None
