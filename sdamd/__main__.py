"""`python -m sdamd`."""

import sys

from sdamd.cli import main

if __name__ == "__main__":
    sys.exit(main())
