"""A run on a cluster of a head and two nodes, emulated on this machine; one node is taken away while it is at work.

    python two_nodes.py CONFIG.yaml FAULT DIRECTORY

FAULT is `rollout` or `update`: in the middle of the second step's call of it, the node that runs it is taken away; or `team`: of the call
of a rollout that rank 3 makes second.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import ray
import yaml
from faults import FaultyVerb, held_up, read_held
from ray.cluster_utils import Cluster

from hybridflow.config import check_config
from hybridflow.flow.commands import run_rl
from hybridflow.flow.rl_job import RLConfig
from hybridflow.roles.actor_worker import ActorWorker
from hybridflow.roles.generator import GeneratorWorker

# (owner of the verb, the verb, calls of it before, of which rank)
FAULTS = {
    "rollout": (GeneratorWorker, "rollout", 4, None),
    "update": (ActorWorker, "update", 2, None),
    "team": (GeneratorWorker, "rollout", 1, 3),
}
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
MEMORY = 128 * 2**20


def main() -> None:
    config, fault, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY, "_system_config": QUICK,
        },
    )  # fmt: skip
    nodes = [cluster.add_node(num_cpus=4, object_store_memory=MEMORY) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)

    def take_away() -> None:
        held = read_held(directory)
        (node,) = (node for node in nodes if node.node_id == held)
        cluster.remove_node(node, allow_graceful=False)
        (directory / "removed").touch()

    owner, verb, calls, rank = FAULTS[fault]
    threading.Thread(target=take_away, daemon=True).start()
    try:
        with FaultyVerb(owner, verb, held_up(directory, calls, rank)):
            run_rl(check_config(RLConfig, yaml.safe_load(Path(config).read_text())))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
