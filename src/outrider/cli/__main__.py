"""Runs the command line as `python -m outrider.cli`."""

import sys

from outrider.cli import main

if __name__ == "__main__":
    sys.exit(main())
