#!/usr/bin/env bash
# Qwen3.5-397B-A17B, its text decoder, fine-tuning on Megatron-LM with stochastic rounding. See README.md for what is left out.
# 32 nodes x 8 GPUs: TP 2 x PP 4 x DP 32, experts EP 32 x DP 2. By arithmetic 46 GB a GPU for params, gradients, optimizer, plus activations.
#
#   MEGATRON_LM=~/Megatron-LM MODEL=... PRETRAINED=... DATA=... SAVE=... MASTER_ADDR=node0 NODE_RANK=0 bash train.sh
#
# DRY_RUN=1 prints the command line. Further arguments are appended to it and win. Never run on GPUs by this
# project; tests/unit/test_examples.py passes this very command line through Megatron's own parser and checks.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DEFAULT_NNODES=32
GLOBAL_BATCH=${GLOBAL_BATCH:-512}  # sequences in one optimizer step
TIMEOUT=${TIMEOUT:-120}            # minutes that a collective may wait
source "$here/../launch.sh"
source "$here/../sft.sh"  # what all models share: training, data, checkpoints, rounding

# The model, as in its config.json (tests/data/model_configs/qwen3_5_397b_a17b.json).
model=(
  --num-layers 60                             # transformer layers
  --hidden-size 4096                          # width of the residual stream
  --ffn-hidden-size 1024                      # width of a dense MLP; no layer has one
  --num-attention-heads 32                    # query heads
  --group-query-attention                     # with fewer heads for keys and values:
  --num-query-groups 2                        # key-value heads
  --max-position-embeddings 262144            # longest context
  --position-embedding-type rope              # rotary positions
  --rotary-base 10000000                      # their base, rope_theta
  --normalization RMSNorm                     # no mean is taken off
  --norm-epsilon 1e-6                         # rms_norm_eps
  --swiglu                                    # gated SiLU in the MLP
  --disable-bias-linear                       # linear layers without biases
  --untie-embeddings-and-output-weights       # the output layer has its own weights
  --padded-vocab-size 248320                  # rows of the embedding, vocab_size
  --rotary-percent 0.25                       # of a head's width, partial_rotary_factor
  --kv-channels 256                           # width of an attention head, head_dim
  --qk-layernorm                              # RMSNorm on queries and keys
  --apply-layernorm-1p                        # norm weights are stored as their difference from 1
  --attention-output-gate                     # a sigmoid gate on attention's output
  --experimental-attention-variant gated_delta_net  # linear attention, Gated DeltaNet ...
  --linear-attention-freq 4                   # ... in three of four layers, full_attention_interval
  --linear-conv-kernel-dim 4                  # width of its short convolution
  --linear-key-head-dim 128                   # width of its key heads
  --linear-value-head-dim 128                 # and of its value heads
  --linear-num-key-heads 16                   # number of key heads
  --linear-num-value-heads 64                 # and of value heads
  --num-experts 512                           # experts in each layer
  --moe-router-topk 10                        # of which a token visits 10
  --moe-ffn-hidden-size 1024                  # width of an expert
  --moe-shared-expert-intermediate-size 1024  # and of the expert that every token visits
  --moe-shared-expert-gate                    # whose output has a gate
  --moe-layer-freq 1                          # every layer has experts
  "${routing[@]}"
)

# How the ranks share it; the data-parallel size is what remains.
layout=(
  --tensor-model-parallel-size 2    # attention and embeddings on 2 GPUs of a node
  --sequence-parallel               # norms and residuals are cut along the sequence there
  --pipeline-model-parallel-size 4  # 15 layers a stage
  --expert-model-parallel-size 32   # 16 of 512 experts a GPU
  --expert-tensor-parallel-size 1   # experts are not cut
  --use-distributed-optimizer       # ZeRO-1: each data-parallel rank keeps its share of main params and moments
  --overlap-grad-reduce             # reduce gradients while the backward pass runs
  --overlap-param-gather            # gather rounded params while the forward pass runs
)

# Memory.
more=(
  --recompute-granularity full  # keep only the inputs of layers, recompute the rest in the backward pass:
  --recompute-method uniform    # ... for all layers alike
  --recompute-num-layers 1      # ... layer by layer
)

# Multi-token prediction, the model's own draft layer: MTP=1 trains it too.
if [[ ${MTP:-0} == 1 ]]; then
  model+=(
    --mtp-num-layers 1             # mtp_num_hidden_layers
    --mtp-loss-scaling-factor 0.1  # weight of its loss
  )
fi

train "$@"
