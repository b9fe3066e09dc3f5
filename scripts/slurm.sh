#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Trains on machines of a SLURM cluster. Options of sbatch go before the file, options of the trainer after it:
#
#   sbatch --nodes=2 --gpus-per-node=8 --time=1-00:00:00 scripts/slurm.sh config=run.yaml data.seed=2
#
# Submit from the folder of the repository, with the environment of the run active. Before the time limit the
# run saves a checkpoint and the job is requeued; it then resumes from the checkpoint.
#SBATCH --job-name=verl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail

cd "$SLURM_SUBMIT_DIR" # SLURM runs a copy of this file from a folder of its own
readonly cluster=scripts/ray_cluster.sh
[[ -f $cluster ]] || { echo "slurm.sh: no $cluster here: submit from the repository's folder" >&2 && exit 2; }

export RAY_PORT=${RAY_PORT:-$((6400 + SLURM_JOB_ID % 1000))} # jobs may share a machine
export RAY_NODE_DIR=${RAY_NODE_DIR:-${TMPDIR:-/tmp}/verl_ray_job_$SLURM_JOB_ID}
RAY_NODE_IP=${RAY_NODE_IP:-$(python3 -c 'from ray.util import get_node_ip_address as ip; print(ip())')}
export RAY_ADDRESS=$RAY_NODE_IP:$RAY_PORT # the first machine is this one
unset RAY_NODE_IP
# The token restricts access to the cluster to this job.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(python3 -c 'import secrets; print(secrets.token_hex(32))')}
export RAY_AUTH_TOKEN

trainer='' asked=''

# At the first SIGTERM the trainer finishes and saves its step; at the second it exits immediately.
# shellcheck disable=SC2329 # called by the traps
ask_to_end() {
    [[ -z $asked ]] || return 0
    asked=$1
    echo "slurm.sh: received $asked: asking the run to save and exit"
    [[ -z $trainer ]] || kill -TERM "$trainer"
}

end_nodes() {
    local steps
    steps=$(jobs -p)
    # shellcheck disable=SC2086 # one word for each process
    [[ -z $steps ]] || kill $steps 2>/dev/null || true
    wait
}

start_node() { # HOST, then arguments of ray_cluster.sh
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --cpus-per-task="$SLURM_CPUS_ON_NODE" \
        --cpu-bind=none bash "$cluster" "${@:2}" --num-cpus="$SLURM_CPUS_ON_NODE" --block &
}

trap 'ask_to_end USR1' USR1
trap 'ask_to_end TERM' TERM
trap end_nodes EXIT

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
start_node "${hosts[0]}" head
for host in "${hosts[@]:1}"; do start_node "$host" worker "$RAY_ADDRESS"; done
bash "$cluster" wait "${#hosts[@]}"

status=0
if [[ -z $asked ]]; then
    python3 -m verl.trainer.main trainer.nnodes="${#hosts[@]}" \
        ${SLURM_GPUS_ON_NODE:+trainer.n_gpus_per_node="$SLURM_GPUS_ON_NODE"} "$@" &
    trainer=$!
    while kill -0 "$trainer" 2>/dev/null; do wait "$trainer" || true; done # a signal ends a `wait` early
    wait "$trainer" || status=$?
fi
trap - EXIT
end_nodes

saved=$((128 + 15)) # exit status of the trainer after SIGTERM
if [[ $asked == USR1 && ($status == 0 && -z $trainer || $status == "$saved") ]]; then
    echo "slurm.sh: requeueing the job"
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
