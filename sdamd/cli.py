"""The command line. stdout carries results only, one per line; the rest goes to stderr.

Only what the flags need is imported here; a command's own module is loaded when it runs, so that
`--help`, `plan` and `doctor` answer at once.
"""

import argparse
import importlib
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import sdamd
from sdamd.errors import INTERRUPTED, SdamdError
from sdamd.request import Request, limits_of
from sdamd.settings import Attention, Dtype, Offload, Storage, VaeTiling, VramMode


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status that `errors` names."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths go out as the bytes that they are, also where those are no text.
        sys.stdout.reconfigure(
            errors="backslashreplace" if sys.platform == "win32" else "surrogateescape"
        )
    parser = _parser()
    try:
        asked = parser.parse_args(arguments or ["ui"])
        level = logging.DEBUG if asked.verbose else logging.WARNING
        logging.basicConfig(level=level, format="%(levelname)s: %(message)s", force=True)
        # Hugging Face's libraries and others speak in debug mode of what no user asked about.
        for name in ("urllib3", "httpx", "httpcore", "PIL", "filelock", "asyncio"):
            logging.getLogger(name).setLevel(max(level, logging.INFO))
        run: Callable[[argparse.Namespace], int] = importlib.import_module(
            f"sdamd.commands.{asked.command}"
        ).run
        status = run(asked)
        sys.stdout.flush()  # here, where a reader that has gone is expected
        return status
    except SdamdError as error:
        sys.stdout.flush()
        for line in str(error).splitlines() or [type(error).__name__]:
            print(f"sdamd: {line}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("sdamd: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read stdout has gone; without this Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sdamd",
        description="Make images with Stable Diffusion on a Radeon. "
        "Without a command: open the UI.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sdamd {sdamd.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, does: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=does, description=f"{does}.", allow_abbrev=False)
        made.add_argument("--verbose", action="store_true", help="say more on stderr")
        made.add_argument("--json", action="store_true", help="results as JSON, one object a line")
        made.set_defaults(command=name)
        return made

    generate = command("generate", "Make pictures; print their paths")
    _add_fields(generate)
    _add_settings(generate)
    _add_batch(command("batch", "Make many pictures, and survive anything"))
    plan = command("plan", "Say how a request would run; status 3 when it does not fit")
    _add_fields(plan)
    _add_settings(plan)
    plan.add_argument("--family", help="plan for a published model: sd15, sd21, sdxl ...")
    plan.add_argument("--gpu", help="plan for a card by name, or for gfx1100:24 (target:GiB)")
    plan.add_argument("--budget", metavar="GiB", help="the memory that a run may take")
    plan.add_argument(
        "--table", action="store_true", help="the grid of sizes and batches instead of one size"
    )
    examine = command("doctor", "Find what keeps the GPU from working, and what helps")
    examine.add_argument("--root", type=Path, default=Path("/"), help="root of a recorded machine")
    examine.add_argument(
        "--platform", default=sys.platform, help="of a recorded machine: linux, windows"
    )
    examine.add_argument("--explain", metavar="TEXT", help="an error text, or - to read it")
    examine.add_argument("--probe", action="store_true", help="ask torch too, in a child")
    examine.add_argument("--selftest", action="store_true", help="run kernels and compare numbers")
    examine.add_argument(
        "--report", nargs="?", const="", metavar="FILE", help="write a file for a bug report"
    )
    listing = command("models", "List the checkpoints that can be named, or download one")
    listing.add_argument("what", choices=("list", "download"))
    listing.add_argument("hub_id", nargs="?", metavar="OWNER/NAME", help="what to download")
    _add_settings(listing)
    meta = command("meta", "Show or convert the record inside a picture, of any tool")
    meta.add_argument("what", choices=("show", "convert"))
    meta.add_argument("files", nargs="+", type=Path, metavar="FILE")
    meta.add_argument(
        "--to", choices=("json", "a1111", "request"), default="json",
        help="convert to a record of sdamd, to the text of AUTOMATIC1111, or to a request",
    )  # fmt: skip
    for name, does in (
        ("warmup", "Let the GPU find its kernels for the sizes that are offered"),
        ("tune", "Measure what is fastest on this device, and keep it for every plan"),
    ):
        made = command(name, does)
        made.add_argument(
            "--checkpoint", default="", help="model: as in generate; empty for the embedded one"
        )
        _add_settings(made)
        if name == "tune":
            files = made.add_mutually_exclusive_group()
            files.add_argument(
                "--export", dest="export_file", type=Path, metavar="FILE",
                help="write what was measured here, and measure nothing",
            )  # fmt: skip
            files.add_argument(
                "--import", dest="import_file", type=Path, metavar="FILE",
                help="keep what was measured on another machine of this kind",
            )  # fmt: skip
    _add_presets(command("presets", "List, show, check, save, import or export presets"))
    ui = command("ui", "Open the UI in the browser")
    ui.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    ui.add_argument("--port", type=int, default=7860)
    ui.add_argument("--no-browser", action="store_true", help="do not open a browser")
    _add_settings(ui)
    return parser


def _add_presets(parser: argparse.ArgumentParser) -> None:
    """One parser for each word after `presets`."""
    words = parser.add_subparsers(metavar="WHAT", required=True, dest="what")

    def word(name: str, does: str) -> argparse.ArgumentParser:
        made = words.add_parser(name, help=does, description=f"{does}.", allow_abbrev=False)
        # What stands before the word stays: a default here would take its place.
        for flag, means in (("--verbose", "say more on stderr"), ("--json", "results as JSON")):
            made.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=means)
        made.add_argument("--home", metavar="DIR", help="data folder (SDAMD_HOME)")
        return made

    word("list", "Name the presets that are there, and what each is for")
    show = word("show", "Show what a preset asks for and needs")
    show.add_argument("name", metavar="NAME", help="name or file of a preset")
    show.add_argument("--against", metavar="NAME", help="what changes from this preset or picture")
    show.add_argument("--vram", type=float, metavar="GiB", help="for a card with this much memory")
    check = word("check", "Say what is wrong with preset files, with line and column")
    check.add_argument("files", nargs="+", type=Path, metavar="FILE")
    save = word("save", "Keep what the flags or a picture's record ask for as a preset")
    save.add_argument("name", metavar="NAME")
    _add_fields(save)
    for name in ("description", "author", "licence"):
        save.add_argument(f"--{name}", metavar="TEXT")
    save.add_argument("--tag", action="append", default=[], metavar="TEXT")
    taken = word("import", "Keep presets or preset cards that somebody sent")
    taken.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for made in (save, taken):
        made.add_argument("--replace", action="store_true", help="in the place of one of its name")
    export = word("export", "Write a preset to send: a .toml file, or a card as .png")
    export.add_argument("name", metavar="NAME", help="name or file of a preset")
    export.add_argument("file", type=Path, metavar="FILE")
    export.add_argument("--picture", type=Path, help="what the card shows")


def _add_batch(parser: argparse.ArgumentParser) -> None:
    """One parser for each word after `batch`."""
    words = parser.add_subparsers(metavar="WHAT", required=True, dest="what")

    def word(name: str, does: str, number: str = "") -> argparse.ArgumentParser:
        made = words.add_parser(name, help=does, description=f"{does}.", allow_abbrev=False)
        for flag, means in (("--verbose", "say more on stderr"), ("--json", "results as JSON")):
            made.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=means)
        if number:
            made.add_argument(
                "id", type=int, metavar="ID", help="a batch's number",
                nargs="?" if number == "?" else None,
            )  # fmt: skip
        return made

    run = word("run", "Take in a file of rows as a batch, and make its pictures")
    run.add_argument("file", metavar="FILE", help="JSONL, CSV, TOML, lines, a folder; - is stdin")
    run.add_argument("--format", metavar="KIND", help=", ".join(_BATCH_FORMATS),
                     choices=_BATCH_FORMATS)  # fmt: skip
    run.add_argument("--templates", metavar="HOW", default="random", choices=_TEMPLATES,
                     help=f"what {{a|b}} and __name__ become: {', '.join(_TEMPLATES)}")  # fmt: skip
    run.add_argument("--limit", type=int, metavar="N", help="pictures of one row at most")
    run.add_argument("--vary", action="append", default=[], metavar="FIELD=X,Y",
                     help="every value, in a contact sheet; several make a matrix")  # fmt: skip
    run.add_argument("--strict", action="store_true", help="refuse the batch if a row is wrong")
    run.add_argument("--dry-run", action="store_true", help="say what it would be and take")
    _add_fields(run, prompt="--prompt")
    again = word("resume", "Go on with a batch, or with all that are not finished", "?")
    retry = word("retry", "Make failed and cancelled pictures again", "1")
    retry.add_argument("--missing", action="store_true", help="also those whose file is gone")
    for made in (run, again, retry):
        group = made.add_argument_group("this run")
        group.add_argument("--devices", metavar="A,B", help="several at once, as in --device")
        group.add_argument("--max-hours", metavar="H", help="stop after so many hours")
        group.add_argument("--stop-at", metavar="HH:MM", help="stop at this time of the day")
        group.add_argument("--max-temp", metavar="C", help="rest while the card is hotter")
        _add_settings(made)
    for name, does, number in (
        ("list", "List the batches", ""),
        ("show", "Show a batch and what failed", "1"),
        ("cancel", "Give up what is not made yet", "1"),
        ("pause", "Let a batch, or all, stop after the running picture", "?"),
    ):
        word(name, does, number).add_argument("--home", metavar="DIR", help="data folder")


_BATCH_FORMATS = ("jsonl", "csv", "toml", "lines", "json", "images", "records")
_TEMPLATES = ("off", "random", "combinatorial")


def _add_fields(parser: argparse.ArgumentParser, prompt: str = "prompt") -> None:
    """A flag for every field of a request; values stay text, so that all are checked together."""
    group = parser.add_argument_group("the picture")
    for asked in fields(Request):
        limits = limits_of(asked)
        if asked.name == "prompt" and prompt == "prompt":
            group.add_argument("prompt", nargs="?", metavar="PROMPT", help=limits.help)
            continue
        allowed = "" if limits.minimum is None else f" ({limits.range_text()})"
        if limits.choices:
            allowed = f" ({', '.join(limits.choices)})"
        group.add_argument(
            f"--{asked.name.replace('_', '-')}", metavar="X", help=limits.help + allowed
        )
    group.add_argument(
        "--from-image", type=Path, metavar="FILE", help="start from a picture's record, of any tool"
    )
    group.add_argument(
        "--set", action="append", default=[], metavar="FIELD=X", help="any field by name"
    )
    group.add_argument(
        "--preset", action="append", default=[], metavar="NAME",
        help="name or file of a preset; several add up, the later ones first",
    )  # fmt: skip


def _add_memory(parser: argparse.ArgumentParser) -> None:
    """The flags that force what the plan chooses; each is a setting of the same name."""
    group = parser.add_argument_group("its memory: what the plan would choose otherwise")
    group.add_argument("--vram-mode", metavar="MODE", help=", ".join(VramMode))
    group.add_argument("--vram-budget-gb", metavar="GiB", help="what a run may take")
    group.add_argument("--vram-reserve-gb", metavar="GiB", help="what a run leaves free")
    group.add_argument("--offload", metavar="WHAT", help=", ".join(Offload))
    group.add_argument("--vae-tiling", metavar="WHEN", help=", ".join(VaeTiling))
    group.add_argument("--vae-tile", metavar="PIXELS", help="side of the VAE's tiles")
    group.add_argument("--vae-bands", metavar="ROWS", help="rows the VAE makes at a time, exactly")
    group.add_argument("--passes", metavar="N", help="calls of the UNet for one step")
    group.add_argument("--feed-forward-chunks", metavar="N", help="pieces of feed-forward layers")
    group.add_argument(
        "--storage", metavar="TYPE", help=f"the UNet's weights: {', '.join(Storage)}"
    )
    group.add_argument(
        "--round-sizes", metavar="PIXELS", help="round sizes to a multiple; 0 keeps them"
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("this machine")
    group.add_argument("--home", metavar="DIR", help="data folder (SDAMD_HOME)")
    group.add_argument("--output", metavar="DIR", help="where pictures go (default: HOME/outputs)")
    group.add_argument(
        "--filename", metavar="PATTERN", help="e.g. '[date]/[number]-[seed]-[prompt]'"
    )
    group.add_argument(
        "--device", help="auto, cpu, rocm, directml, a GPU's index or a part of its name"
    )
    group.add_argument("--dtype", help=", ".join(Dtype))
    group.add_argument("--attention", help=", ".join(Attention))
    group.add_argument("--batch-size", metavar="N", help="pictures at once; 0 lets the plan choose")
    _add_memory(parser)
    group.add_argument("--in-process", action="store_const", const="true",
                       help="render in this process, for debugging")  # fmt: skip
