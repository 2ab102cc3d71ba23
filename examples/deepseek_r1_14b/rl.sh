#!/usr/bin/env bash
# DeepSeek-R1-Distill-Qwen-14B, RL post-training (Dr. GRPO) with this project's own job: trainer and a vLLM engine on each GPU.
# 2 nodes x 8 GPUs: TP 4 x DP 4. Each GPU also holds an engine with the whole model, 30 GB: meant for GPUs of 141 GB.
#
#   MODEL=... DATA=problems.jsonl SAVE=... MASTER_ADDR=node0 NODE_RANK=0 bash rl.sh
#
# DRY_RUN=1 prints the command line. Further arguments are appended to it and win. The job is proved on CPUs with
# small models; on GPUs it has never run. tests/unit/test_examples.py passes this very command line through its parser.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DEFAULT_NNODES=2
source "$here/../launch.sh"
source "$here/../rl.sh"  # what all models share

layout=(
  --tensor-model-parallel-size 4  # each layer on 4 GPUs of a node
)

train "$@"
