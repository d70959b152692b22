"""What a picture's file says about how it was made: our JSON, and the `parameters` text.

The JSON (`to_json`, `from_json`) is exact and is what sdamd itself reads. The `parameters` text
(`to_parameters`, `split_parameters`) is the form that other tools and picture sites read; it has
no way to tell a prompt's own line `Negative prompt: x` from the start of the negative prompt, so
it is exact for all but such prompts. What its settings mean is in `interchange.parameters`.
Nothing here touches a file.
"""

import json
import re
from dataclasses import MISSING, dataclass, fields
from typing import NoReturn, TypeAlias

from sdamd import scheduler
from sdamd.errors import BadMetadata, BadRequest
from sdamd.request import HiresUpscaler, Job, MaskFill, MaskMode, Request

SCHEMA = 1
"""Of the JSON. A higher one is refused; a field that a schema-1 record lacks has its default."""

JSON_KEY = "sdamd"
PARAMETERS_KEY = "parameters"

TEXT_MAX_BYTES = 1024 * 1024
"""The longest text written or read.

Source: `PIL.PngImagePlugin.MAX_TEXT_CHUNK`, above which Pillow refuses compressed text
(python-pillow/Pillow#8363). Two prompts of 64 KiB take at most 768 KiB as escaped JSON.
"""

EMBEDDED = "embedded"
"""What the embedded model is called in a record; its name in a request is empty."""

# Our sampler names are those of A1111 but for this one; both are read.
_SAMPLER_OF = {"PNDM": "PLMS"}

# These step through the training timesteps and take no schedule type in A1111, which then
# writes Automatic. For the others Automatic means another schedule per sampler, so it is
# never written for them.
_WITHOUT_SCHEDULE = frozenset({"DDIM", "DDPM", "PLMS", "UniPC"})

_NEGATIVE = "Negative prompt:"

# What A1111 calls these choices; our network is the same as the one of this name.
HIRES_UPSCALERS = {
    HiresUpscaler.NETWORK: "R-ESRGAN AnimeVideo",
    HiresUpscaler.LANCZOS: "Lanczos",
    HiresUpscaler.LATENT: "Latent",
    HiresUpscaler.LATENT_BICUBIC: "Latent (bicubic)",
    HiresUpscaler.LATENT_NEAREST: "Latent (nearest-exact)",
}
MASK_MODES = {MaskMode.WHITE: "Inpaint masked", MaskMode.BLACK: "Inpaint not masked"}
MASK_FILLS = {
    MaskFill.ORIGINAL: "original",
    MaskFill.FILL: "fill",
    MaskFill.NOISE: "latent noise",
    MaskFill.ZERO: "latent nothing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A job and what else decided the pixels or is of use to a reader.

    `checkpoint_sha256` is 64 hexadecimal digits, or empty where there is no single file to hash.
    `device`, `dtype` and `vae_dtype` are notes for people: rounding differs between them.
    `created` is ISO 8601 with the zone. Empty text means not known. `together` is how many
    pictures shared the pass, since kernels round differently by the size of a batch. `means` says
    what was done to make the picture fit the memory, in words; empty means nothing.
    """

    job: Job
    version: str
    checkpoint_name: str
    checkpoint_sha256: str = ""
    device: str = ""
    dtype: str = ""
    vae_dtype: str = ""
    created: str = ""
    together: int = 1
    means: str = ""


def to_json(record: Record) -> str:
    """Write the record as JSON in ASCII, which every reader of text in pictures takes alike.

    Raises:
        BadMetadata: the text is longer than what can be read again.
    """
    notes = {f.name: getattr(record, f.name) for f in fields(record) if f.name != "job"}
    values = {"schema": SCHEMA, **notes, "job": record.job.to_dict()}
    text = json.dumps(values, allow_nan=False)
    _check_size(text)
    return text


def from_json(text: str) -> Record:
    """Read what `to_json` wrote; keys that are not known are ignored, but not within the job.

    A job's unknown key would change the pixels, so a record that has one cannot be made again.

    Raises:
        BadMetadata: not JSON, not a record, of a newer schema, or a field is out of its range.
    """
    _check_size(text)
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise BadMetadata(f"the record is not JSON: {reason}") from error
    if not isinstance(values, dict):
        raise BadMetadata(f"the record is a JSON {type(values).__name__}; expected an object")
    version = values.get("version")
    _check_schema(values.get("schema"), version)
    known = {f.name for f in fields(Record)}
    notes = {name: value for name, value in values.items() if name in known and name != "job"}
    problems = [
        f"{name} is {_shown(value)}; allowed is text"
        for name, value in notes.items()
        if not isinstance(value, str) and name != "together"
    ]
    together = notes.get("together", 1)
    if isinstance(together, bool) or not isinstance(together, int) or not 1 <= together <= 64:
        problems.append(f"together is {_shown(together)}; allowed 1 to 64")
    if problems:
        raise BadMetadata("\n".join(problems))
    notes = {"version": "", "checkpoint_name": ""} | notes
    return Record(job=_read_job(values.get("job")), **notes)


def to_parameters(record: Record) -> str:
    """Write the text that A1111, its forks and the picture sites read.

    `Size` is what the model worked at; `Upscale` is ours, the factor of the finished picture.
    """
    job = record.job
    sampler, schedule_type = _sampler(job.scheduler)
    settings = {
        "Steps": str(job.steps),
        "Sampler": sampler,
        "Schedule type": schedule_type,
        "CFG scale": _number(job.guidance_scale),
        "Seed": str(job.seed),
        "Size": f"{job.width}x{job.height}",
        "Model hash": record.checkpoint_sha256[:10].lower(),
        "Model": record.checkpoint_name or job.checkpoint or EMBEDDED,
        **_second_pass(job),
        **_inpainting(job),
        # A1111 takes the noise to be of the GPU unless told; ours is drawn on the CPU.
        "RNG": "CPU",
        "Upscale": str(job.upscale) if job.upscale > 1 else "",
        # Not `v0.1.0`: A1111 would take that for its own and turn on its old behaviours.
        "Version": f"sdamd {record.version}",
    }
    lines = [job.prompt]
    if job.negative_prompt:
        lines.append(f"{_NEGATIVE} {job.negative_prompt}")
    lines.append(", ".join(f"{key}: {_quoted(value)}" for key, value in settings.items() if value))
    # A file's name may hold bytes that are not text; they cannot be written into a picture.
    return "\n".join(lines).strip().encode("utf-8", "replace").decode()


def _second_pass(job: Job) -> dict[str, str]:
    """A second pass, or what is drawn over an init image; A1111 has one strength for either."""
    if job.hires_scale <= 1:
        return {} if job.strength is None else {"Denoising strength": _number(job.strength)}
    sampler, schedule_type = _sampler(job.hires_scheduler or job.scheduler)
    again = job.hires_scheduler in {None, job.scheduler}
    guidance = job.hires_guidance_scale
    return {
        "Denoising strength": _number(job.hires_strength),
        "Init strength": "" if job.strength is None else _number(job.strength),
        "Hires upscale": _number(job.hires_scale),
        "Hires steps": str(job.hires_steps or ""),
        "Hires upscaler": HIRES_UPSCALERS[HiresUpscaler(job.hires_upscaler)],
        "Hires sampler": "" if again else sampler,
        "Hires schedule type": "" if again else schedule_type,
        "Hires CFG Scale": "" if guidance in {None, job.guidance_scale} else _number(guidance or 0),
        "Hires tile": str(job.hires_tile or ""),
    }


def _inpainting(job: Job) -> dict[str, str]:
    sides = ("left", "right", "top", "bottom")
    added = {side: getattr(job, f"outpaint_{side}") for side in sides}
    outpaint = ", ".join(f"{side} {pixels}" for side, pixels in added.items() if pixels)
    tile = "" if job.denoise_tile is None else str(job.denoise_tile)
    if job.mask_image is None:
        return {"Outpaint": outpaint, "Denoise tile": tile}
    padding = job.mask_padding
    return {
        "Mask blur": str(job.mask_blur),
        "Mask mode": MASK_MODES[MaskMode(job.mask_mode)],
        "Masked content": MASK_FILLS[MaskFill(job.mask_fill)],
        "Inpaint area": "Whole picture" if padding is None else "Only masked",
        "Masked area padding": "" if padding is None else str(padding),
        "Outpaint": outpaint,
        "Denoise tile": tile,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """A `parameters` text in its parts.

    `settings` are in their order, and a key may stand twice; `rest` is what follows them.
    """

    prompt: str
    negative_prompt: str
    settings: tuple[tuple[str, str], ...]
    rest: str = ""


def split_parameters(text: str) -> Parameters:
    """Cut a `parameters` text, ours or another tool's.

    The settings are looked for from the end, so that further lines may follow them; a quoted
    value may hold line breaks; the whole may stand on one line.

    Raises:
        BadMetadata: it is too long, or there are no settings in it.
    """
    _check_size(text)
    text = text.replace("\r\n", "\n").strip()
    start, end, settings = _find_settings(text)
    head, rest = text[:start].rstrip(), text[end:].strip()
    parting = re.search(rf"^[ \t]*{_NEGATIVE}", head, re.MULTILINE)
    if parting is None and text[:start].rpartition("\n")[2].strip():
        # The settings begin within a line, so another tool joined the lines.
        parting = re.search(_NEGATIVE, head)
    prompt, negative_prompt = head, ""
    if parting is not None:
        prompt = head[: parting.start()].rstrip()
        negative_prompt = head[parting.end() :].strip()
    return Parameters(prompt=prompt, negative_prompt=negative_prompt, settings=settings, rest=rest)


def _read_job(values: object) -> Job:
    """Check a job read from outside by the limits of the request that it came from."""
    if not isinstance(values, dict):
        raise BadMetadata("the record has no job")
    rest = dict(values)
    index = rest.pop("index", 0)
    if type(index) is not int or index < 0:
        raise BadMetadata(f"index is {_shown(index)}; allowed is a whole number from 0")
    try:
        request = Request.from_dict(rest)
    except BadRequest as error:
        raise BadMetadata(f"the record's job cannot be made again: {error}") from error
    decided = {
        f.name: value
        for f in fields(Job)
        if f.name != "index" and (value := getattr(request, f.name)) is not None
    }
    missing = [
        f.name
        for f in fields(Job)
        if f.name not in decided and f.name != "index" and f.default is MISSING
    ]
    if missing:
        raise BadMetadata(f"the record's job lacks {', '.join(missing)}")
    try:
        return Job.from_dict({"index": index, **decided})
    except BadRequest as error:
        raise BadMetadata(f"the record's job cannot be made again: {error}") from error


def _check_schema(schema: object, version: object) -> None:
    if type(schema) is not int or schema < 1:
        raise BadMetadata(f"the record's schema is {_shown(schema)}; allowed is 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise BadMetadata(
            f"the record has schema {schema}, written by sdamd {version}; this sdamd reads up to "
            f"schema {SCHEMA}: update sdamd to read it"
        )


def _check_size(text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > TEXT_MAX_BYTES:
        raise BadMetadata(f"the record is {size} bytes; allowed at most {TEXT_MAX_BYTES}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _number(value: float) -> str:
    """The shortest text that reads back as the same number: `7`, `7.5`."""
    return str(int(value)) if value == int(value) else repr(value)


def _sampler(name: str) -> tuple[str, str]:
    """A1111's sampler and schedule type for a scheduler such as `DPM++ 2M Karras`."""
    try:
        sampler, schedule = scheduler.parse(name)
    except BadRequest:
        return name, ""  # of a record that another version of sdamd wrote
    other_name = _SAMPLER_OF.get(sampler.name, sampler.name)
    return other_name, "Automatic" if other_name in _WITHOUT_SCHEDULE else str(schedule)


def _quoted(value: str) -> str:
    """Quote a value as the readers expect it: as JSON text, and only where it is needed."""
    # A value that begins with a quotation mark or bracket would be taken for a quoted one.
    needed = any(mark in value for mark in ",:\n\r") or value[0] in '"[{' or value != value.strip()
    return json.dumps(value, ensure_ascii=False) if needed else value


_KEY = re.compile(r"[ \t]*(\w[\w \-/]+):[ \t]*")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"(?=[ \t]*(?:,|\n|\Z))', re.DOTALL)
_BARE = re.compile(r"[^,\n]*")
_BRACKET = re.compile(r'"(?:\\.|[^"\\\n])*"|[\[\]{}\n]')


_Settings: TypeAlias = tuple[tuple[str, str], ...]


def _find_settings(text: str) -> tuple[int, int, _Settings]:
    """Where the settings begin and end, and what they are.

    At least three settings make a settings line; fewer are words of the prompt.
    """
    last_line = text.rfind("\n") + 1
    starts = [match.start() for match in re.finditer(r"^[ \t]*Steps:", text, re.MULTILINE)]
    joined = [match.start() for match in re.finditer(r"\bSteps:[ \t]*\d+[ \t]*,", text)]
    for start in (*reversed(starts), last_line, *reversed(joined)):
        if start == last_line and start not in starts and joined and joined[-1] > start:
            continue  # the last line holds more than settings
        end, settings = _settings(text, start)
        if len(settings) >= 3:
            return start, end, settings
    raise BadMetadata("the parameters text is not understood: it has no line of settings")


def _settings(text: str, position: int) -> tuple[int, _Settings]:
    """The settings from `position` to the end of their line, and where that is.

    A value is quoted (then it may hold line breaks), in brackets, or all up to the next comma.
    """
    found: list[tuple[str, str]] = []
    brackets_close = True  # once one does not, no other is tried: hostile text stays cheap
    while position < len(text) and text[position] != "\n":
        if key := _KEY.match(text, position):
            position = key.end()
            value = None
            if quoted := _QUOTED.match(text, position):
                value, position = _unquoted(quoted[0]), quoted.end()
            elif brackets_close and text[position : position + 1] in ("[", "{"):
                end = _bracket_end(text, position)
                brackets_close = end is not None
                value, position = (text[position:end], end) if end else (None, position)
            if value is None:
                value = _bare(text, position).strip()
            if value:
                found.append((key[1].rstrip(), value))
        position += len(_bare(text, position)) + 1
        if text[position - 1 : position] == "\n":
            break
    return position, tuple(found)


def _bare(text: str, position: int) -> str:
    """All up to the next comma or the end of the line."""
    bare = _BARE.match(text, position)
    assert bare is not None  # it also matches nothing
    return bare[0]


def _bracket_end(text: str, position: int) -> int | None:
    """Where the bracket at `position` is closed on its line; raw JSON is written unquoted."""
    depth = 0
    for mark in _BRACKET.finditer(text, position):
        if mark[0] == "\n":
            return None
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return mark.end()
    return None


def _unquoted(text: str) -> str:
    try:
        # Some tools leave line breaks and tabs unescaped.
        value = json.loads(text, strict=False)
    except ValueError:
        return text
    return value if isinstance(value, str) else text
