# Sourced by the launch scripts: `launch MODULE ARGS...` runs `python -m MODULE ARGS...` on every GPU of every node with torchrun.
# DRY_RUN=1 prints the command line, quoted for a shell, and starts nothing.

NNODES=${NNODES:-$DEFAULT_NNODES}            # nodes of the job
GPUS_PER_NODE=${GPUS_PER_NODE:-8}            # ranks on each of them
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}   # this node's number, 0 .. NNODES - 1
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}        # node 0, as the others reach it
MASTER_PORT=${MASTER_PORT:-29500}            # a free port there

if ((NNODES > 1)) && [[ $MASTER_ADDR == 127.0.0.1 && ${DRY_RUN:-0} != 1 ]]; then
  echo "$0: $NNODES nodes need MASTER_ADDR, the name or address of node 0, and NODE_RANK on each node" >&2
  exit 2
fi

# need NAME WHAT: stop unless the environment variable NAME is set.
need() {
  if [[ -z ${!1:-} ]]; then
    echo "$0: set $1: $2" >&2
    exit 2
  fi
}

launch() {
  local command=(
    env CUDA_DEVICE_MAX_CONNECTIONS=1  # Megatron orders its communication after compute with it (tensor and sequence parallelism)
    torchrun
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
    -m "$@"
  )
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "${command[@]}"
    echo
    return
  fi
  exec "${command[@]}"
}
