#!/usr/bin/env bash
# DeepSeek-R1-Distill-Qwen-14B, RL post-training (Dr. GRPO) with this project's own job: trainer and a vLLM engine share each GPU, equal bit for bit.
# 2 nodes x 8 GPUs: TP 4 x DP 4. Each GPU also holds an engine with the whole model, 30 GB: meant for GPUs of 141 GB.
#
#   MODEL=... DATA=problems.jsonl SAVE=... MASTER_ADDR=node0 NODE_RANK=0 bash rl.sh
#
# DRY_RUN=1 prints the command line. Further arguments are appended to it and win over those below. The job is proved on CPUs with
# small models; on GPUs it has never run. tests/unit/test_examples.py passes this very command line through its parser.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DEFAULT_NNODES=2
source "$here/../launch.sh"
need MODEL "the folder of the Hugging Face checkpoint, BF16"
need DATA "a JSONL file, {\"problem\": ..., \"answer\": ...} a line"
need SAVE "the folder for checkpoints"

job=(
  --model "$MODEL"                  # policy to start from, for trainer and engines
  --task "jsonl:$DATA"              # problems, and rewards by checking the answers
  --iterations 200                  # rounds of rollouts and updates
  --lr 1e-6                         # a post-training learning rate: updates far below half a BF16 ulp
  --clip-grad 1.0                   # largest global gradient norm
  --tensor-model-parallel-size 4    # each layer on 4 GPUs of a node
  --prompts 128                     # problems a round
  --completions 8                   # samples of each, whose mean reward is the baseline
  --mini-batches 4                  # optimizer steps a round
  --micro-batch-size 1              # sequences in one forward pass of a rank
  --max-prompt-tokens 1024          # longer problems are left out
  --max-completion-tokens 8192      # where a sample is cut
  --main-params-interval 0          # no scoring with FP32 weights
  --metrics "$SAVE/metrics.jsonl"   # a line a round: reward, drift, unchanged weights
  --save "$SAVE"                    # checkpoints
  --save-interval 10                # rounds between them
  --param-rounding stochastic       # round FP32 main params to BF16 model params stochastically, once per optimizer step
  --param-rounding-seed 1234        # with step, tensor and element it decides every rounding; keep it when resuming
)

launch megatron_sr.rl.train "${job[@]}" "$@"
