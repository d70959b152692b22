"""The Generate tab: the form, and the run that came of it."""

import html
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import gradio as gr
from gradio.processing_utils import save_file_to_cache
from gradio.utils import get_upload_folder

from sdamd import models
from sdamd.errors import SdamdError
from sdamd.plan import GIB
from sdamd.progress import duration
from sdamd.request import Request
from sdamd.studio import Studio
from ui.form import Component, make_fields, own_values, to_request, with_empty
from ui.i18n import language_of, say
from ui.runs import SHOWN, Picture, Run, Runs, Stage, State

ASKED = ("prompt", "negative_prompt")
"""The fields above the button; all others stand below it."""

TICK_SECONDS = 1.0
"""How often the elapsed time moves on while nothing else happens."""
PAUSE_SECONDS = 0.15
"""The least time between two updates of a page."""

Updates: TypeAlias = dict[str, Any]
"""New values of the parts of a page, by name; the others stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The components of the tab, by name: the form's by their fields, the run's by ours."""

    form: Mapping[str, Component]
    run: Mapping[str, Component]

    def named(self, updates: Updates) -> dict[Component, Any]:
        """The updates as Gradio wants them."""
        return {self.run.get(name, self.form.get(name)): new for name, new in updates.items()}


@dataclass(frozen=True, slots=True)
class Handlers:
    """What the events of the tab call. Gradio finds the browser's request by its type."""

    runs: Runs
    page: Page

    def generate(self, request: gr.Request, **values: object) -> Iterator[dict[Component, Any]]:
        """Start a run and follow it."""
        for updates in start(self.runs, values, _language(request)):
            yield self.page.named(updates)

    def reopen(self, request: gr.Request) -> Iterator[dict[Component, Any]]:
        """Show a page that opens the run that goes on, or the last one."""
        language = _language(request)
        # Something must be yielded: Gradio empties the outputs of a generator that yields nothing.
        yield self.page.named({"status": status_text(say(language, "idle"), None)})
        if current := self.runs.current():
            for updates in follow(current, language, self.runs.studio):
                yield self.page.named(updates)

    def offer(self, checkpoint: object, request: gr.Request) -> dict[Component, Any]:
        """Fill in what depends on the checkpoint."""
        updates = offered(self.runs.studio, str(checkpoint or ""), _language(request))
        return self.page.named(updates)

    def stop(self, run_id: str) -> None:
        """Stop the page's run."""
        if found := self.runs.find(run_id):
            found.stop()

    def select(self, run_id: str, event: gr.SelectData) -> str:
        """The record of the picture that was selected."""
        found = self.runs.find(run_id)
        return record_of(found, event.value) if found else ""


def add_generate(blocks: gr.Blocks, runs: Runs, i18n: gr.I18n) -> None:
    """Put the tab into the blocks, whose context must be open, and connect it."""
    page = _lay_out(runs.studio, i18n)
    on = Handlers(runs, page)
    form, run = page.form, page.run
    private: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    # Pages that follow a run do nothing but wait, so they do not count against one another.
    following: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": None}
    run["generate"].click(
        on.generate,
        inputs_kwargs=dict(form),
        outputs=list(run.values()),
        api_name="generate",
        **following,
    )
    run["stop"].click(on.stop, run["id"], None, queue=False, **private)
    run["gallery"].select(on.select, run["id"], run["record"], queue=False, **private)
    for event in (blocks.load, form["checkpoint"].change):
        event(on.offer, form["checkpoint"], list(form.values()), queue=False, **private)
    blocks.load(on.reopen, None, list(run.values()), api_visibility="private", **following)


def start(runs: Runs, values: Mapping[str, object], language: str) -> Iterator[Updates]:
    """Start what the form's values ask for and follow it; say in sentences why not, if so."""
    try:
        run = runs.start([to_request(values)])
    except SdamdError as error:
        yield {
            "status": status_text(say(language, "refused"), None),
            "problems": gr.update(value=str(error), visible=True),
        }
        return
    yield from follow(run, language, runs.studio)


def follow(run: Run, language: str, studio: Studio) -> Iterator[Updates]:
    """Yield updates of a page until the run has ended; leaving early does not disturb the run."""
    state = run.state
    yield {"id": run.id, **_first_updates(), **_updates(run, None, state, language, studio)}
    while not state.ended:
        time.sleep(PAUSE_SECONDS)
        before, state = state, run.wait(state, TICK_SECONDS)
        yield _updates(run, before, state, language, studio)


def offered(studio: Studio, checkpoint: str, language: str) -> Updates:
    """The models that can be chosen, and what empty fields mean with the one that is."""
    names = [found.name for found in models.list_checkpoints(studio.settings.models)]
    choices = with_empty(say(language, "embedded"), names)
    updates: Updates = {"checkpoint": gr.update(choices=choices)}
    try:
        family = studio.find(checkpoint).family
    except SdamdError:
        return updates  # what is wrong with it will be said when it is to be used
    return updates | own_values(family, language)


def record_of(run: Run, selected: object) -> str:
    """The record of the picture that was selected in the gallery."""
    caption = selected.get("caption") if isinstance(selected, dict) else None
    for picture in run.state.pictures:
        if caption_of(picture) == caption:
            return picture.parameters
    return ""


def caption_of(picture: Picture) -> str:
    """What tells a picture from the others of its run."""
    return f"{picture.job.index + 1} · {picture.job.seed}"


def status_of(run: Run, state: State, language: str) -> str:
    """The line that says how far the run is, and its bar."""
    total = len(run.jobs)
    if state.ended:
        text = say(
            language, state.stage, saved=state.saved, total=total, duration=duration(run.seconds())
        )
        return status_text(text, None)
    if state.stopping:
        return status_text(say(language, "stopping"), state.steps_done / run.total_steps)
    if state.stage is not Stage.RENDERING:
        elapsed = f" · {duration(run.seconds())}" if run.seconds() >= 1 else ""
        return status_text(say(language, state.stage) + elapsed, 0.0)
    said = [_which(state, total, language)]
    if state.steps:
        said.append(say(language, "step", step=state.step, steps=state.steps))
    if (seconds := run.seconds_left()) is not None:
        said.append(say(language, "left", duration=duration(seconds)))
    return status_text(" · ".join(said), state.steps_done / run.total_steps)


def status_text(text: str, part: float | None) -> str:
    """The status line as HTML, with a bar of that part of its width, or no bar.

    Nothing is done at 0, so the bar then shows only that something goes on.
    """
    width = f'style="width:{min(1.0, part or 0):.1%}"' if part else 'class="busy"'
    bar = "" if part is None else f"<i {width}></i>"
    return f'<p role="status">{html.escape(text)}</p><div class="bar">{bar}</div>'


def _which(state: State, total: int, language: str) -> str:
    numbers = [job.index + 1 for job in state.together] or [state.finished]
    key = "rendering" if len(numbers) == 1 else "rendering together"
    return say(language, key, first=numbers[0], last=numbers[-1], total=total)


def _first_updates() -> Updates:
    """What a new run clears away."""
    return {"gallery": gr.update(value=[], selected_index=None), "record": ""}


def _updates(
    run: Run, before: State | None, state: State, language: str, studio: Studio
) -> Updates:
    """What has changed on the page since `before`."""
    updates: Updates = {"status": status_of(run, state, language)}
    if before is None or before.ended != state.ended:
        updates["generate"] = gr.update(interactive=state.ended)
        updates["stop"] = gr.update(interactive=not state.ended)
    shown = before.pictures if before else ()
    if state.pictures and state.pictures is not shown:
        pictures = [(_cached(picture), caption_of(picture)) for picture in state.pictures]
        updates["gallery"] = gr.update(value=pictures)
        if not shown:
            updates["gallery"] = gr.update(value=pictures, selected_index=0)
            updates["record"] = state.pictures[0].parameters
    if before is None or state.problems != before.problems:
        updates["problems"] = gr.update(
            value="\n".join(state.problems), visible=bool(state.problems)
        )
    if state.ended and state.saved > SHOWN:
        more = say(language, "more", shown=SHOWN, folder=studio.settings.outputs)
        updates["status"] += f"<p>{html.escape(more)}</p>"
    return updates


def _cached(picture: Picture) -> str:
    """A copy of the picture among the files that Gradio may serve.

    The outputs folder itself is not served, so nothing else in it can be asked for.
    """
    copy: str = save_file_to_cache(picture.path, get_upload_folder())
    return copy


def _lay_out(studio: Studio, i18n: gr.I18n) -> Page:
    rest = [asked.name for asked in fields(Request) if asked.name not in ASKED]
    with gr.Row(elem_id="desk"):
        with gr.Column(elem_id="ask"):
            gr.HTML(_masthead(studio), elem_id="masthead")
            form = make_fields(i18n, ASKED)
            with gr.Row(elem_id="buttons"):
                generate = gr.Button(
                    i18n("generate"), variant="primary", elem_id="generate", scale=3, min_width=120
                )
                stop = gr.Button(
                    i18n("stop"), variant="stop", elem_id="stop", interactive=False, min_width=80
                )
            problems = gr.Textbox(
                label=i18n("problems"), visible=False, interactive=False, elem_id="problems"
            )
        with gr.Column(elem_id="result"):
            status = gr.HTML(status_text("", None), elem_id="status")
            gallery = gr.Gallery(
                label=i18n("pictures"),
                elem_id="gallery",
                preview=True,
                object_fit="contain",
                interactive=False,
                buttons=["download", "fullscreen"],
            )
            record = gr.Textbox(
                label=i18n("record"),
                elem_id="record",
                lines=4,
                max_lines=4,
                interactive=False,
                buttons=["copy"],
            )
        with gr.Column(elem_id="fields"):
            form |= make_fields(i18n, rest)
    run = {
        "id": gr.State(""),
        "status": status,
        "gallery": gallery,
        "record": record,
        "problems": problems,
        "generate": generate,
        "stop": stop,
    }
    return Page(form=form, run=run)


def _masthead(studio: Studio) -> str:
    """Names the device in the words of the library."""
    gpu = studio.device.gpu
    device = "CPU" if gpu is None else f"{gpu.name}, {gpu.vram_bytes / GIB:.0f} GiB"
    reason = html.escape(studio.device.reason, quote=True)
    return f'<header><h1>sdamd</h1><span title="{reason}">{html.escape(device)}</span></header>'


def _language(request: gr.Request) -> str:
    return language_of(request.headers.get("accept-language"))
