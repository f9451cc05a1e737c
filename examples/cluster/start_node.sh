#!/usr/bin/env bash
# Ray on this host, in the foreground until Ctrl-C or SIGTERM.
#
#   start_node.sh head 10.0.0.1      on the first host, whose address that is
#   start_node.sh worker 10.0.0.1    on every other host, with the head's address
#
# What follows goes to `ray start`: --num-gpus 4, --object-store-memory 50000000000 ...
# PORT (6379) is the head's; the two above it are each host's node manager and object manager.
set -euo pipefail

usage="usage: start_node.sh head|worker HEAD_ADDRESS [options of ray start]"
role=${1:?$usage}
head=${2:?$usage}
shift 2
port=${PORT:-6379}

# Without a token, whoever reaches the port may run code here. Every host and the run itself need the same one.
export RAY_AUTH_MODE=token
if [[ -z ${RAY_AUTH_TOKEN:-} && ! -s ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token} ]]; then
    echo "error: no Ray token on $(hostname); make one with 'ray get-auth-token --generate' on the head and copy its" \
        "$HOME/.ray/auth_token here, or set RAY_AUTH_TOKEN_PATH" >&2
    exit 1
fi

# How soon a host that fell silent counts as lost; read on the head alone. Ray's own: 3,000 ms, 10,000 ms, 5.
export RAY_health_check_period_ms=${RAY_health_check_period_ms:-1000}
export RAY_health_check_timeout_ms=${RAY_health_check_timeout_ms:-3000}
export RAY_health_check_failure_threshold=${RAY_health_check_failure_threshold:-3}

# The run ends before Ray does, so that there is nothing to wait for; Ray's own 30 s outlast SLURM's patience.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=${RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S:-0}

# A host has several addresses: the one on the way to the head is the one that all can reach.
own=$(python3 -c '
import socket, sys
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect((sys.argv[1], 1))
print(probe.getsockname()[0])' "$head")

case $role in
head) where=(--head --port "$port" --include-dashboard false) ;;
worker) where=(--address "$head:$port") ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac
exec ray start "${where[@]}" --node-ip-address "$own" --node-manager-port $((port + 1)) \
    --object-manager-port $((port + 2)) --disable-usage-stats --block "$@"
