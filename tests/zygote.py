"""`python -m tests.zygote`: a process that has loaded torch and forks a sdamd for each line.

The start of torch takes most of the time of a short batch. What is forked runs the real command
with the real model, in one process (`--in-process`), and leads a process group of its own.
A line on stdin is JSON: the arguments, and the file that stdout and stderr go to. The answer is
the id of the process, and when it has ended its status.
"""

import json
import os
import sys
from pathlib import Path

from sdamd import cli
from sdamd.backends import torch_backend  # noqa: F401  # loaded once for all
from sdamd.commands import batch_run  # noqa: F401
from sdamd.sampling import sample  # noqa: F401


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            out = os.open(asked["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for standard, descriptor in enumerate((nothing, out, out)):
                os.dup2(descriptor, standard)
            status = cli.main(asked["arguments"])
            sys.stdout.flush()
            os._exit(status)
        answer(pid)
        answer(os.waitpid(pid, 0)[1])


def answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    assert Path("/proc").exists()
    main()
