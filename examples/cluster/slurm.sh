#!/usr/bin/env bash
# A run of hybridflow on the nodes of a SLURM job: every node is checked, Ray is started on all, the run is made, all is ended.
#
#   sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=64 --time=24:00:00 examples/cluster/slurm.sh \
#       rl --config-path configs --config-name my_rl run.name=first
#
# What follows the script goes to `hybridflow`, with `runtime.kind=ray` and `runtime.address` added. Submit it from a directory that all
# nodes see, with the environment (`.venv`) active. The same command again goes on where the run stopped.
# CHECK holds further options of check_node.py, RAY_OPTIONS of `ray start`, PORT (6379) is Ray's, SHARED (runs) is seen by all nodes.
#SBATCH --job-name=hybridflow
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail

# SLURM runs a copy of this file; its neighbours are found from where it was submitted.
here=${CLUSTER_EXAMPLES:-$SLURM_SUBMIT_DIR/examples/cluster}
port=${PORT:-6379}
shared=${SHARED:-runs}
read -ra check <<<"${CHECK:-}"
read -ra ray_options <<<"${RAY_OPTIONS:-}"
nodes=${SLURM_JOB_NUM_NODES:?start this with sbatch}
gpus=${SLURM_GPUS_ON_NODE:-0}

# Since 22.05 srun takes this over from sbatch no more, and would start Ray on one core.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')

head_name=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head=$(getent ahostsv4 "$head_name" | awk '$1 !~ /^127/ { print $1; exit }')
[[ -n $head ]] || {
    echo "error: '$head_name' has no IPv4 address but loopback; see /etc/hosts there" >&2
    exit 1
}
on_every_node() { srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --overlap "$@"; }

pids=()
stop_all() { # The newest first: the run, so that it can close its files, then Ray under it.
    for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
        kill -TERM "${pids[i]}" 2>/dev/null || true
        wait "${pids[i]}" 2>/dev/null || true
    done
    pids=()
}
trap stop_all EXIT
trap 'echo "stopped from outside; the same command goes on from the last checkpoint" >&2; exit 143' TERM INT

echo "checking $nodes nodes, head $head_name ($head)"
mkdir -p "$shared"
python "$here/check_node.py" --serve "$port" --shared "$shared" &
pids+=($!)
on_every_node python "$here/check_node.py" --head "$head:$port" --ports $((port + 1)),$((port + 2)) \
    --shared "$shared" --gpus "$gpus" "${check[@]}" || {
    echo "error: nothing was started, since a node above is BAD; sbatch --exclude leaves it out" >&2
    exit 1
}
stop_all

# A lost node must not take the others along: neither its end nor its error ends this step. A worker node whose Ray died joins anew.
# shellcheck disable=SC2016  # expanded on the node
on_every_node --kill-on-bad-exit=0 --wait=0 --no-kill bash -c '
    script=$1 head=$2; shift 2
    [[ $SLURM_NODEID != 0 ]] || exec bash "$script" head "$head" "$@"
    until bash "$script" worker "$head" "$@"; do sleep 2; done
' ray "$here/start_node.sh" "$head" --num-gpus "$gpus" "${ray_options[@]}" &
pids+=($!)

python - "$head:$port" "$nodes" <<'END'
import sys, time
import ray

address, count, deadline = sys.argv[1], int(sys.argv[2]), time.monotonic() + 180
while not ray.is_initialized():
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError) as error:
        if time.monotonic() > deadline:
            sys.exit(f"error: Ray's head does not answer at {address} after 180 s ({error})")
        time.sleep(1)
while len(there := [node for node in ray.nodes() if node["Alive"]]) < count:
    if time.monotonic() > deadline:
        names = ", ".join(sorted(node["NodeManagerHostname"] for node in there))
        sys.exit(f"error: {len(there)} of {count} nodes have joined Ray after 180 s: {names}; see the log above for the others")
    time.sleep(1)
print(f"{count} nodes have joined Ray at {address}")
END

hybridflow "$@" runtime.kind=ray runtime.address="$head:$port" &
pids+=($!)
wait "${pids[-1]}"
