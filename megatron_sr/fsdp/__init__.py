"""Plain PyTorch, DDP, FSDP2 and tensor parallelism by DTensor: FP32 main params for any torch optimizer."""
