"""Set this machine up for sdamd, once, and make the pictures of a batch file, without a screen.

    python3 scripts/batch.py prompts.csv --steps 30 --stop-at 07:00

For cron, systemd timers and servers: no terminal, no browser; lines of a log on stderr and the
pictures' paths on stdout. What follows goes to `sdamd batch run` as it is, or to the word of
`sdamd batch` that it begins with: `python3 scripts/batch.py resume`. Before it may stand what may
stand before sdamd's own arguments in `start.py`. The exit status is 0 when all pictures are made,
1 when some failed, 2 when the request is wrong, 3 when the machine cannot do it, 4 when the disk is
full or gone, and 130 when it was interrupted; `resume` then makes what is missing.

Keep this file readable for any Python 3, like `start.py`.
"""

import sys
from pathlib import Path

WORDS = ("run", "resume", "list", "show", "retry", "cancel", "pause")


def arguments(given: "list[str]") -> "list[str]":
    """Return what `start.py` takes for the words that were given here."""
    # As `start.py` has them; the last three take a value.
    flags = ("--setup-only", "--dry-run")
    options = ("--device", "--build", "--extras", "--root", "--platform")
    at = 0
    while at < len(given):
        name, equals, _ = given[at].partition("=")
        if given[at] in flags:
            at += 1
        elif name in options:
            at += 1 if equals else 2
        else:
            break
    before, rest = given[:at], given[at:]
    if rest and rest[0] not in WORDS:
        rest = ["run", *rest]
    return [*before, "batch", *(rest or ["--help"])]


if __name__ == "__main__":
    # In the place of this folder, whose file names would hide modules of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

    from scripts.start import check_python

    check_python()

    from scripts.set_up import main

    sys.exit(main(arguments(sys.argv[1:])))
