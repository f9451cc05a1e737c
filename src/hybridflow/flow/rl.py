"""Reinforcement learning, on one page."""

from __future__ import annotations

from hybridflow.flow.rl_job import RLJob
from hybridflow.observability.phases import phase


def train(job: RLJob) -> None:
    """Rollout, score, update, until the job's steps are done. Calls return before the work is done; data orders them."""
    actor, algorithm = job.actor, job.algorithm
    for step in job.steps():
        prompts = job.prompts.take(job.config.prompts_per_step)
        with phase("rollout"):
            batch = actor.rollout(prompts, step=step)
        job.after_rollout(step, batch)
        with phase("score"):
            scores = {name: score(batch) for name, score in job.scorers.items()}
        loss = algorithm.policy_loss(batch, scores)
        with phase("update"):
            metrics = actor.update(loss)
        job.after_step(step, metrics, batch, scores)
