# Sourced by the rl.sh of each model, after launch.sh: what they share. Each sets the array `layout`; then `train "$@"` starts this project's
# own RL job, trainer and vLLM engines with the same bits.

need MODEL "the folder of the Hugging Face checkpoint, BF16"
need DATA "a JSONL file, {\"problem\": ..., \"answer\": ...} a line"
need SAVE "the folder for checkpoints"

job=(
  --model "$MODEL"                 # policy to start from, for trainer and engines
  --task "jsonl:$DATA"             # problems, and rewards by checking the answers
  --iterations 200                 # rounds of rollouts and updates
  --lr 1e-6                        # a post-training learning rate: updates far below half a BF16 ulp
  --clip-grad 1.0                  # largest global gradient norm
  --prompts 128                    # problems a round
  --completions 8                  # samples of each, whose mean reward is the baseline
  --mini-batches 4                 # optimizer steps a round
  --micro-batch-size 1             # sequences in one forward pass of a rank
  --max-prompt-tokens 1024         # longer problems are left out
  --max-completion-tokens 8192     # where a sample is cut
  --main-params-interval 0         # no scoring with FP32 weights
  --metrics "$SAVE/metrics.jsonl"  # a line a round: reward, drift, unchanged weights
  --save "$SAVE"                   # checkpoints
  --save-interval 10               # rounds between them
  --param-rounding stochastic      # round FP32 main params to BF16 model params stochastically, once per optimizer step
  --param-rounding-seed 1234       # with step, tensor and element it decides every rounding; keep it when resuming
)

train() {
  launch megatron_sr.rl.train "${job[@]}" "${layout[@]}" "$@"
}
