"""``python -m experiments list`` and ``python -m experiments run NAME [--quick]``."""

import sys

from experiments.harness.command import main

if __name__ == "__main__":
    sys.exit(main())
