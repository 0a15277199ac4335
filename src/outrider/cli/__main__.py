"""`python -m outrider.cli`: the command line, run by this interpreter."""

import sys

from outrider.cli import main

if __name__ == "__main__":
    sys.exit(main())
