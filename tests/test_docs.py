"""The documents say what the code does: commands parse, shown output is real, tables agree."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from PIL import Image

import sdamd
from scripts import set_up, tiny_pictures
from sdamd import cli, errors
from sdamd.batch import expand
from sdamd.checkpoint import FAMILIES, identify
from sdamd.commands.generate import event_line
from sdamd.errors import BadImage
from sdamd.filename import TOKENS, Pattern
from sdamd.hardware.gpu import ARCHITECTURES, Gpu, Kind
from sdamd.hardware.runtime import Engine, choose_build
from sdamd.models import EMBEDDED
from sdamd.plan import make_plan
from sdamd.render import Failed, Started, Step
from sdamd.request import ALPHA, Job, Request, buckets, limits_of
from sdamd.scheduler import SAMPLERS, Schedule
from sdamd.settings import Settings
from sdamd.studio import Saved

ROOT = Path(__file__).parent.parent
READMES = ("README.md", "README.zh-CN.md")
DOCUMENTS = tuple(path.name for path in sorted(ROOT.glob("*.md")))

FIRST_BLOCK = """\
python3 scripts/start.py generate "mountains by the sea at sunset"
python3 scripts/test.py
"""


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a document: language and content."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a document, as rows of cells; the heading is the first row."""
    found: list[list[list[str]]] = [[]]
    for line in prose(text).splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not all(set(cell) <= {"-", ":"} for cell in cells):
                found[-1].append(cells)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def table_with(name: str, cell: str) -> list[list[str]]:
    """The rows, without the heading, of the table that has `cell` in its first column."""
    (table,) = [t for t in tables(read(name)) if any(row[0] == cell for row in t)]
    return table[1:]


def names_in(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`\n]+)`", text)


# -- the commands ------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """The command lines in a document's blocks, as words; those of other programs are left out."""
    for language, block in blocks(text):
        for line in block.splitlines():
            command = line.removeprefix("$ ") if language == "console" else line
            if language == "sh" or command != line:
                yield shlex.split(command)


def sdamd_arguments(words: list[str]) -> list[str] | None:
    """What sdamd is started with by a command line; None if it is not started."""
    if words[0] == "sdamd":
        return words[1:]
    if words[:2] == ["python3", "scripts/start.py"]:
        options = set_up.parse(words[2:])
        return None if options.setup_only or options.dry_run else list(options.rest)
    assert words[:2] == ["python3", "scripts/test.py"], f"{words} is no command that is tested"
    return None


def every_command() -> list[list[str]]:
    return [words for name in DOCUMENTS for words in commands(read(name))]


def all_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, by its name."""
    (choices,) = (a.choices for a in cli._parser()._actions if isinstance(a.choices, dict))
    return choices


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {o for a in parser._actions for o in a.option_strings if o.startswith("--")} - {"--help"}


def all_flags(parser: argparse.ArgumentParser) -> set[str]:
    """Those of its words too: `batch run --stop-at`."""
    nested = [p for a in parser._actions if isinstance(a.choices, dict) for p in a.choices.values()]
    return flags_of(parser).union(*map(all_flags, nested))


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_a_command_of_a_document_is_understood(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = sdamd_arguments(words)
    if arguments is None:
        return
    asked = cli._parser().parse_args(arguments or ["ui"])
    if arguments and arguments[0] in ("generate", "plan"):
        request = Request.from_dict({f.name: getattr(asked, f.name) for f in fields(Request)})
        Pattern.parse(asked.filename or Settings(home=ROOT).filename)
        monkeypatch.chdir(tmp_path)
        _draw(request)
        assert len(list(expand(request, FAMILIES["sd15"]))) == request.count


def _draw(request: Request) -> None:
    """The pictures that a command names, half white so that they do as masks too."""
    drawn = Image.new("RGB", (512, 512), "black")
    drawn.paste("white", (0, 0, 256, 512))
    for name in (request.init_image, request.mask_image):
        if name and name != ALPHA:
            drawn.save(Path(name).name)


CHEAP = ("plan", "doctor", "models", "--help")
ELSEWHERE = {"--selftest", "--report"}
"""What takes long, or writes into the current folder; these are tried elsewhere."""


@pytest.mark.parametrize(
    "arguments",
    [
        a
        for words in every_command()
        if (a := sdamd_arguments(words)) and a[0] in CHEAP and not ELSEWHERE & {*a}
    ],
    ids=" ".join,
)
def test_a_cheap_command_of_a_document_works(arguments: list[str], tmp_path: Path) -> None:
    done = run_sdamd(arguments, tmp_path)
    assert done.stderr == ""
    assert done.stdout
    # A doctor that finds a fault in the machine at hand is right to say so.
    assert done.returncode in ((0, 3) if arguments == ["doctor"] else (0,))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_shown_output_is_the_real_one(name: str, tmp_path: Path) -> None:
    for language, block in blocks(read(name)):
        if language == "console":
            command, _, shown = block.partition("\n")
            arguments = sdamd_arguments(shlex.split(command.removeprefix("$ ")))
            assert arguments is not None
            assert run_sdamd(arguments, tmp_path).stdout == shown


def run_sdamd(arguments: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    foreign = {name for name in os.environ if name.startswith("SDAMD_")}
    environ = {name: text for name, text in os.environ.items() if name not in foreign}
    return subprocess.run(
        [sys.executable, "-m", "sdamd", *arguments],
        cwd=ROOT,
        env={**environ, "SDAMD_HOME": str(home), "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_flag_that_is_named_exists(name: str) -> None:
    known = {"--setup-only", "--dry-run", "--root", "--platform", "--build", "--extras", "--fast"}
    known |= {"--help", "--version"}.union(*map(all_flags, all_parsers().values()))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", read(name))) <= known


@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_extra_that_is_named_exists(name: str) -> None:
    named = {e for g in re.findall(r"--extras[ =]([\w,-]+)", read(name)) for e in g.split(",")}
    extras = re.search(
        r"^\[project\.optional-dependencies\]\n(.*?)^\[", read("pyproject.toml"),
        re.MULTILINE | re.DOTALL,
    )  # fmt: skip
    assert extras is not None
    assert named <= set(re.findall(r"^([\w-]+) = \[", extras[1], re.MULTILINE))


# -- README in two languages ---------------------------------------------------------------------


@pytest.mark.parametrize("name", READMES)
def test_the_first_block_is_the_two_commands(name: str) -> None:
    assert blocks(read(name))[0] == ("sh", FIRST_BLOCK)


def test_both_readmes_have_the_same_blocks() -> None:
    first, second = (blocks(read(name)) for name in READMES)
    assert first == second


def test_both_readmes_have_the_same_headings_and_pictures() -> None:
    shapes = []
    for name in READMES:
        text = prose(read(name))
        headings = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
        shapes.append((headings, re.findall(r'<img src="([^"]+)"', text)))
    assert shapes[0] == shapes[1]


def test_both_readmes_have_tables_of_the_same_shape_and_names() -> None:
    first, second = (
        [[(len(row), names_in(row[0])) for row in table] for table in tables(read(name))]
        for name in READMES
    )
    assert first == second


def test_both_readmes_have_the_same_figures() -> None:
    """Cells that hold nothing but a figure; `…` is one that nobody has measured."""
    first, second = (
        [cell for t in tables(read(n)) for row in t for cell in row if is_figure(cell)]
        for n in READMES
    )
    assert first == second
    assert not [cell for cell in first if "…" in cell]


def is_figure(cell: str) -> bool:
    return re.fullmatch(r"(…|\d[\d.]*)( ?(%|dB))?", cell) is not None


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_link_or_picture_leads_somewhere(name: str) -> None:
    text = prose(read(name))
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    headings = {slug(h) for h in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    local = [t for t in targets if not t.startswith(("http://", "https://"))]
    assert [t for t in local if t.startswith("#") and t[1:] not in headings] == []
    assert [t for t in local if not t.startswith("#") and not (ROOT / t).exists()] == []


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_assets_readme_names_what_is_there() -> None:
    assets = ROOT / "sdamd" / "assets"
    text = (assets / "README.md").read_text(encoding="utf-8")
    folders = {path.name for path in assets.iterdir() if path.is_dir()}
    assert {name.rstrip("/") for name in re.findall(r"^\| `(\w+/)`", text, re.MULTILINE)} == folders
    assert all((assets / target).is_file() for target in re.findall(r"\]\(([^)]+)\)", text))


# -- README's tables against the code ----------------------------------------------------------


@pytest.mark.parametrize("name", READMES)
def test_the_flags_of_generate_are_all_told(name: str) -> None:
    rows = table_with(name, "`--seed`")
    assert {flag for row in rows for flag in names_in(row[0])} == flags_of(
        all_parsers()["generate"]
    )


@pytest.mark.parametrize("name", READMES)
@pytest.mark.parametrize("field", [f.name for f in fields(Request) if limits_of(f).minimum])
def test_the_limits_of_a_flag_are_told(name: str, field: str) -> None:
    (asked,) = (f for f in fields(Request) if f.name == field)
    (row,) = (r for r in table_with(name, "`--seed`") if r[0] == f"`--{field.replace('_', '-')}`")
    limits = limits_of(asked)
    assert limits.range_text() in row[2]
    assert (str(limits.multiple_of) in row[2].split(limits.range_text())[1]) == bool(
        limits.multiple_of
    )


@pytest.mark.parametrize("name", READMES)
def test_the_architectures_have_the_defaults_that_are_told(name: str) -> None:
    told = [
        [row[0].strip("`") or "tiny", *re.findall(r"\d+", row[2]), *row[3:]]
        for row in table_with(name, "`sdxl`")
    ]
    assert told == [
        [
            family.name,
            *map(str, (family.width, family.height)),
            *(str(n) for n in (family.defaults.upscale,) if n != 1),
            str(family.defaults.steps),
            f"{family.defaults.guidance_scale:g}",
            family.defaults.scheduler,
        ]
        for family in FAMILIES.values()
    ]


@pytest.mark.parametrize("name", READMES)
def test_the_sizes_that_are_offered_are_told(name: str) -> None:
    told = [tuple(row) for row in table_with(name, "1024 x 1024")]
    sizes = [buckets(f.width, f.height) for f in FAMILIES.values() if f.name != "tiny"]
    written = [[f"{width} x {height}" for width, height in offered] for offered in sizes]
    assert sorted(told) == sorted({(native, ", ".join(others)) for native, *others in written})


@pytest.mark.parametrize("name", READMES)
def test_the_schedulers_are_all_told(name: str) -> None:
    free, fixed = table_with(name, "`DDIM`, `DDPM`, `PNDM`, `UniPC`, `LCM`")
    assert set(names_in(free[0])) == {s.name for s in SAMPLERS if len(s.schedules) > 1}
    assert set(names_in(fixed[0])) == {s.name for s in SAMPLERS if len(s.schedules) == 1}
    assert set(names_in(free[1])) == set(Schedule) - {Schedule.UNIFORM}


@pytest.mark.parametrize("name", READMES)
@pytest.mark.parametrize("gfx", ARCHITECTURES)
def test_the_build_for_a_target_is_the_one_that_is_told(name: str, gfx: str) -> None:
    (row,) = (r for r in table_with(name, gpu_rows(name)[0]) if f"`{gfx}`" in r[1])
    kind = Kind.APU if ARCHITECTURES[gfx].apu else Kind.DISCRETE
    gpu = Gpu(index=0, name=gfx, arch=gfx, vram_bytes=2**33, kind=kind)
    linux = choose_build(gpu, "linux", (3, 12))
    assert row[2] == ("CPU" if linux.engine is Engine.CPU else f"`{linux.torch}`")
    assert choose_build(gpu, "windows", (3, 12)).engine is Engine.DIRECTML
    assert row[3] == "DirectML"


def gpu_rows(name: str) -> list[str]:
    return [row[0] for table in tables(read(name)) for row in table if "`gfx1100`" in row[1]]


@pytest.mark.parametrize("name", READMES)
def test_the_exit_statuses_are_those_of_the_errors(name: str) -> None:
    told = {int(row[0]) for row in table_with(name, "130")}
    raised = {e.exit_status for e in vars(errors).values() if hasattr(e, "exit_status")}
    assert told == raised | {0, errors.INTERRUPTED}


@pytest.mark.parametrize("name", READMES)
def test_the_keys_of_the_events_are_those_of_json(name: str) -> None:
    family = FAMILIES["sd15"]
    job: Job = next(iter(expand(Request(), family)))
    plan = make_plan(job, None, identify(EMBEDDED), Settings(home=ROOT))
    events = (
        Started(job=job, plan=plan),
        Step(jobs=(job,), step=1, steps=2),
        Saved(job=job, path=ROOT),
        Failed(job=job, error=BadImage("black")),
    )
    shown = [event_line(event) for event in events]
    expected = [[f"`{e['event']}`", ", ".join(f"`{k}`" for k in e)] for e in shown if e is not None]
    assert table_with(name, "`saved`") == expected


@pytest.mark.parametrize("name", READMES)
def test_the_settings_and_the_tokens_of_file_names_are_all_told(name: str) -> None:
    words = set(names_in(read(name)))
    assert {f.name for f in fields(Settings)} - {"home"} <= words
    bracketed = {w.strip("[]") for w in words if re.fullmatch(r"\[\w+\]", w)}
    assert bracketed - {"word"} == set(TOKENS)  # that one stands for any word of a prompt


@pytest.mark.parametrize("name", READMES)
def test_the_words_that_the_embedded_model_knows_are_those_it_was_drawn(name: str) -> None:
    lines = re.findall(r"^- \*\*[^*]+\*\*(.*(?:\n  .*)*)", read(name), re.MULTILINE)
    told = [[w.strip() for w in re.split("[,、，]", line)] for line in lines]
    assert told[:5] == [
        list(tiny_pictures.LANDSCAPES),
        list(tiny_pictures.TIMES),
        list(tiny_pictures.SHAPES),
        list(tiny_pictures.COLOURS),
        list(tiny_pictures.OBJECTS),
    ]
    assert told[5][:3] == list(tiny_pictures.NUMBERS[2:])


# -- the other documents -------------------------------------------------------------------------


def test_every_module_is_on_the_map() -> None:
    text = read("ARCHITECTURE.md")
    modules = [
        path.relative_to(ROOT).as_posix()
        for folder in ("sdamd", "ui", "scripts")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert [module for module in modules if f"`{module}`" not in text] == []


@pytest.mark.parametrize("name", [*DOCUMENTS, ".pre-commit-config.yaml"])
def test_a_file_that_is_named_exists(name: str) -> None:
    named = re.findall(r"(?<![\w/])(?:sdamd|ui|scripts|tests)/[\w./-]*\w", read(name))
    assert named or name in ("CHANGELOG.md", "SECURITY.md")
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_layers_that_are_drawn_are_those_that_are_held() -> None:
    (drawn,) = (b for _, b in blocks(read("ARCHITECTURE.md")) if "import" not in b and "|" in b)
    rows = [re.split(r"  +", line)[0] for line in drawn.splitlines() if not line.startswith("--")]
    held = re.search(r"exhaustive = true\nlayers = \[(.*?)\]", read("pyproject.toml"), re.DOTALL)
    assert held is not None
    assert rows[1:] == re.findall(r'"([^"]+)"', held[1])


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", sdamd.__version__]
    assert f'\nversion = "{sdamd.__version__}"\n' in read("pyproject.toml")


def test_the_licence_is_the_whole_of_apache_2() -> None:
    text = read("LICENSE")
    assert text.lstrip().startswith("Apache License\n")
    assert [f"   {n}. " in text for n in range(1, 10)] == [True] * 9
    assert "END OF TERMS AND CONDITIONS" in text


def test_no_text_names_a_host_of_a_package_registry() -> None:
    """A mirror replaces them; what is written here would be used in its place."""
    hosts = ["py" + "pi.org", "python" + "hosted.org", "npm" + "js.", "deb" + "ian.org"]
    skipped = {".venv", ".git", ".hypothesis", "training", "__pycache__"}
    suffixes = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".cfg", ".csv", ""}
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in skipped and not f.endswith("_cache")]
        for path in (Path(folder) / file for file in files):
            if path.suffix in suffixes and path.is_file() and path.stat().st_size < 1_000_000:
                text = path.read_text(encoding="utf-8", errors="ignore")
                found += [f"{path}: {host}" for host in hosts if host in text]
    assert found == []
