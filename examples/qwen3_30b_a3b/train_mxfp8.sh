#!/usr/bin/env bash
# Qwen3-30B-A3B as train.sh trains it, with MXFP8 model params: FP32 main params are rounded to BF16, gathered, and rounded again
# to E4M3 with a scale per 32 weights, both stochastically. Experimental; docs/mxfp8.md says which weights and what was measured.
#
#   MEGATRON_LM=... MODEL=... PRETRAINED=... DATA=... SAVE=... MASTER_ADDR=node0 NODE_RANK=0 bash train_mxfp8.sh
set -euo pipefail
mxfp8=(
  --param-rounding-format mxfp8             # linear and expert weights take values of MXFP8, embeddings, norms and router stay BF16
  --param-rounding-mxfp8-columnwise shared  # row- and column-wise copies use the same noise
)
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" "${mxfp8[@]}" "$@"
