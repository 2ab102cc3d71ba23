#!/usr/bin/env bash
# DeepSeek-R1-Distill-Qwen-1.5B, RL post-training (Dr. GRPO) with this project's own job: trainer and a vLLM engine on each GPU.
# 1 node x 8 GPUs: data-parallel 8, an engine on each GPU.
#
#   MODEL=... DATA=problems.jsonl SAVE=... bash rl.sh
#
# DRY_RUN=1 prints the command line. Further arguments are appended to it and win. The job is proved on CPUs with
# small models; on GPUs it has never run. tests/unit/test_examples.py passes this very command line through its parser.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DEFAULT_NNODES=1
source "$here/../launch.sh"
source "$here/../rl.sh"  # what all models share

layout=(
  --tensor-model-parallel-size 1  # whole layers on each GPU
)

train "$@"
