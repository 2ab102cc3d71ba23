"""Megatron-Core: stochastic rounding in its optimizers, its flags, its checkpoints, and a CPU host for it. Imports nothing itself."""
