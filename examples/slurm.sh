# Run by the slurm.sbatch of each model on the first node of a job: `slurm.sh [SCRIPT] [ARGS...]` starts SCRIPT (train.sh) of the folder
# that sbatch was called in once on each node. SLURM_NODEID, which srun sets there, becomes NODE_RANK.
set -euo pipefail
script=${1:-train.sh}
shift || true
export NNODES=$SLURM_NNODES
export GPUS_PER_NODE=8
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")  # not `| head -n 1`: with pipefail that fails now and then
export MASTER_ADDR=${nodes[0]}
export MASTER_PORT=${MASTER_PORT:-29500}
srun --kill-on-bad-exit=1 bash "${SLURM_SUBMIT_DIR:-.}/$script" "$@"
