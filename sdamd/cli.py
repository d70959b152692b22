"""The command line. stdout carries results only, one per line; the rest goes to stderr."""

import argparse
import importlib
import io
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import sdamd
from sdamd import batch, gallery, models, scheduler, tune, tuned
from sdamd.checkpoint import FAMILIES, Checkpoint, Layout
from sdamd.errors import BadImage, BadRequest, SdamdError, unknown
from sdamd.filename import Pattern
from sdamd.hardware import doctor, report
from sdamd.hardware.detect import detect
from sdamd.hardware.device import choose_device
from sdamd.hardware.products import find_card
from sdamd.hardware.survey import survey
from sdamd.metadata import (
    JSON_KEY,
    from_json,
    request_from_texts,
    to_json,
    to_parameters,
)
from sdamd.plan import GIB, Plan, Verdict, make_plan, nearest_that_fits
from sdamd.progress import Progress
from sdamd.render import Failed, Rendered, Started, Step, in_pass_of
from sdamd.request import Job, Request, buckets, limits_of
from sdamd.settings import Attention, Dtype, Settings
from sdamd.studio import Happening, Saved, Studio

log = logging.getLogger(__name__)

INTERRUPTED = 130

_T = TypeVar("_T")


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
        run: Callable[[argparse.Namespace], int] = asked.run
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


# -- commands -------------------------------------------------------------------------------------


def _generate(asked: argparse.Namespace) -> int:
    """Make pictures; print their paths."""
    request, settings = _asked(asked)
    pass_size = _pass_size(asked.from_image, request) if asked.from_image else 1
    as_before = pass_size > 1 and not settings.batch_size
    if as_before:
        settings = replace(settings, batch_size=pass_size)
    studio = Studio(settings)
    with closing(studio), _stop_on_interrupt() as stopping:
        jobs = studio.jobs([request])
        log.debug("device: %s", studio.device.reason)
        progress = Progress(sum(job.steps for job in jobs))
        saved = failed = done = 0
        rendered = in_pass_of(jobs[0], pass_size) if as_before else jobs
        for event in studio.run(rendered, stopping.is_set):
            match event:
                case Step(jobs=together, step=step, steps=steps):
                    now = done + len(together) * together[0].steps * step / steps
                    progress.update(now, f"picture {saved + failed + 1} of {len(jobs)}")
                case Saved(path=path):
                    saved, done = saved + 1, done + event.job.steps
                    progress.clear()
                    if not asked.json:
                        print(path, flush=True)
                case Failed(job=job, error=error):
                    failed, done = failed + 1, done + job.steps
                    progress.clear()
                    print(
                        f"sdamd: picture {job.index + 1} (seed {job.seed}): {error}",
                        file=sys.stderr,
                    )
            if asked.json and (line := _event(event)):
                print(json.dumps(line), flush=True)
        progress.clear()
    if stopping.is_set():
        print(f"sdamd: stopped; {saved} of {len(jobs)} pictures are saved", file=sys.stderr)
        return INTERRUPTED
    return 1 if failed else 0


def _pass_size(path: Path, request: Request) -> int:
    """In how large a pass to make a picture again so that every byte is the same.

    It is 1 for a request that changes something, and for the records of other tools.
    """
    texts = gallery.read_texts(path)
    if JSON_KEY not in texts or request_from_texts(texts) != request:
        return 1
    return from_json(texts[JSON_KEY]).together


def _event(event: Happening) -> dict[str, object] | None:
    """An event as `--json` shows it; that a picture is rendered but not yet saved is not shown."""
    match event:
        case Started(job=job, plan=plan):
            return {
                "event": "started",
                "index": job.index,
                "seed": str(job.seed),
                "plan": plan.to_dict(),
            }
        case Step(jobs=(job, *_), step=step, steps=steps):
            shown = {"event": "step", "index": job.index, "seed": str(job.seed)}
            return {**shown, "step": step, "steps": steps, "together": len(event.jobs)}
        case Saved(job=job, path=path):
            return {"event": "saved", "index": job.index, "seed": str(job.seed), "path": str(path)}
        case Failed(job=job, error=error):
            return {
                "event": "failed",
                "index": job.index,
                "seed": str(job.seed),
                "error": str(error),
            }
    return None


def _plan(asked: argparse.Namespace) -> int:
    """Say how a request would run, without running it; status 3 when it does not fit."""
    request, settings = _asked(asked)
    detection = detect()
    if asked.family:
        checkpoint = _published(asked.family)
    else:
        checkpoint = models.find(request.checkpoint, settings.models)
    here = choose_device(detection, settings.device)
    gpu, engine = (find_card(asked.gpu), None) if asked.gpu else (here.gpu, here.engine)
    job = next(batch.expand(request, checkpoint.family))
    budget = _budget(asked.budget)
    family = checkpoint.family.name
    plan = make_plan(
        job, gpu, checkpoint, settings, engine=engine, count=request.count, budget_bytes=budget,
        tuned=None if asked.gpu else tuned.for_device(settings.cache, gpu, here.engine, family),
        environ=None if asked.gpu else os.environ,
    )  # fmt: skip
    nearest = None
    if plan.verdict is Verdict.DOES_NOT_FIT and gpu is not None:
        nearest = nearest_that_fits(
            job, gpu, checkpoint, settings, engine=engine, budget_bytes=budget
        )
    if asked.json:
        shown = gpu.to_dict() if gpu is not None else {"kind": "cpu", "name": "CPU"}
        print(json.dumps(plan.to_dict() | {"nearest": nearest, "gpu": shown}))
    else:
        _print_plan(plan, job, "the CPU" if gpu is None else gpu.name, nearest)
    return 3 if plan.verdict is Verdict.DOES_NOT_FIT else 0


def _print_plan(plan: Plan, job: Job, where: str, nearest: dict[str, int] | None) -> None:
    print(f"{job.width} x {job.height}, {plan.batch} at a time, on {where}: {plan.verdict}")
    for name in ("text", "denoise", "decode"):
        print(f"  {name:8} {getattr(plan.stages, name) / GIB:6.2f} GiB")
    for reason in plan.reasons:
        print(f"  - {reason}")
    if nearest:
        print(f"  nearest that fits: {nearest['width']} x {nearest['height']}")


def _published(name: str) -> Checkpoint:
    """A checkpoint of the family as it was published, for plans without a file."""
    if name not in FAMILIES or name == "tiny":
        raise BadRequest(unknown(name, [n for n in FAMILIES if n != "tiny"], "family"))
    family = FAMILIES[name]
    return Checkpoint(
        name=family.name, path=Path(), layout=Layout.FILE, family=family,
        bytes=family.parameters.total * 2, prediction_type=family.prediction_type,
        dtype="float16", parameters=family.parameters,
    )  # fmt: skip


def _budget(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        gib = float(text)
    except ValueError:
        gib = -1
    if not 0.25 <= gib <= 1024:
        raise BadRequest(f"budget is {text!r}; allowed 0.25 to 1024 GiB")
    return round(gib * GIB)


def _doctor(asked: argparse.Namespace) -> int:
    """Find what keeps the GPU from working, here or on a recorded machine, and what helps."""
    here = asked.root == Path("/")
    found = survey(asked.root, asked.platform, home=Settings.load().home if here else None)

    def environment() -> dict[str, str]:
        studio = Studio(Settings.load(), detection=found.detection)
        return {**os.environ, **studio.worker_environment()}

    found = doctor.ask(found, environment, probe=asked.probe, selftest=asked.selftest)
    pasted = asked.explain or ""
    if pasted == "-":
        pasted = sys.stdin.buffer.read().decode("utf-8", "replace")
    diagnosis = doctor.diagnose(found, pasted)
    if asked.report is not None:
        private = report.private_of(os.environ)
        text = report.report(diagnosis, sdamd.__version__, private, asked.root, pasted)
        print(report.save_report(text, asked.report))
    elif asked.json:
        print(json.dumps(diagnosis.to_dict()))
    else:
        print("\n".join(doctor.lines(diagnosis)))
    return 3 if diagnosis.faulty else 0


def _models(asked: argparse.Namespace) -> int:
    """List the checkpoints that can be named, or download one from the hub."""
    settings = _settings(asked)
    if asked.what == "download":
        if not asked.hub_id:
            raise BadRequest("models download needs a hub id, as owner/name or owner/name@revision")
        print(models.download(asked.hub_id, settings.models))
        return 0
    for found in [models.find("", settings.models), *models.list_checkpoints(settings.models)]:
        if asked.json:
            shown = {"name": found.name, "family": found.family.name, "bytes": found.bytes}
            print(json.dumps({**shown, "path": str(found.path)}))
        else:
            size = f"{found.bytes / GIB:.2f} GiB"
            print(found.name, found.family.title, size, found.path, sep="\t")
    return 0


def _meta(asked: argparse.Namespace) -> int:
    """Show the record inside a picture."""
    record = gallery.read_record(asked.file)
    if asked.json:
        print(to_json(record))
    else:
        print(to_parameters(record))
    return 0


def _warmup(asked: argparse.Namespace) -> int:
    """Render a step at each size that is offered, so that the GPU finds its kernels now."""
    settings = _settings(asked)
    studio = Studio(settings)
    family = studio.find(asked.checkpoint).family
    sizes = buckets(family.width, family.height)
    requests = [
        Request(
            checkpoint=asked.checkpoint, width=width, height=height, steps=1, seed=0, upscale=1,
            scheduler="Euler", count=settings.batch_size or 1,
        )
        for width, height in sizes
    ]  # fmt: skip
    failed = 0
    with closing(studio), _stop_on_interrupt() as stopping:
        began = time.monotonic()
        for event in studio.warm_up(requests, stopping.is_set):
            match event:
                case Failed(job=job, error=error) if not isinstance(error, BadImage):
                    failed += 1
                    print(f"sdamd: {job.width} x {job.height}: {error}", file=sys.stderr)
                case Rendered(job=job) | Failed(job=job):
                    # After one step a picture may be bad, but the kernels are found.
                    seconds = round(time.monotonic() - began, 1)
                    shown = {"width": job.width, "height": job.height, "seconds": seconds}
                    line = f"{job.width} x {job.height}: {seconds} s"
                    print(json.dumps(shown) if asked.json else line, flush=True)
                    began = time.monotonic()
    return INTERRUPTED if stopping.is_set() else int(failed > 0)


def _tune(asked: argparse.Namespace) -> int:
    """Measure what is fastest on this device and keep it for every plan; or move it by a file."""
    settings = _settings(asked)
    if asked.import_file is not None:
        entries = tuned.read(asked.import_file)
        tuned.keep(settings.cache, entries)
        print(f"{len(entries)} entries of {asked.import_file} are kept")
        return 0
    if asked.export_file is not None:
        tuned.write(asked.export_file, tuned.read(settings.cache / tuned.FILE))
        print(asked.export_file)
        return 0
    studio = Studio(settings)
    with closing(studio), _stop_on_interrupt() as stopping:
        # Before torch is loaded, which happens in this process.
        os.environ.update(studio.worker_environment())
        for line in tune.tune(settings, studio.device, asked.checkpoint, stopping.is_set):
            print(json.dumps(line.to_dict()) if asked.json else line, flush=True)
    return INTERRUPTED if stopping.is_set() else 0


def _ui(asked: argparse.Namespace) -> int:
    """Open the UI in the browser."""
    # It stands above the command line, so it is started by name and not imported.
    app = importlib.import_module("ui.app")
    status: int = app.run(
        _settings(asked), host=asked.host, port=asked.port, browser=not asked.no_browser
    )
    return status


# -- arguments ------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sdamd",
        description="Make images with Stable Diffusion on a Radeon. "
        "Without a command: open the UI.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sdamd {sdamd.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        does = (run.__doc__ or "").partition("\n")[0].rstrip(".")
        made = commands.add_parser(name, help=does, description=f"{does}.", allow_abbrev=False)
        made.add_argument("--verbose", action="store_true", help="say more on stderr")
        made.add_argument("--json", action="store_true", help="results as JSON, one object a line")
        made.set_defaults(run=run)
        return made

    generate = command("generate", _generate)
    _add_fields(generate)
    _add_settings(generate)
    plan = command("plan", _plan)
    _add_fields(plan)
    _add_settings(plan)
    plan.add_argument("--family", help="plan for a published model: sd15, sd21, sdxl ...")
    plan.add_argument("--gpu", help="plan for a card by name, or for gfx1100:24 (target:GiB)")
    plan.add_argument("--budget", metavar="GiB", help="the memory that a run may take")
    examine = command("doctor", _doctor)
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
    listing = command("models", _models)
    listing.add_argument("what", choices=("list", "download"))
    listing.add_argument("hub_id", nargs="?", metavar="OWNER/NAME", help="what to download")
    _add_settings(listing)
    meta = command("meta", _meta)
    meta.add_argument("what", choices=("show",))
    meta.add_argument("file", type=Path)
    for name, run in (("warmup", _warmup), ("tune", _tune)):
        made = command(name, run)
        made.add_argument(
            "--checkpoint", default="", help="model: as in generate; empty for the embedded one"
        )
        _add_settings(made)
        if run is _tune:
            files = made.add_mutually_exclusive_group()
            for flag, does in (
                ("export", "write what was measured here, and measure nothing"),
                ("import", "keep what was measured on another machine of this kind"),
            ):
                files.add_argument(
                    f"--{flag}", dest=f"{flag}_file", type=Path, metavar="FILE", help=does
                )
    ui = command("ui", _ui)
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


def _asked(asked: argparse.Namespace) -> tuple[Request, Settings]:
    """What the flags ask of the picture and of this machine.

    Raises:
        BadRequest: with everything that is wrong with either.
    """
    values: dict[str, Any] = {}
    if asked.from_image:
        values |= gallery.request_from_png(asked.from_image).to_dict()
    problems: list[str] = []
    for pair in asked.set:
        name, equals, value = pair.partition("=")
        if equals:
            values[name.strip().replace("-", "_")] = value
        else:
            problems.append(f"--set is {pair!r}; allowed is FIELD=VALUE")
    flags = {f.name: getattr(asked, f.name) for f in fields(Request)}
    values |= {name: v for name, v in flags.items() if v is not None}
    request = _noting(problems, lambda: Request.from_dict(values))
    if "scheduler" in values:
        _noting(problems, lambda: scheduler.resolve(values["scheduler"]))
    settings = _noting(problems, lambda: _settings(asked))
    if settings is not None:
        filename = settings.filename
        _noting(problems, lambda: Pattern.parse(filename))
    if problems or request is None or settings is None:
        raise BadRequest(*problems)
    return request, settings


def _noting(problems: list[str], read: Callable[[], _T]) -> _T | None:
    """What `read` gives, or nothing and its problems among the others."""
    try:
        return read()
    except BadRequest as error:
        problems += error.problems
        return None


def _settings(asked: argparse.Namespace) -> Settings:
    names = ("home", *(f.name for f in fields(Settings)))
    return Settings.load({name: getattr(asked, name, None) for name in names})


@contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C asks to stop after the current step; the second one interrupts."""
    stopping = threading.Event()

    def interrupted(*_: object) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()
        print("\nsdamd: stopping after this step; Ctrl-C again to stop now", file=sys.stderr)

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield stopping
    finally:
        signal.signal(signal.SIGINT, before)
