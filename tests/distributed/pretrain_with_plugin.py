"""The other way in: one import line in a script, here put before SCRIPT's own lines."""

import runpy
import sys

if __name__ == "__main__":
    from megatron_sr.megatron import host

    host.install()
    host.install_training()
    import torch.distributed as dist

    import megatron_sr.megatron.plugin  # noqa: F401  the line

    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    dist.destroy_process_group()
