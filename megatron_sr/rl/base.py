"""The base model's weights from a Hugging Face checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import torch


def load_base(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of `*.safetensors` in `directory`, in BF16.

    Raises FileNotFoundError when there is none, ValueError for a tensor that is not BF16 (rounding it here would start
    the trainer and the engine from different bits).
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"--model {directory}: no *.safetensors there; save the model with save_pretrained")
    tensors = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise ValueError(
                f"--model {directory}: {file.name} cannot be read ({error}); copy or save it again"
            ) from None
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bfloat16:
            raise ValueError(
                f"--model {directory}: {name} is {str(tensor.dtype).removeprefix('torch.')}, not bfloat16; "
                f"save the model with model.to(torch.bfloat16).save_pretrained(...)"
            )
    return tensors
