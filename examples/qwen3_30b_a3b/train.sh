#!/usr/bin/env bash
# Qwen3-30B-A3B, supervised fine-tuning on Megatron-LM with stochastic rounding. For MXFP8 weights see train_mxfp8.sh.
# 8 nodes x 8 GPUs: TP 4 x PP 2 x DP 8, experts EP 8 x DP 4. By arithmetic 18 GB a GPU for params, gradients, optimizer, plus activations.
#
#   MEGATRON_LM=~/Megatron-LM MODEL=... PRETRAINED=... DATA=... SAVE=... MASTER_ADDR=node0 NODE_RANK=0 bash train.sh
#
# DRY_RUN=1 prints the command line. Further arguments are appended to it and win. Never run on GPUs by this
# project; tests/unit/test_examples.py passes this very command line through Megatron's own parser and checks.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DEFAULT_NNODES=8
GLOBAL_BATCH=${GLOBAL_BATCH:-512}  # sequences in one optimizer step
source "$here/../launch.sh"
source "$here/../sft.sh"  # what all models share: training, data, checkpoints, rounding

# The model, as in its config.json (tests/data/model_configs/qwen3_30b_a3b.json).
model=(
  --num-layers 48                        # transformer layers
  --hidden-size 2048                     # width of the residual stream
  --ffn-hidden-size 6144                 # width of a dense MLP; no layer has one
  --num-attention-heads 32               # query heads
  --group-query-attention                # with fewer heads for keys and values:
  --num-query-groups 4                   # key-value heads
  --max-position-embeddings 40960        # longest context
  --position-embedding-type rope         # rotary positions
  --rotary-base 1000000                  # their base, rope_theta
  --normalization RMSNorm                # no mean is taken off
  --norm-epsilon 1e-6                    # rms_norm_eps
  --swiglu                               # gated SiLU in the MLP
  --disable-bias-linear                  # linear layers without biases
  --untie-embeddings-and-output-weights  # the output layer has its own weights
  --padded-vocab-size 151936             # rows of the embedding, vocab_size
  --kv-channels 128                      # width of a head, head_dim
  --qk-layernorm                         # RMSNorm on queries and keys
  --num-experts 128                      # experts in each layer
  --moe-router-topk 8                    # of which a token visits 8
  --moe-ffn-hidden-size 768              # width of an expert
  --moe-layer-freq 1                     # every layer has experts
  "${routing[@]}"
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

# Memory.
more=(
  --recompute-granularity selective      # recompute in the backward pass ...
  --recompute-modules moe_act layernorm  # ... expert activations and norms: less memory
)

train "$@"
