"""Reads and checks the header of a `.safetensors` file, without any library and any weight.

The texts of the safetensors library's own errors change from version to version and do not tell
one kind of damage from another, so the cause is found here. Source of the format: the 8-byte
little-endian length of a JSON header, the header, then the tensors without gaps
(https://github.com/huggingface/safetensors#format).
"""

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from sdamd.errors import BadCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One entry of a header: `begin` and `end` count bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a `.safetensors` file says about itself; `bytes` is the size of the whole file."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    bytes: int


HEADER_LIMIT: Final = 100_000_000
"""The format's own limit in bytes. Source: safetensors, `MAX_HEADER_SIZE`."""

_BITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
_DTYPES: Final[Mapping[str, str]] = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
PICKLE: Final = (
    "a pickle, which can run any code when it is opened; sdamd never opens one. "
    "Allowed is .safetensors: convert it with a tool that you trust, or download that version"
)
_MAGIC: Final[Sequence[tuple[bytes, str]]] = (
    (b"PK\x03\x04", f"a zip archive, such as torch.save makes: {PICKLE}"),
    (b"GGUF", "a GGUF file of quantised weights; allowed is .safetensors"),
    (b"ggml", "a GGML file of quantised weights; allowed is .safetensors"),
    (b"7z\xbc\xaf", "a 7z archive; allowed is the .safetensors file inside it"),
    (b"Rar!", "a RAR archive; allowed is the .safetensors file inside it"),
    (b"\x1f\x8b", "a gzip archive; allowed is the .safetensors file inside it"),
    (b"\x89HDF", "a Keras (HDF5) file; allowed is .safetensors"),
    (b"\x89PNG", "a picture; allowed is .safetensors"),
    (b"\xff\xd8\xff", "a picture; allowed is .safetensors"),
)
_PICKLE_PROTOCOLS: Final = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))


def read_header(path: Path) -> Header:
    """Read and check the header of a `.safetensors` file; the weights stay unread.

    Every byte of the file must be accounted for, so a download that stopped is found here.

    Raises:
        BadCheckpoint: with the likely cause.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(4096)
        length = int.from_bytes(start[:8], "little")
        # The length may begin with any byte, so a foreign file's mark counts only where the
        # header cannot be one.
        if length > HEADER_LIMIT or start[8:9] != b"{":
            _refuse_foreign(path, start, size)
        if length > HEADER_LIMIT:
            raise BadCheckpoint(
                f"{path} is not a .safetensors file: its first 8 bytes give a header of {length} "
                f"bytes; allowed at most {HEADER_LIMIT}"
            )
        if 8 + length > size:
            raise BadCheckpoint(
                f"{path} is cut off: {size} bytes are there, and the header alone needs "
                f"{8 + length}; download it again"
            )
        file.seek(8)
        text = file.read(length)
    entries = _parse_header(path, text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise damaged(path, "__metadata__ is not an object")
    tensors = {name: _parse_tensor(path, name, entry) for name, entry in entries.items()}
    _check_coverage(path, tensors, size - 8 - length)
    return Header(tensors=tensors, metadata={k: str(v) for k, v in metadata.items()}, bytes=size)


def _refuse_foreign(path: Path, start: bytes, size: int) -> None:
    """Name the kind of file that this is instead, if its first bytes tell."""
    if size == 0:
        raise BadCheckpoint(f"{path} is empty (0 bytes); download it again")
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"version https://git-lfs"):
        raise BadCheckpoint(lfs_sentence(path, start))
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise BadCheckpoint(
            f"{path} is an HTML page, not a model ({size} bytes): the download needs a login, or "
            "was of the page about the file; download the file itself"
        )
    for magic, what in _MAGIC:
        if start.startswith(magic):
            raise BadCheckpoint(f"{path} is {what}")
    if start.startswith(_PICKLE_PROTOCOLS) and start[2:8].strip(b"\0"):
        raise BadCheckpoint(f"{path} is {PICKLE}")
    if text.startswith((b"{", b"[")):
        shown = " ".join(start[:200].decode("utf-8", "replace").split())
        raise BadCheckpoint(
            f"{path} is JSON text, not a model; a server's error message, perhaps: {shown}"
        )
    if not start.strip(b"\0"):
        raise BadCheckpoint(
            f"{path} begins with {len(start)} zero bytes of {size}: the download only reserved "
            "the space; download it again"
        )
    if size < 10:
        raise BadCheckpoint(
            f"{path} has {size} bytes, too few for a .safetensors file; download it again"
        )


def lfs_sentence(path: Path, start: bytes) -> str:
    """Say that `path` is a pointer, and how large the file is that it stands for."""
    found = re.search(rb"^size (\d+)$", start, re.MULTILINE)
    wanted = f" of {found[1].decode()} bytes" if found else ""
    return (
        f"{path} is a Git LFS pointer, not the file{wanted} that it stands for; "
        "run `git lfs pull` in that folder, or download the file itself"
    )


def damaged(path: Path, what: str) -> BadCheckpoint:
    """Make the error for a file that is of the right kind and broken."""
    return BadCheckpoint(f"{path} is damaged: {what}; download it again")


def _parse_header(path: Path, text: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise damaged(path, f"its header names {twice!r} twice")
        return entries

    if not text.startswith(b"{"):
        raise BadCheckpoint(f"{path} is not a .safetensors file: its header is not a JSON object")
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is not JSON ({error})") from error
    assert isinstance(entries, dict)
    return entries


def _parse_tensor(path: Path, name: str, entry: object) -> Tensor:
    """Check one entry: known dtype, whole sizes, and as many bytes as its shape needs."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            numbers = [*shape, begin, end]
        case _:
            raise damaged(path, f"its header describes {name!r} incompletely")
    if len(numbers) > 16 or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise damaged(path, f"its header gives {name!r} sizes that no tensor has")
    if dtype not in _BITS:
        raise BadCheckpoint(f"{path} holds {name!r} as {dtype}; allowed are {', '.join(_BITS)}")
    tensor = Tensor(dtype=dtype, shape=tuple(shape), begin=begin, end=end)
    if tensor.end - tensor.begin != tensor.size * _BITS[dtype] // 8:
        raise damaged(
            path,
            f"{name!r} of shape {list(tensor.shape)} in {dtype} takes "
            f"{tensor.size * _BITS[dtype] // 8} bytes, its header says {end - begin}",
        )
    return tensor


def _check_coverage(path: Path, tensors: Mapping[str, Tensor], available: int) -> None:
    """The tensors must fill the rest of the file: no gap, no overlap, no byte left."""
    spans = sorted((tensor.begin, tensor.end, name) for name, tensor in tensors.items())
    if not spans:
        raise damaged(path, "it holds no tensors")
    if spans[0][0] != 0:
        raise damaged(path, f"{spans[0][0]} bytes before {spans[0][2]!r} belong to no tensor")
    for (_, end, name), (begin, _, following) in pairwise(spans):
        if begin != end:
            what = "overlap" if begin < end else "leave a gap"
            raise damaged(path, f"{name!r} and {following!r} {what} at byte {min(begin, end)}")
    needed = spans[-1][1]
    if available < needed:
        raise BadCheckpoint(
            f"{path} is cut off: {available} of {needed} bytes of weights are there "
            f"({100 * available // needed} %); download it again"
        )
    if available > needed:
        raise damaged(path, f"{available - needed} bytes follow the last tensor")


def stored_dtype(tensors: Iterable[Tensor]) -> str:
    """Name the dtype of most bytes, in torch's spelling."""
    sizes: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.end - tensor.begin
    most = max(sizes, key=lambda dtype: sizes[dtype])
    return _DTYPES.get(most, most.lower())
