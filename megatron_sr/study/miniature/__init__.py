"""The paper's loop in miniature: one process, FP32 compute, only the weights are rounded, so that only rounding differs."""
