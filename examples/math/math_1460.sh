#!/usr/bin/env bash
# RL post-training (Dr. GRPO) on MATH-1460, evaluated on AIME 2024 by mean@32, with a Qwen or a DeepSeek-R1-distilled model.
# 1 node x 8 GPUs: data-parallel 8, an engine on each GPU. Batch sizes are those of the public Precision-RL's sanity test: 64 x 8, 4 steps.
#
#   MODEL=... DATA=math-1460.jsonl EVAL=aime-2024.jsonl SAVE=... bash math_1460.sh
#
# DRY_RUN=1 prints the command line. Further arguments are appended to it and win: `--fp16 --param-rounding nearest` is the paper's FP16
# arm. Never run on GPUs by this project; tests/unit/test_rl_examples.py passes this very command line through the job's checks.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DEFAULT_NNODES=1
source "$here/../launch.sh"
source "$here/../rl.sh"  # what all models share

need EVAL "a JSONL file of problems to measure mean@32 on, such as AIME 2024"

layout=(
  --tensor-model-parallel-size 1  # whole layers on each GPU
  --iterations 456                # 20 passes over 1,460 problems
  --prompts 64                    # problems a round
  --prompt-template reason        # "Please reason step by step, and put your final answer within \boxed{}."
  --eval-task "jsonl:$EVAL"       # measured by sampling
  --eval-samples 32               # answers to each of its problems: mean@32
  --eval-interval 20              # rounds between evaluations
)

train "$@"
