"""Set this machine up with the development extras, then run every check.

    python3 scripts/test.py [--fast] [arguments of pytest]

All checks run, also after one has failed. pytest is the last, so that its summary closes the
output; the exit status is 1 if any check failed. `--fast` leaves out the tests marked slow.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # In the place of this folder, whose file names would hide modules of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

    from scripts.start import check_python

    check_python()

    from scripts.checks import main

    sys.exit(main(sys.argv[1:]))
