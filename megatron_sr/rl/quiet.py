"""Keep the libraries' start-up chatter out of the job's progress; errors still show."""

from __future__ import annotations

import logging
import os

CHATTY = (
    "torch.utils.cpp_extension",  # "No CUDA runtime is found" wherever a CUDA toolkit lies about
    "megatron.core",  # deprecations aimed at Megatron's own developers
)


def quiet_libraries() -> None:
    """Raise the log level of chatty loggers to ERROR, and vLLM's unless VLLM_LOGGING_LEVEL is set. Before importing them."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
