"""Rollouts: export of Megatron weights under Hugging Face names, engines that generate with them, and proof that both agree."""
