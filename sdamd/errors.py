"""Every exception that sdamd raises on purpose, and the exit status that each one means.

    SdamdError
    ├── UserError          2  the request is wrong; the message lists every problem
    │   ├── BadRequest        a field is out of its range, unknown or malformed
    │   ├── BadCheckpoint     a model file is damaged, unsafe, missing or of an unknown kind
    │   └── BadMetadata       a picture's record cannot be read
    ├── HardwareError      3  this machine cannot do it
    │   ├── OutOfVram         the device ran out of memory
    │   ├── DoesNotFit        no plan runs this job on this device
    │   └── WorkerDied        the process that renders has gone
    ├── StorageError       4  a disk is full, a folder cannot be written
    ├── BadImage           1  the model gave NaN, a constant or a black picture
    └── Unfinished         1  the second pass failed; it carries the picture of the first

    Stopped                   no error: somebody asked for the end between two steps

Messages say what, the value, and what is allowed: ``steps is 151; allowed 1 to 150``.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""


class SdamdError(Exception):
    """Base of all; `exit_status` is the status of the process that ends with it."""

    exit_status = 1


class UserError(SdamdError):
    """What was asked for is wrong, and the person can put it right."""

    exit_status = 2


class BadRequest(UserError):
    """Fields of a request are wrong; `problems` holds one sentence each."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type["BadRequest"], tuple[str, ...]]:
        """Rebuild from the problems, so that the error crosses a process boundary whole."""
        return type(self), self.problems


class BadCheckpoint(UserError):
    """A model file is damaged, unsafe, missing or of a kind that is not supported."""


class BadMetadata(UserError):
    """A picture carries no record, or one that cannot be read."""


class HardwareError(SdamdError):
    """This machine cannot do it."""

    exit_status = 3


class OutOfVram(HardwareError):
    """The device ran out of memory.

    `stage` is that of the plan, or empty; `needed_bytes` what it would have taken at least.
    """

    def __init__(
        self, message: str, *, stage: str = "", needed_bytes: int | None = None
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.stage = stage
        self.needed_bytes = needed_bytes


class DoesNotFit(HardwareError):
    """No plan runs this job on this device; the message has the figures and the nearest."""


class WorkerDied(HardwareError):
    """The process that renders has gone; the message says how."""


class StorageError(SdamdError):
    """A disk is full, or a folder or file cannot be read or written."""

    exit_status = 4


class BadImage(SdamdError):
    """The model's output is NaN, constant or black, also after decoding again in float32."""


class Unfinished(SdamdError):
    """The second pass failed, and the message says how; `image` is what the first one made."""

    def __init__(self, why: str, image: "Image") -> None:
        super().__init__(why)
        self.image = image

    def __reduce__(self) -> tuple[type["Unfinished"], tuple[str, "Image"]]:
        """Rebuild with the picture, so that it crosses a process boundary whole."""
        return type(self), (str(self), self.image)


class Stopped(Exception):
    """Sampling was stopped between two steps; there is no picture."""


def unknown(name: str, known: Sequence[str], what: str) -> str:
    """The sentence for a name that is not there, with the nearest that are."""
    name = name if len(name) <= 60 else f"{name[:57]}..."
    spelled = {k.casefold(): k for k in known}
    nearest = [spelled[k] for k in get_close_matches(name.casefold(), spelled, n=3, cutoff=0.5)]
    more = f" and {len(known) - 12} more" if len(known) > 12 else ""
    all_known = f"known: {', '.join(known[:12])}{more}"
    hint = f"the nearest: {', '.join(nearest)}" if nearest else all_known
    return f"{what} {name!r} is not known; {hint}"
