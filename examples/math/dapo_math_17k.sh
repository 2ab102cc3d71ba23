#!/usr/bin/env bash
# RL post-training (Dr. GRPO) on DAPO-Math-17k as published (Parquet), evaluated on AIME 2024, with a Qwen or a DeepSeek-R1-distilled model.
# 1 node x 8 GPUs: data-parallel 8, an engine on each GPU.
#
#   MODEL=... DATA=dapo-math-17k.parquet EVAL=aime-2024.jsonl SAVE=... bash dapo_math_17k.sh
#
# DRY_RUN=1 prints the command line. Further arguments are appended to it and win. Never run on GPUs by this project;
# tests/unit/test_rl_examples.py passes this very command line through the job's checks, and rows of this layout through its loader.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DEFAULT_NNODES=1
source "$here/../launch.sh"
source "$here/../rl.sh"  # what all models share

need EVAL "a JSONL file of problems to measure mean@32 on, such as AIME 2024"

layout=(
  --tensor-model-parallel-size 1              # whole layers on each GPU
  --task "parquet:$DATA"                      # 1.79 million rows, 17 thousand problems: repeated rows are read once
  --problem-field prompt.0.content            # column `prompt`: a chat of one message, with the instruction in it
  --answer-field reward_model.ground_truth    # column `reward_model`
  --prompt-template none                      # the prompts ask for a last line "Answer: ...", which math-verify finds
  --eval-task "jsonl:$EVAL"                   # measured by sampling
  --eval-prompt-template reason               # its problems come without instruction: "... final answer within \boxed{}."
  --eval-samples 32                           # answers to each of its problems: mean@32
  --eval-interval 20                          # rounds between evaluations
)

train "$@"
