"""What vLLM's worker processes import, before they load the model, to mix `WeightsWorker` into their worker class."""

from megatron_sr.rollout import vllm_faults
from megatron_sr.rollout.vllm_worker import WeightsWorker

__all__ = ["WeightsWorker"]

vllm_faults.keep_large_linears_plain()
vllm_faults.request_amx()
