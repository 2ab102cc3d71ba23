"""The base model's weights from a Hugging Face checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import torch


def load_base(directory: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """All tensors of `*.safetensors` in `directory`, in `dtype`: BF16, or FP16 (`--fp16`) for which BF16 files are rounded to nearest.

    Raises FileNotFoundError when there is none, ValueError for a tensor that is neither `dtype` nor BF16, and for a weight beyond
    FP16's largest number, 65504.
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
        if tensor.dtype not in (torch.bfloat16, dtype):
            raise ValueError(
                f"--model {directory}: {name} is {str(tensor.dtype).removeprefix('torch.')}, not bfloat16; "
                f"save the model with model.to(torch.bfloat16).save_pretrained(...)"
            )
        tensors[name] = tensor.to(
            dtype
        )  # exact for BF16; into FP16 it rounds weights below 2^-14 only (BF16 has fewer mantissa bits)
        if not tensors[name].isfinite().all():
            raise ValueError(
                f"--model {directory}: {name} has elements that are not finite in {str(dtype).removeprefix('torch.')}; train in BF16, "
                f"without --fp16, or use another base"
            )
    return tensors
