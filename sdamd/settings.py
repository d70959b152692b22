"""What is about this machine: folders, device and budget. Defaults < file < SDAMD_* < flags."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from platformdirs import user_data_path

from sdamd.errors import BadRequest, StorageError, unknown

DEVICES = (
    "allowed auto, cpu, rocm, directml, directml-cpu, the index of a GPU or a part of its name"
)
DEFAULT_FILENAME = "[number]-[seed]-[prompt]"


class Dtype(StrEnum):
    """The type in which the UNet computes; `auto` is the widest that is fast on the device."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Attention(StrEnum):
    """How the UNet attends; `auto` is what works on the device. Pictures differ by rounding."""

    AUTO = "auto"
    FUSED = "fused"
    CHUNKED = "chunked"
    SLICED = "sliced"
    XFORMERS = "xformers"
    FLASH = "flash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where things are and what this machine runs on; nothing here is meant to change a picture.

    `device` is what `hardware.device.choose_device` takes. `batch_size` is how many pictures share
    one pass; 0 leaves it to the plan. `output` empty means `home/outputs`.
    """

    home: Path
    output: str = ""
    filename: str = DEFAULT_FILENAME
    device: str = "auto"
    dtype: Dtype = Dtype.AUTO
    attention: Attention = Attention.AUTO
    batch_size: int = 0
    in_process: bool = False

    def __post_init__(self) -> None:
        problems = []
        if not self.device.strip():
            problems.append(f"device is {self.device!r}; {DEVICES}")
        if not 0 <= self.batch_size <= 64:
            problems.append(f"batch_size is {self.batch_size}; allowed 0 (automatic) to 64")
        if problems:
            raise BadRequest(*problems)

    @property
    def outputs(self) -> Path:
        """The folder of finished pictures."""
        return Path(self.output).expanduser() if self.output else self.home / "outputs"

    @property
    def models(self) -> Path:
        """The folder of checkpoints."""
        return self.home / "models"

    @property
    def cache(self) -> Path:
        """The folder of what can be made again."""
        return self.home / "cache"

    @classmethod
    def load(
        cls, flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
    ) -> Self:
        """Settings from `settings.toml` in the data folder, SDAMD_* variables and flags.

        Raises:
            BadRequest: with every wrong value at once, and where it came from.
            StorageError: if the file is there and cannot be read.
        """
        environ = os.environ if environ is None else environ
        flags = {k: v for k, v in (flags or {}).items() if v is not None}
        home = Path(str(flags.get("home") or environ.get("SDAMD_HOME") or user_data_path("sdamd")))
        home = home.expanduser().absolute()
        names = {f.name for f in fields(cls)} - {"home"}
        problems: list[str] = []
        settings = cls(home=home)
        # SDAMD_HOME was read above; an unknown SDAMD_ variable is most likely a typing error.
        layers = (
            (str(home / "settings.toml"), _read_file(home / "settings.toml")),
            ("the environment", {
                k.removeprefix("SDAMD_").lower(): v
                for k, v in environ.items() if k.startswith("SDAMD_") and k != "SDAMD_HOME"
            }),
            ("the command line", {k: v for k, v in flags.items() if k != "home"}),
        )  # fmt: skip
        for source, values in layers:
            for name, value in values.items():
                if name not in names:
                    problems.append(f"{unknown(name, sorted(names), 'setting')} (in {source})")
                    continue
                try:
                    given: dict[str, Any] = {name: _parse(name, value)}
                    settings = replace(settings, **given)
                except BadRequest as error:
                    problems.append(f"{error} (in {source})")
        if problems:
            raise BadRequest(*problems)
        return settings


def _read_file(path: Path) -> dict[str, Any]:
    try:
        # With or without the mark that Windows' editors put in front of UTF-8.
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} is not valid TOML: {error}") from error


def _parse(name: str, value: object) -> object:
    if name == "dtype":
        if value in list(Dtype):
            return Dtype(str(value))
        raise BadRequest(f"dtype is {value!r}; allowed {', '.join(Dtype)}")
    if name == "attention":
        if value in list(Attention):
            return Attention(str(value))
        raise BadRequest(f"attention is {value!r}; allowed {', '.join(Attention)}")
    if name == "batch_size":
        text = str(value).strip()
        if isinstance(value, bool) or not (text.isascii() and text.isdigit() and len(text) < 9):
            raise BadRequest(f"batch_size is {value!r}; allowed 0 (automatic) to 64")
        return int(text)
    if name == "in_process":
        if str(value).lower() in ("1", "true", "yes", "0", "false", "no"):
            return str(value).lower() in ("1", "true", "yes")
        raise BadRequest(f"in_process is {value!r}; allowed true or false")
    # A file may give the index of a GPU as a number.
    if isinstance(value, str) or (name == "device" and type(value) is int):
        return str(value)
    raise BadRequest(f"{name} is {value!r}; allowed is text")
