"""`torchrun ... tests/distributed/run_ranks.py MODULE ARGS...` calls MODULE.main(ARGS...) in every rank, on the CPU host.

Distributed checkpointing spawns a helper process that imports the main module again: this one costs nothing to import.
"""

import gc
import importlib
import sys

if __name__ == "__main__":
    from megatron_sr.megatron import host

    host.install()
    main = importlib.import_module(sys.argv[1]).main
    gc.freeze()  # what was imported stays: every later collection is cheaper
    main(*sys.argv[2:])
