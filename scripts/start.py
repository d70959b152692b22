"""Set this machine up for sdamd, once, and start it.

    python3 scripts/start.py generate "mountains by the sea at sunset"

Needs nothing but Python. What follows goes to sdamd as it is; before it may stand `--setup-only`,
`--dry-run`, `--extras dev`, `--device rocm|directml|cpu` or `--build NAME` (both stay chosen until
`--device auto`), and with `--dry-run` also `--root DIR` (a recorded machine) and `--platform NAME`.

Keep this file readable for any Python 3: it has to run on an old one to say that it is too old.
The work is in `set_up.py`.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
NEWEST = (3, 14)


def python_problem(major: int, minor: int, bits: int) -> str:
    """Return why this Python cannot run sdamd and what helps, or an empty string if it can."""
    if OLDEST <= (major, minor) <= NEWEST and bits >= 64:
        return ""
    found = other_pythons()
    advice = f"start it with {found[0]}" if found else "install Python 3.12 and start it with that"
    return (
        f"sdamd needs a 64-bit Python 3.{OLDEST[1]} to 3.{NEWEST[1]} and this is a {bits}-bit "
        f"Python {major}.{minor} ({sys.executable}): {advice}."
    )


def other_pythons() -> "list[str]":  # in quotes, since old Pythons do not know it
    """Return the commands of Pythons that can run sdamd, as far as they can be found."""
    numbers = range(NEWEST[1], OLDEST[1] - 1, -1)
    found = [f"python3.{number}" for number in numbers if shutil.which(f"python3.{number}")]
    launcher = shutil.which("py") if sys.platform == "win32" else None
    if launcher:
        listed = subprocess.run([launcher, "-0"], stdout=subprocess.PIPE, check=False).stdout
        found += launcher_pythons(listed.decode(errors="replace"))
    return found


def launcher_pythons(listing: str) -> "list[str]":
    """Return `py -3.12` and the like for what Windows' launcher lists: 64-bit ones that fit."""
    tags = re.findall(r"^ *(?:-V:|-)?3\.(\d+)(?:-64|\[-64\])?(?= |$)", listing, re.MULTILINE)
    numbers = sorted({int(tag) for tag in tags}, reverse=True)
    return [f"py -3.{number}" for number in numbers if OLDEST[1] <= number <= NEWEST[1]]


def check_python() -> None:
    """End with status 3 and a sentence if sdamd cannot run under this Python."""
    problem = python_problem(sys.version_info[0], sys.version_info[1], sys.maxsize.bit_length() + 1)
    if problem:
        print(problem, file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    check_python()
    # In the place of this folder, whose file names would hide modules of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

    from scripts.set_up import main

    sys.exit(main(sys.argv[1:]))
