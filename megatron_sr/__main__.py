import sys

from megatron_sr.cli import main

if __name__ == "__main__":
    sys.exit(main())
