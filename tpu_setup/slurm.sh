#!/usr/bin/env bash
# Batch script for Slurm clusters with GPUs: one process per node, all GPUs of the node in it.
#     sbatch --nodes 2 --gpus-per-node 8 tpu_setup/slurm.sh python train/finetune.py --config ...
# Submit it from the checkout, on a file system that all nodes share. A job that is requeued runs the same command again.
#SBATCH --job-name=jaxtool
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#SBATCH --output=runs/slurm/%j.log
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: sbatch [sbatch options] tpu_setup/slurm.sh COMMAND [ARGUMENT...]

Runs COMMAND once on each node, with the environment of tpu_setup/env.sh and JAX's coordinator on the first node. Each
node's output goes to runs/slurm/JOB.NODE.log. Make runs/slurm before: Slurm doesn't.
TEXT
}
case ${1:-} in
  -h | --help) usage; exit 0 ;;
  '') usage >&2; exit 2 ;;
  -*) printf "slurm.sh: unknown option '%s'\n" "$1" >&2; exit 2 ;;
esac
[[ -n ${SLURM_JOB_NODELIST:-} ]] || { echo "slurm.sh: not in a Slurm job; use sbatch" >&2; exit 2; }

cd "${SLURM_SUBMIT_DIR:-.}"
# shellcheck source=/dev/null
source tpu_setup/env.sh
if [[ -x .venv/bin/python ]]; then PATH="$PWD/.venv/bin:$PATH"; fi

first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export JAX_COORDINATOR_ADDRESS="$first:$JAX_COORDINATOR_PORT"
# In a Slurm task JAX takes the one GPU with the task's local number; here a task has all of its node.
gpus="${SLURM_GPUS_ON_NODE:-1}"
export JAX_LOCAL_DEVICE_IDS="${JAX_LOCAL_DEVICE_IDS:-$(seq -s , 0 $((gpus - 1)))}"

exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 --output="runs/slurm/%j.%n.log" --open-mode=append "$@"
