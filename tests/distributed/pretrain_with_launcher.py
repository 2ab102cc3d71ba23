"""`python -m megatron_sr run SCRIPT ...` without the command line around it: the script stays as it is."""

import sys

if __name__ == "__main__":
    from megatron_sr.megatron.launch import run_script

    run_script(sys.argv[1], sys.argv[2:])
