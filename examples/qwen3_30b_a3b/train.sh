#!/usr/bin/env bash
# Qwen3-30B-A3B, supervised fine-tuning on Megatron-LM with stochastic rounding. For MXFP8 weights see train_mxfp8.sh.
# 8 nodes x 8 GPUs: TP 4 x PP 2 x DP 8, experts EP 8 x DP 4. By arithmetic 18 GB a GPU for params, gradients, optimizer, plus activations.
#
#   MEGATRON_LM=~/Megatron-LM MODEL=... PRETRAINED=... DATA=... SAVE=... MASTER_ADDR=node0 NODE_RANK=0 bash train.sh
#
# DRY_RUN=1 prints the command line. Further arguments are appended to it and win over those below. Never run on GPUs by this
# project; tests/unit/test_examples.py passes this very command line through Megatron's own parser and checks.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DEFAULT_NNODES=8
source "$here/../launch.sh"
need MEGATRON_LM "a checkout of Megatron-LM, branch core_r0.19.0 (it has pretrain_gpt.py)"
need MODEL "the folder of the Hugging Face checkpoint (its tokenizer is used)"
need PRETRAINED "the same weights as a Megatron checkpoint, as Megatron-Bridge converts them"
need DATA "a JSONL file of conversations: {\"messages\": [{\"role\": ..., \"content\": ...}, ...]} a line"
need SAVE "the folder for checkpoints; a job started again goes on from the last one there"

# The model, as in its config.json (tests/data/model_configs/qwen3_30b_a3b.json).
model=(
  --num-layers 48                            # transformer layers
  --hidden-size 2048                         # width of the residual stream
  --ffn-hidden-size 6144                     # width of a dense MLP; no layer has one
  --num-attention-heads 32                   # query heads
  --group-query-attention                    # with fewer heads for keys and values:
  --num-query-groups 4                       # key-value heads
  --max-position-embeddings 40960            # longest context
  --position-embedding-type rope             # rotary positions
  --rotary-base 1000000                      # their base, rope_theta
  --normalization RMSNorm                    # no mean is taken off
  --norm-epsilon 1e-6                        # rms_norm_eps
  --swiglu                                   # gated SiLU in the MLP
  --disable-bias-linear                      # linear layers without biases
  --untie-embeddings-and-output-weights      # the output layer has its own weights
  --padded-vocab-size 151936                 # rows of the embedding, vocab_size
  --kv-channels 128                          # width of a head, head_dim
  --qk-layernorm                             # RMSNorm on queries and keys
  --num-experts 128                          # experts in each layer
  --moe-router-topk 8                        # of which a token visits 8
  --moe-ffn-hidden-size 768                  # width of an expert
  --moe-layer-freq 1                         # every layer has experts
  --moe-router-load-balancing-type aux_loss  # balance by an auxiliary loss ...
  --moe-aux-loss-coeff 0.001                 # ... of this weight, router_aux_loss_coef
  --moe-router-dtype fp32                    # route in FP32
  --moe-token-dispatcher-type alltoall       # send tokens to their experts by all-to-all
  --moe-grouped-gemm                         # one grouped matrix product for all experts of a GPU
  --moe-permute-fusion                       # fused sorting of tokens by expert
)

# How the ranks share it; the data-parallel size is what remains.
layout=(
  --tensor-model-parallel-size 4    # attention and embeddings on 4 GPUs of a node
  --sequence-parallel               # norms and residuals are cut along the sequence there
  --pipeline-model-parallel-size 2  # 24 layers a stage
  --expert-model-parallel-size 8    # 16 of 128 experts a GPU
  --expert-tensor-parallel-size 1   # experts are not cut
  --use-distributed-optimizer       # ZeRO-1: each data-parallel rank keeps its share of main params and moments
  --overlap-grad-reduce             # reduce gradients while the backward pass runs
  --overlap-param-gather            # gather rounded params while the forward pass runs
)

# Batches, optimizer, precision.
training=(
  --micro-batch-size 1                   # sequences in one forward pass of a rank
  --global-batch-size 512                # sequences in one optimizer step of the whole job
  --seq-length 8192                      # tokens in a packed sequence
  --train-iters 1000                     # optimizer steps
  --lr 1e-6                              # a post-training learning rate: updates far below half a BF16 ulp
  --min-lr 1e-6                          # the end of the schedule
  --lr-decay-style constant              # no decay
  --lr-warmup-iters 10                   # steps of linear warm-up
  --optimizer adam                       # AdamW: FP32 main params and moments
  --adam-beta1 0.9                       # decay of the first moment
  --adam-beta2 0.98                      # decay of the second moment
  --weight-decay 0.1                     # decoupled weight decay
  --clip-grad 1.0                        # largest global gradient norm
  --bf16                                 # BF16 model params, activations and parameter all-gather
  --accumulate-allreduce-grads-in-fp32   # gradients add up and are reduced in FP32
  --attention-backend flash              # FlashAttention through Transformer Engine
  --attention-dropout 0.0                # no dropout in attention
  --hidden-dropout 0.0                   # nor elsewhere
  --recompute-granularity selective      # recompute in the backward pass ...
  --recompute-modules moe_act layernorm  # ... expert activations and norms: less memory
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
  --pretrained-checkpoint "$PRETRAINED"  # weights for the first start
  --load "$SAVE"                         # later starts go on from here, on any layout
  --save "$SAVE"                         # checkpoints
  --save-interval 100                    # optimizer steps between them
  --ckpt-format torch_dist               # distributed checkpoints: each rank writes its shards
  --dist-ckpt-optim-fully-reshardable    # optimizer state that another layout can load
  --log-interval 1                       # a log line a step
  --log-throughput                       # with TFLOP/s per GPU
  --tensorboard-dir "$SAVE/tensorboard"  # curves, those of the rounding among them
  --distributed-timeout-minutes 60       # how long a collective may wait, for example for a slow save
)

# Stochastic rounding.
rounding=(
  --param-rounding stochastic           # round FP32 main params to BF16 model params stochastically, once per optimizer step
  --param-rounding-seed 1234            # with step, tensor and element it decides every rounding; keep it when resuming
  --param-rounding-log-interval 50      # every 50 steps log the share of unchanged weights and the distance to the main params
  --param-rounding-verify-interval 500  # every 500 steps check that all replicas hold the same bits
)

launch megatron_sr run "$MEGATRON_LM/pretrain_gpt.py" \
  "${model[@]}" "${layout[@]}" "${training[@]}" "${data[@]}" "${checkpoints[@]}" "${rounding[@]}" "$@"
