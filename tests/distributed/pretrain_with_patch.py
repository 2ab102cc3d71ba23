"""The third way in: a Megatron-LM with our source patch, on the PYTHONPATH; this script's own lines mention no rounding.

`pretrain_with_patch.py SCRIPT ARGS...` runs SCRIPT; the environment's TREE_REPORT names a file for what the tree was.
"""

import json
import os
import runpy
import sys


def report() -> dict:
    """Where the training code lies, what the plugin wraps in it, and how it refuses a bad flag."""
    from megatron.training import arguments, training

    def functions():
        return [arguments.add_megatron_arguments, arguments.validate_args, training.get_megatron_optimizer]

    before = functions()
    import megatron_sr.megatron.plugin  # noqa: F401  on a patched tree it wraps nothing

    sys.argv = [
        "pretrain_gpt.py",
        "--param-rounding",
        "stochastic",
        "--bf16",
        "--use-distributed-optimizer",
        "--qk-clip",
    ]
    try:
        arguments.validate_args(arguments.parse_args(), {})
        refused = None
    except ValueError as error:
        refused = str(error)
    return {
        "source": arguments.__file__,
        "wrapped": [f.__name__ for f, g in zip(before, functions()) if f is not g],
        "refused": refused,
    }


if __name__ == "__main__":
    from megatron_sr.megatron import host

    host.install()
    host.install_training()
    import torch.distributed as dist

    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    with open(os.environ["TREE_REPORT"], "w") as file:
        json.dump(report(), file)
    dist.destroy_process_group()
