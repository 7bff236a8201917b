"""``python -m experiments list`` and ``python -m experiments run NAME [--quick]``."""

from experiments.harness.command import main

if __name__ == "__main__":
    main()
