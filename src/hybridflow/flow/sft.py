"""Supervised fine-tuning, on one page."""

from __future__ import annotations

from hybridflow.flow.sft_job import SFTJob
from hybridflow.observability.phases import phase


def train(job: SFTJob) -> None:
    """Take rows, update, until the job's steps are done."""
    for step in job.steps():
        rows = job.rows.take(job.config.rows_per_step)
        with phase("update"):
            metrics = job.actor.update(job.loss(rows))
        job.close_step(step, metrics)
