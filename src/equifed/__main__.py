"""``python -m equifed`` is the command line."""

from equifed.cli import main

if __name__ == "__main__":
    main()
