"""Transformer Engine's and Apex's FusedAdam, which cast main params to model params inside their own kernels."""
