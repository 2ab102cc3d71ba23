"""Keep the libraries' start-up chatter out of the job's progress; errors still show."""

from __future__ import annotations

import logging
import warnings

CHATTY = (
    "torch.utils.cpp_extension",  # "No CUDA runtime is found" wherever a CUDA toolkit lies about
    "megatron.core",  # deprecations aimed at Megatron's own developers
    "vllm",  # "Triton is installed, but doesn't include CPU backend"
)


def quiet_libraries() -> None:
    """Only errors from the loggers above, and no Python warnings. Before importing their libraries."""
    warnings.simplefilter("ignore")
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
