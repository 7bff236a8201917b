"""``python -m equifed`` is the command line."""

from equifed.cli.main import main

if __name__ == "__main__":
    main()
