"""What is about this machine: folders, device and budget. Defaults < file < SDAMD_* < flags."""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

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


class VramMode(StrEnum):
    """How memory is spared; `auto` is as little as fits, the others are kept to, fit or not."""

    AUTO = "auto"
    FAST = "fast"
    BALANCED = "balanced"
    MINIMAL = "minimal"


class Offload(StrEnum):
    """Where weights wait: on the device, or in RAM by parts (`model`) or layers (`stream`)."""

    AUTO = "auto"
    NONE = "none"
    MODEL = "model"
    STREAM = "stream"


class VaeTiling(StrEnum):
    """Whether the VAE works in tiles, whose seams are blended and not exact."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Storage(StrEnum):
    """In what the UNet's weights are kept; `float8` halves them and loses a little."""

    AUTO = "auto"
    FLOAT8 = "float8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where things are and what this machine runs on; nothing here is meant to change a picture.

    `device` is what `hardware.device.choose_device` takes. `batch_size` is how many pictures share
    one pass; 0 leaves it to the plan, as it does with `vae_tile`, `vae_bands`, `passes` and
    `feed_forward_chunks`, which are as in `plan.Plan`. `output` empty means `home/outputs`.
    `vram_budget_gb` is GiB that a run may take, None what the machine has left; `vram_reserve_gb`
    GiB of it to keep free, None the usual of the system. `round_sizes` lets widths and heights
    be rounded to a multiple of so many pixels, 0 not: the one setting that changes pictures.
    """

    home: Path
    output: str = ""
    filename: str = DEFAULT_FILENAME
    device: str = "auto"
    dtype: Dtype = Dtype.AUTO
    attention: Attention = Attention.AUTO
    batch_size: int = 0
    vram_mode: VramMode = VramMode.AUTO
    vram_budget_gb: float | None = None
    vram_reserve_gb: float | None = None
    offload: Offload = Offload.AUTO
    vae_tiling: VaeTiling = VaeTiling.AUTO
    vae_tile: int = 0
    vae_bands: int = 0
    passes: int = 0
    feed_forward_chunks: int = 0
    storage: Storage = Storage.AUTO
    round_sizes: int = 0
    in_process: bool = False

    def __post_init__(self) -> None:
        problems = []
        if not self.device.strip():
            problems.append(f"device is {self.device!r}; {DEVICES}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and (problem := _NUMBERS[name].problem(name, value)):
                problems.append(problem)
        if self.vae_tile and self.vae_tiling is VaeTiling.NEVER:
            problems.append(
                f"vae_tile is {self.vae_tile} and vae_tiling never; allowed is one of them"
            )
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
    def presets(self) -> Path:
        """The folder of the person's own presets."""
        return self.home / "presets"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """What a setting allows: a range, and 0 where `zero` says what it means.

    `step` is what whole numbers are a multiple of; 0 lets fractions in.
    """

    minimum: float
    maximum: float
    zero: str = "automatic"
    step: int = 1

    @property
    def allowed(self) -> str:
        """The range in words."""
        multiples = f", multiples of {self.step}" if self.step > 1 else ""
        if not self.zero:
            return f"{self.minimum:g} to {self.maximum:g}{multiples}"
        low = f" or {self.minimum:g}" if self.minimum > max(self.step, 1) else ""
        return f"0 ({self.zero}){low} to {self.maximum:g}{multiples}"

    def problem(self, name: str, value: float) -> str | None:
        """Say what is wrong with `value`, or nothing."""
        inside = (value == 0 and self.zero) or self.minimum <= value <= self.maximum
        if inside and (not self.step or value % self.step == 0):
            return None
        return f"{name} is {value}; allowed {self.allowed}"

    def parse(self, name: str, value: object) -> float:
        """Read it from a file, a variable or a flag.

        Raises:
            BadRequest: it is no such number.
        """
        text = str(value).strip()
        wanted = r"[0-9]{1,8}" if self.step else r"[0-9]{1,8}(\.[0-9]{1,8})?"
        if isinstance(value, bool) or not re.fullmatch(wanted, text, re.ASCII):
            raise BadRequest(f"{name} is {value!r}; allowed {self.allowed}")
        number = int(text) if self.step else float(text)
        if problem := self.problem(name, number):
            raise BadRequest(problem)
        return number


_NUMBERS: Final[Mapping[str, Number]] = {
    "batch_size": Number(minimum=1, maximum=64),
    "vram_budget_gb": Number(minimum=0.25, maximum=1024, step=0, zero=""),
    "vram_reserve_gb": Number(minimum=0, maximum=1024, step=0, zero=""),
    "vae_tile": Number(minimum=128, maximum=4096, step=64),
    "vae_bands": Number(minimum=1, maximum=4096),
    "passes": Number(minimum=1, maximum=128),
    "feed_forward_chunks": Number(minimum=1, maximum=64),
    "round_sizes": Number(minimum=8, maximum=512, step=8, zero="as asked"),
}
_CHOICES: Final[Mapping[str, type[StrEnum]]] = {
    "dtype": Dtype, "attention": Attention, "vram_mode": VramMode, "offload": Offload,
    "vae_tiling": VaeTiling, "storage": Storage,
}  # fmt: skip


def parse_number(name: str, value: object, *, shown: str = "") -> float:
    """Read a number that a setting allows; `shown` is what a message calls it.

    Raises:
        BadRequest: it is no such number.
    """
    return _NUMBERS[name].parse(shown or name, value)


def _parse(name: str, value: object) -> object:
    if name in _CHOICES:
        choices = _CHOICES[name]
        if value in list(choices):
            return choices(str(value))
        raise BadRequest(f"{name} is {value!r}; allowed {', '.join(choices)}")
    if name in _NUMBERS:
        return _NUMBERS[name].parse(name, value)
    if name == "in_process":
        if str(value).lower() in ("1", "true", "yes", "0", "false", "no"):
            return str(value).lower() in ("1", "true", "yes")
        raise BadRequest(f"in_process is {value!r}; allowed true or false")
    # A file may give the index of a GPU as a number.
    if isinstance(value, str) or (name == "device" and type(value) is int):
        return str(value)
    raise BadRequest(f"{name} is {value!r}; allowed is text")
