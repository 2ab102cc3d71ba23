#!/usr/bin/env bash
# DeepSeek-R1-Distill-Qwen-1.5B, supervised fine-tuning on Megatron-LM with stochastic rounding.
# 1 node x 8 GPUs: data-parallel 8. By arithmetic 13 GB a GPU for params, gradients and optimizer, plus activations.
#
#   MEGATRON_LM=~/Megatron-LM MODEL=... PRETRAINED=... DATA=... SAVE=... MASTER_ADDR=node0 NODE_RANK=0 bash train.sh
#
# DRY_RUN=1 prints the command line. Further arguments are appended to it and win. Never run on GPUs by this
# project; tests/unit/test_examples.py passes this very command line through Megatron's own parser and checks.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DEFAULT_NNODES=1
source "$here/../launch.sh"
source "$here/../sft.sh"  # what all models share: training, data, checkpoints, rounding

# The model, as in its config.json (tests/data/model_configs/deepseek_r1_1_5b.json).
model=(
  --num-layers 28                        # transformer layers
  --hidden-size 1536                     # width of the residual stream
  --ffn-hidden-size 8960                 # width of the MLP (SwiGLU)
  --num-attention-heads 12               # query heads
  --group-query-attention                # with fewer heads for keys and values:
  --num-query-groups 2                   # key-value heads
  --max-position-embeddings 131072       # longest context
  --position-embedding-type rope         # rotary positions
  --rotary-base 10000                    # their base, rope_theta
  --normalization RMSNorm                # no mean is taken off
  --norm-epsilon 1e-6                    # rms_norm_eps
  --swiglu                               # gated SiLU in the MLP
  --disable-bias-linear                  # linear layers without biases
  --untie-embeddings-and-output-weights  # the output layer has its own weights
  --padded-vocab-size 151936             # rows of the embedding, vocab_size
  --add-qkv-bias                         # but Qwen2 has them on queries, keys and values
)

# How the ranks share it; the data-parallel size is what remains.
layout=(
  --tensor-model-parallel-size 1    # whole layers on each GPU
  --pipeline-model-parallel-size 1  # all layers on each GPU
  --use-distributed-optimizer       # ZeRO-1: each data-parallel rank keeps its share of main params and moments
  --overlap-grad-reduce             # reduce gradients while the backward pass runs
  --overlap-param-gather            # gather rounded params while the forward pass runs
)

train "$@"
