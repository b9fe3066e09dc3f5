#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Joins machines to a Ray cluster, with one node on each, and stops only the node that it started.
#
#   bash scripts/ray_cluster.sh head               on the first machine; prints the address
#   bash scripts/ray_cluster.sh worker ADDRESS     on every other machine
#   bash scripts/ray_cluster.sh wait N             on any of them; waits until N machines have joined
#   bash scripts/ray_cluster.sh stop               on every machine
#
# Options of `ray start` may follow, such as `head --num-gpus=4`. With `--block` as the last one, the node stays
# in the foreground, as schedulers expect. Environment variables:
#
#   RAY_PORT      port of the head (6379)
#   RAY_NODE_IP   address of this machine, if it has several (the one that Ray finds)
#   RAY_NODE_DIR  folder for the node's log, address and process (/tmp/verl_ray_USERID)
#   RAY_WAIT_S    time limit for starting and for waiting, in seconds (300)
#   RAY_AUTH_MODE token or disabled (token, if ~/.ray/auth_token exists)
set -euo pipefail

readonly port=${RAY_PORT:-6379} wait_s=${RAY_WAIT_S:-300}
readonly folder=${RAY_NODE_DIR:-${TMPDIR:-/tmp}/verl_ray_$(id -u)}
export RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1

# A head requires the token if one exists, but a joining node or run does not send it by default.
readonly token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
if [[ -z ${RAY_AUTH_MODE:-} && (-n ${RAY_AUTH_TOKEN:-} || -f $token) ]]; then export RAY_AUTH_MODE=token; fi

fail() {
    echo "ray_cluster: $*" >&2
    exit 1
}

usage() {
    sed -n '/^# Joins/,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
}

# Start time of a process, in ticks since boot: detects that a process id was reused.
birth() {
    [[ -r /proc/$1/stat ]] && sed 's/.*) //' "/proc/$1/stat" | cut -d' ' -f20
}

is_running() {
    local pid born
    [[ -f $folder/process ]] || return 1
    read -r pid born <"$folder/process"
    [[ $(birth "$pid") == "$born" ]]
}

# Processes in the session of a node. The node started the session, so that all of them are its own.
members() {
    awk -v session="$1" '{ pid = $1; sub(/.*\) /, ""); if ($4 == session && $1 != "Z") print pid }' \
        /proc/[0-9]*/stat 2>/dev/null || true # a process may end meanwhile
}

start() { # ADDRESS, then arguments of `ray start`
    local address=$1 pid
    shift
    if is_running; then
        fail "a node of $(<"$folder/address") runs here already: \`stop\` it first, or set RAY_NODE_DIR"
    fi
    mkdir -p "$folder"
    echo "$address" >"$folder/address"
    if [[ ${*: -1} == --block ]]; then
        echo "$$ $(birth $$)" >"$folder/process"
        exec ray start "$@"
    fi
    setsid ray start "$@" --block >"$folder/log" 2>&1 </dev/null &
    pid=$!
    echo "$pid $(birth "$pid")" >"$folder/process"
    until grep -qs -- '--block' "$folder/log"; do
        is_running || fail "the node did not start, see $folder/log: $(grep -m 1 -i error "$folder/log")"
        ((SECONDS < wait_s)) || fail "the node did not start in $wait_s s, see $folder/log"
        sleep 0.2
    done
}

own_ip() {
    python3 -c 'from ray.util import get_node_ip_address as ip; print(ip())'
}

# Ray knows a machine by its network address, even if the user gives 127.0.0.1.
network_address() {
    case $1 in
        127.* | localhost:*) echo "$(own_ip):${1##*:}" ;;
        *) echo "$1" ;;
    esac
}

start_head() {
    local ip=${RAY_NODE_IP:-$(own_ip)} address
    address=$(network_address "$ip:$port")
    start "$address" --head --port="$port" --node-ip-address="$ip" --include-dashboard=false "$@"
    [[ ${RAY_AUTH_MODE:-} != token ]] ||
        echo "the cluster requires a token: export RAY_AUTH_MODE=token before a run, too" >&2
    echo "$address"
}

start_worker() {
    local address
    address=$(network_address "$1")
    shift
    until (exec 3<>"/dev/tcp/${address%:*}/${address##*:}") 2>/dev/null; do
        ((SECONDS < wait_s)) || fail "no head answers at $address after $wait_s s"
        sleep 1
    done
    start "$address" --address="$address" ${RAY_NODE_IP:+--node-ip-address="$RAY_NODE_IP"} "$@"
}

wait_for() {
    local address=${RAY_ADDRESS:-}
    [[ $1 =~ ^[1-9][0-9]*$ ]] || fail "\`wait\` needs a number of machines, got ${1:-nothing}"
    [[ -n $address || ! -f $folder/address ]] || address=$(<"$folder/address")
    [[ -n $address ]] || fail "no node was started here: set RAY_ADDRESS to the address that \`head\` printed"
    python3 - "$address" "$1" "$wait_s" <<'END'
import socket
import sys
import time

import ray

address, wanted, patience_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
deadline = time.monotonic() + patience_s
host, _, port = address.rpartition(":")


def in_time(problem):
    """Sleep briefly, or exit with an error after the deadline."""
    if time.monotonic() > deadline:
        sys.exit(f"ray_cluster: {problem} after {patience_s:g} s: see the log of `worker` on the other"
                 " machines, and check that they can reach the port of the head")
    time.sleep(0.5)


while not ray.is_initialized():
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (OSError, RuntimeError) as error:  # the head or this machine's node is not ready yet
        in_time(f"no cluster at {address} ({error})")
reported = None
while True:
    joined = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
    if joined != reported:
        print(f"{len(joined)} of {wanted} machines have joined: {', '.join(joined)}", flush=True)
    if len(joined) >= wanted:
        break
    reported = joined
    in_time(f"{len(joined)} of {wanted} machines joined {address}")
END
}

stop() {
    local pid address pointer=${RAY_TMPDIR:-${TMPDIR:-/tmp}}/ray/ray_current_cluster
    if ! is_running; then
        rm -f "$folder/process"
        echo "no node that was started from $folder runs here"
        return
    fi
    read -r pid _ <"$folder/process"
    address=$(<"$folder/address")
    kill "$pid" # ends its processes too, and the tasks on them
    SECONDS=0   # Ray drains a node for up to 30 s
    while { is_running || [[ -n $(members "$pid") ]]; } && ((SECONDS < 60)); do sleep 0.2; done
    for pid in $(is_running && echo "$pid") $(members "$pid"); do kill -KILL "$pid" 2>/dev/null || true; done
    rm -f "$folder/process"
    # The file would connect all later runs on this machine to the stopped cluster.
    if [[ -f $pointer && $(<"$pointer") == "$address" ]]; then rm "$pointer"; fi
    echo "the node of $address is stopped"
}

case ${1:-} in
    head | worker | wait | stop)
        command -v ray >/dev/null || fail "\`ray\` was not found: activate the environment of the run first"
        ;;&
    head) start_head "${@:2}" ;;
    worker)
        [[ ${2:-} == *:* ]] || fail "\`worker\` needs the address that \`head\` printed, got ${2:-nothing}"
        start_worker "${@:2}"
        ;;
    wait) wait_for "${2:-}" ;;
    stop) stop ;;
    -h | --help) usage ;;
    *) usage >&2 && exit 2 ;;
esac
