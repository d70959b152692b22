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
from sdamd.settings import Attention, Dtype


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
    plan = command("plan", "Say how a request would run; status 3 when it does not fit")
    _add_fields(plan)
    _add_settings(plan)
    plan.add_argument("--family", help="plan for a published model: sd15, sd21, sdxl ...")
    plan.add_argument("--gpu", help="plan for a card by name, or for gfx1100:24 (target:GiB)")
    plan.add_argument("--budget", metavar="GiB", help="the memory that a run may take")
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
    meta = command("meta", "Show the record inside a picture")
    meta.add_argument("what", choices=("show",))
    meta.add_argument("file", type=Path)
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
    ui = command("ui", "Open the UI in the browser")
    ui.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    ui.add_argument("--port", type=int, default=7860)
    ui.add_argument("--no-browser", action="store_true", help="do not open a browser")
    _add_settings(ui)
    return parser


def _add_fields(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of a request; values stay text, so that all are checked together."""
    group = parser.add_argument_group("the picture")
    for asked in fields(Request):
        limits = limits_of(asked)
        if asked.name == "prompt":
            group.add_argument("prompt", nargs="?", metavar="PROMPT", help=limits.help)
            continue
        allowed = "" if limits.minimum is None else f" ({limits.range_text()})"
        group.add_argument(
            f"--{asked.name.replace('_', '-')}", metavar="X", help=limits.help + allowed
        )
    group.add_argument(
        "--from-image", type=Path, metavar="PNG", help="start from a picture's record"
    )
    group.add_argument(
        "--set", action="append", default=[], metavar="FIELD=X", help="any field by name"
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
    group.add_argument("--in-process", action="store_const", const="true",
                       help="render in this process, for debugging")  # fmt: skip
