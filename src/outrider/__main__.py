"""`python -m outrider`: runs the command line with this interpreter."""

import sys

from outrider.cli import main

if __name__ == "__main__":
    sys.exit(main())
