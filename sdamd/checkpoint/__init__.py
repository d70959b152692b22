"""What a checkpoint is, found out from its header alone: no weights are read, nothing is run.

A checkpoint is one `.safetensors` file in the layout of the original training code, or a folder
in the layout of diffusers. `identify` answers in milliseconds for files of any size, and says in
a sentence what is wrong with a file that is none.
"""

from pathlib import Path

from sdamd.checkpoint.family import (
    EPSILON,
    FAMILIES,
    V_PREDICTION,
    Checkpoint,
    Defaults,
    Family,
    Layout,
    Parameters,
)
from sdamd.checkpoint.folder import identify_folder
from sdamd.checkpoint.header import Header, Tensor, read_header
from sdamd.checkpoint.single_file import identify_file
from sdamd.errors import BadCheckpoint

__all__ = [
    "EPSILON",
    "FAMILIES",
    "V_PREDICTION",
    "Checkpoint",
    "Defaults",
    "Family",
    "Header",
    "Layout",
    "Parameters",
    "Tensor",
    "identify",
    "read_header",
]


def identify(path: Path) -> Checkpoint:
    """Say what the model at `path` is, from its header or its configs.

    Raises:
        BadCheckpoint: it is missing, damaged, unsafe, or nothing that sdamd can run.
    """
    try:
        if path.is_dir():
            return identify_folder(path)
        if not path.exists():
            raise BadCheckpoint(f"{path} does not exist")
        if not path.is_file():
            raise BadCheckpoint(f"{path} is neither a file nor a folder")
        return identify_file(path)
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
