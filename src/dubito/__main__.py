"""`python -m dubito` is the command `dubito`."""

import sys

from dubito.cli import main

if __name__ == "__main__":
    sys.exit(main())
