"""What a picture's file says about how it was made: our JSON, and the `parameters` text.

The JSON (`to_json`, `from_json`) is exact and is what sdamd itself reads. The `parameters` text
(`to_parameters`, `from_parameters`) is the form that other tools and picture sites read; it has
no way to tell a prompt's own line `Negative prompt: x` from the start of the negative prompt, so
it is exact for all but such prompts. Nothing here touches a file.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NoReturn

from sdamd import scheduler
from sdamd.errors import BadMetadata, BadRequest
from sdamd.request import Job, Request
from sdamd.scheduler import Schedule

SCHEMA = 1
"""Of the JSON. A higher one is refused; a field that a schema-1 record lacks has its default."""

JSON_KEY = "sdamd"
PARAMETERS_KEY = "parameters"

TEXT_MAX_BYTES = 1024 * 1024
"""The longest text written or read.

Source: `PIL.PngImagePlugin.MAX_TEXT_CHUNK`, above which Pillow refuses compressed text
(python-pillow/Pillow#8363). Two prompts of 64 KiB take at most 768 KiB as escaped JSON.
"""

_EMBEDDED = "embedded"

# Our sampler names are those of A1111 but for this one; both are read.
_SAMPLER_OF = {"PNDM": "PLMS"}

# These step through the training timesteps and take no schedule type in A1111, which then
# writes Automatic. For the others Automatic means another schedule per sampler, so it is
# never written for them.
_WITHOUT_SCHEDULE = frozenset({"DDIM", "DDPM", "PLMS", "UniPC"})

_OTHER_TOOLS = {
    "invokeai_metadata": "InvokeAI",
    "sd-metadata": "InvokeAI",
    "fooocus_scheme": "Fooocus",
    "workflow": "ComfyUI",
    "prompt": "ComfyUI",
}
"""Text keys that tell which tool wrote a picture's record, most telling first."""

_NEGATIVE = "Negative prompt:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A job and what else decided the pixels or is of use to a reader.

    `checkpoint_sha256` is 64 hexadecimal digits, or empty where there is no single file to hash.
    `device`, `dtype` and `vae_dtype` are notes for people: rounding differs between them.
    `created` is ISO 8601 with the zone. Empty text means not known. `together` is how many
    pictures shared the pass, since kernels round differently by the size of a batch.
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
        "Model": record.checkpoint_name or job.checkpoint or _EMBEDDED,
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


def from_parameters(text: str) -> dict[str, object]:
    """Read the fields of a request out of a `parameters` text, ours or another tool's.

    The settings are looked for from the end, so that further lines may follow them; a quoted
    value may hold line breaks; the whole may stand on one line. Values are left as text for
    `Request.from_dict`; settings that no field stands for are left out.

    Raises:
        BadMetadata: there are no settings in the text.
    """
    _check_size(text)
    prompt, negative_prompt, settings = split_parameters(text)
    asked: dict[str, object] = {"prompt": prompt, "negative_prompt": negative_prompt}
    for key, name in (
        ("Steps", "steps"),
        ("CFG scale", "guidance_scale"),
        ("Seed", "seed"),
        ("Model", "checkpoint"),
    ):
        if key in settings:
            asked[name] = settings[key]
    # Absent means that the picture is as large as `Size` says, whatever a checkpoint's default.
    asked["upscale"] = settings.get("Upscale", "1")
    if asked.get("checkpoint") == _EMBEDDED:
        asked["checkpoint"] = ""
    if size := re.fullmatch(r"(\d+)x(\d+)", settings.get("Size", "")):
        asked |= {"width": size[1], "height": size[2]}
    if "Sampler" in settings:
        asked["scheduler"] = _scheduler(settings["Sampler"], settings.get("Schedule type", ""))
    return asked


def split_parameters(text: str) -> tuple[str, str, dict[str, str]]:
    """Cut a `parameters` text into the prompt, the negative prompt and the settings.

    Raises:
        BadMetadata: there are no settings in the text.
    """
    text = text.replace("\r\n", "\n").strip()
    start, settings = _find_settings(text)
    head = text[:start].rstrip()
    parting = re.search(rf"^[ \t]*{_NEGATIVE}", head, re.MULTILINE)
    if parting is None and text[:start].rpartition("\n")[2].strip():
        # The settings begin within a line, so another tool joined the lines.
        parting = re.search(_NEGATIVE, head)
    if parting is None:
        return head, "", settings
    return head[: parting.start()].rstrip(), head[parting.end() :].strip(), settings


def request_from_texts(texts: Mapping[str, str]) -> Request:
    """The request that makes a picture again, from the texts of its file.

    Our JSON is preferred; a damaged one is an error, since the `parameters` text beside it may
    say less.

    Raises:
        BadMetadata: no text that can be read, or a value in it is out of its range.
    """
    if JSON_KEY in texts:
        return from_json(texts[JSON_KEY]).job.to_request()
    parameters = texts.get(PARAMETERS_KEY, "")
    is_json = parameters.lstrip().startswith("{")
    tool = next((tool for key, tool in _OTHER_TOOLS.items() if key in texts), None)
    if is_json or (tool and not parameters):
        raise BadMetadata(
            f"the record is of {tool or 'another tool'}, in a form that sdamd cannot read"
        )
    if not parameters:
        raise BadMetadata("there is no record of how the picture was made")
    try:
        return Request.from_dict(from_parameters(parameters))
    except BadRequest as error:
        raise BadMetadata(f"the record asks for what is not possible: {error}") from error


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
    decided = {f.name: getattr(request, f.name) for f in fields(Job) if f.name != "index"}
    missing = [name for name, value in decided.items() if value is None]
    if missing:
        raise BadMetadata(f"the record's job lacks {', '.join(missing)}")
    return Job(index=index, **decided)


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


def _scheduler(sampler: str, schedule_type: str) -> str:
    """The scheduler's name for A1111's sampler and schedule type.

    Before A1111 1.9 there was no type and a schedule stood at the end of the sampler's name,
    where it still counts. A name that is not known is left for the request's own check.
    """
    name = sampler if schedule_type == "Automatic" else f"{sampler} {schedule_type}".rstrip()
    try:
        if scheduler.parse(sampler)[1] is not Schedule.UNIFORM:
            return scheduler.resolve(sampler)
        if schedule_type == "Automatic":
            return scheduler.automatic(sampler)
        return scheduler.resolve(name)
    except BadRequest:
        return name


def _quoted(value: str) -> str:
    """Quote a value as the readers expect it: as JSON text, and only where it is needed."""
    # A value that begins with a quotation mark or bracket would be taken for a quoted one.
    needed = any(mark in value for mark in ",:\n\r") or value[0] in '"[{' or value != value.strip()
    return json.dumps(value, ensure_ascii=False) if needed else value


_KEY = re.compile(r"[ \t]*(\w[\w \-/]+):[ \t]*")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"(?=[ \t]*(?:,|\n|\Z))', re.DOTALL)
_BARE = re.compile(r"[^,\n]*")
_BRACKET = re.compile(r'"(?:\\.|[^"\\\n])*"|[\[\]{}\n]')


def _find_settings(text: str) -> tuple[int, dict[str, str]]:
    """Where the settings begin, and what they are.

    At least three settings make a settings line; fewer are words of the prompt.
    """
    last_line = text.rfind("\n") + 1
    starts = [match.start() for match in re.finditer(r"^[ \t]*Steps:", text, re.MULTILINE)]
    joined = [match.start() for match in re.finditer(r"\bSteps:[ \t]*\d+[ \t]*,", text)]
    for start in (*reversed(starts), last_line, *reversed(joined)):
        if start == last_line and start not in starts and joined and joined[-1] > start:
            continue  # the last line holds more than settings
        settings = list(_settings(text, start))
        if len(settings) >= 3:
            return start, dict(settings)
    raise BadMetadata("the parameters text is not understood: it has no line of settings")


def _settings(text: str, position: int) -> Iterator[tuple[str, str]]:
    """Yield the settings from `position` to the end of their line.

    A value is quoted (then it may hold line breaks), in brackets, or all up to the next comma.
    """
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
                yield key[1].rstrip(), value
        position += len(_bare(text, position)) + 1
        if text[position - 1 : position] == "\n":
            return


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
