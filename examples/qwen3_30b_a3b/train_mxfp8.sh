#!/usr/bin/env bash
# Qwen3-30B-A3B as train.sh trains it, with MXFP8 model params: FP32 main params are rounded to BF16, gathered, and rounded again
# to E4M3 with a scale per 32 weights, both stochastically. Experimental; docs/mxfp8.md says which weights and what was measured.
#
#   MEGATRON_LM=... MODEL=... PRETRAINED=... DATA=... SAVE=... MASTER_ADDR=node0 NODE_RANK=0 bash train_mxfp8.sh
#
# Any GPU: BF16 params hold the MXFP8 values, matrix products are BF16. BLACKWELL=1: Transformer Engine's MXFP8 tensors and products.
set -euo pipefail
mxfp8=(
  --param-rounding-format mxfp8             # linear and expert weights take values of MXFP8, embeddings, norms and router stay BF16
  --param-rounding-mxfp8-columnwise shared  # row- and column-wise copies use the same noise
  --param-rounding-log-interval 0           # no shares of unchanged weights: params are quantized after they would be counted
)
if [[ ${BLACKWELL:-0} == 1 ]]; then
  mxfp8+=(
    --fp8-format e4m3                    # matrix products in FP8, E4M3 for weights, activations and gradients
    --fp8-recipe mxfp8                   # with a scale per 32 values
    --fp8-param-gather                   # params are kept in MXFP8
    --reuse-grad-buf-for-mxfp8-param-ag  # BF16 params are gathered in the gradient buffer, and quantized there, by our rounding
  )
fi
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" "${mxfp8[@]}" "$@"
