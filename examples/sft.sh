# Sourced by the train.sh of each model, after launch.sh: what all of them share. Each sets the arrays `model`, `layout` and, for further
# flags of its own, `more`; then `train "$@"` fine-tunes with an unmodified Megatron-LM pretrain_gpt.py and stochastic rounding.

need MEGATRON_LM "a checkout of Megatron-LM, branch core_r0.19.0 (it has pretrain_gpt.py)"
need MODEL "the folder of the Hugging Face checkpoint (its tokenizer is used)"
need PRETRAINED "the same weights as a Megatron checkpoint, as Megatron-Bridge converts them"
need DATA "a JSONL file of conversations: {\"messages\": [{\"role\": ..., \"content\": ...}, ...]} a line"
need SAVE "the folder for checkpoints; a job started again goes on from the last one there"

GLOBAL_BATCH=${GLOBAL_BATCH:-256}
SEQUENCE=${SEQUENCE:-8192}
TIMEOUT=${TIMEOUT:-60}
more=()

# Batches, optimizer, precision.
training=(
  --micro-batch-size 1                  # sequences in one forward pass of a rank
  --global-batch-size "$GLOBAL_BATCH"   # sequences in one optimizer step of the whole job
  --seq-length "$SEQUENCE"              # tokens in a packed sequence
  --train-iters 1000                    # optimizer steps
  --lr 1e-6                             # a post-training learning rate: updates far below half a BF16 ulp
  --min-lr 1e-6                         # the end of the schedule
  --lr-decay-style constant             # no decay
  --lr-warmup-iters 10                  # steps of linear warm-up
  --optimizer adam                      # AdamW: FP32 main params and moments
  --adam-beta1 0.9                      # decay of the first moment
  --adam-beta2 0.98                     # decay of the second moment
  --weight-decay 0.1                    # decoupled weight decay
  --clip-grad 1.0                       # largest global gradient norm
  --bf16                                # BF16 model params, activations and parameter all-gather
  --accumulate-allreduce-grads-in-fp32  # gradients add up and are reduced in FP32
  --attention-backend flash             # FlashAttention through Transformer Engine
  --attention-dropout 0.0               # no dropout in attention
  --hidden-dropout 0.0                  # nor elsewhere
)

# Data and tokenizer.
data=(
  --sft                                  # supervised fine-tuning on packed conversations
  --data-path "$DATA"                    # JSONL, one conversation (or several, packed) a line
  --split 100,0,0                        # all of it for training
  --eval-iters 0                         # so no evaluation either
  --tokenizer-type SFTTokenizer          # the model's own tokenizer ...
  --tokenizer-model "$MODEL"             # ... from this folder
  --sft-tokenizer-prompt-format default  # ... with its chat template; Megatron then trains on the tokens of all roles
)

# Checkpoints and logging.
checkpoints=(
  --pretrained-checkpoint "$PRETRAINED"     # weights for the first start
  --load "$SAVE"                            # later starts go on from here, on any layout
  --save "$SAVE"                            # checkpoints
  --save-interval 100                       # optimizer steps between them
  --ckpt-format torch_dist                  # distributed checkpoints: each rank writes its shards
  --dist-ckpt-optim-fully-reshardable       # optimizer state that another layout can load
  --log-interval 1                          # a log line a step
  --log-throughput                          # with TFLOP/s per GPU
  --tensorboard-dir "$SAVE/tensorboard"     # curves, those of the rounding among them
  --distributed-timeout-minutes "$TIMEOUT"  # how long a collective may wait, for example for a slow save
)

# Stochastic rounding.
rounding=(
  --param-rounding stochastic           # round FP32 main params to BF16 model params stochastically, once per optimizer step
  --param-rounding-seed 1234            # with step, tensor and element it decides every rounding; keep it when resuming
  --param-rounding-log-interval 50      # every 50 steps log the share of unchanged weights and the distance to the main params
  --param-rounding-verify-interval 500  # every 500 steps check that all replicas hold the same bits
)

# Routing of mixtures of experts; the models that are some put it into `model`.
routing=(
  --moe-router-load-balancing-type aux_loss  # balance by an auxiliary loss ...
  --moe-aux-loss-coeff 0.001                 # ... of this weight, router_aux_loss_coef
  --moe-router-dtype fp32                    # route in FP32
  --moe-token-dispatcher-type alltoall       # send tokens to their experts by all-to-all
  --moe-grouped-gemm                         # one grouped matrix product for all experts of a GPU
  --moe-permute-fusion                       # fused sorting of tokens by expert
)

train() {
  launch megatron_sr run "$MEGATRON_LM/pretrain_gpt.py" \
    "${model[@]}" "${layout[@]}" "${training[@]}" ${more[@]+"${more[@]}"} "${data[@]}" "${checkpoints[@]}" "${rounding[@]}" "$@"
}
