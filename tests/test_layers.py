"""What may be loaded by what: the fast commands stay fast, and detection works without torch."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sdamd

PACKAGE = Path(sdamd.__file__).parent
HEAVY = {"torch", "diffusers", "transformers", "accelerate", "gradio", "onnxruntime", "scipy",
         "torchsde", "safetensors"}  # fmt: skip
BEYOND_THE_DOOR = {"sampling", "upscale"}
"""What `open_backend` loads, beside the modules of `backends` but for `backend` itself."""


def modules() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        name = name.removesuffix(".__init__")
        part = (*name.split("."), "")[1]
        if part in BEYOND_THE_DOOR or name.endswith("__main__"):
            continue
        if part == "backends" and name not in {"sdamd.backends", "sdamd.backends.backend"}:
            continue
        if name == "sdamd.hardware.dxgi" and sys.platform != "win32":
            continue  # it loads libraries of Windows
        yield name


def loaded_by(*names: str) -> set[str]:
    """Import modules in a fresh process that cannot import anything heavy; say what was loaded."""
    code = (
        "import sys\n"
        f"for name in {sorted(HEAVY)!r}: sys.modules[name] = None\n"
        f"import {', '.join(names)}\n"
        "print('\\n'.join(name for name, module in sys.modules.items() if module))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_everything_on_this_side_of_the_door_loads_without_torch() -> None:
    """Where torch is missing or broken, sdamd must still say what is wrong."""
    names = list(modules())
    assert {"sdamd.cli", "sdamd.plan", "sdamd.worker", "sdamd.render"} <= set(names)
    assert set(names) <= loaded_by(*names)


@pytest.mark.parametrize("name", ["sdamd.plan", "sdamd.hardware.detect", "sdamd.request"])
def test_what_decides_loads_no_pictures_either(name: str) -> None:
    assert not {"PIL", "numpy"} & loaded_by(name)


def test_importing_the_command_line_starts_nothing() -> None:
    loaded = loaded_by("sdamd.cli")
    assert "sdamd.request" in loaded
    assert not {"sdamd.studio", "sdamd.gallery", "PIL"} & loaded  # each command's own
    assert "ui" not in {name.partition(".")[0] for name in loaded}
