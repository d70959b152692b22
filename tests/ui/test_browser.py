"""The UI as a person meets it: the real server, worker and model in a real browser."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Locator,
    Page,
    expect,
    sync_playwright,
)

from sdamd.gallery import read_record
from sdamd.metadata import to_parameters
from sdamd.request import SEED_MAX

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
ROOT = Path(__file__).parents[2]
# No address of any kind but this machine's is looked up, so what comes from elsewhere is missed.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
START_MS = 120_000
RUN_MS = 300_000
"""Both are for a machine of two cores that others keep busy."""

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine"),
    pytest.mark.skipif(os.name == "nt", reason="SIGTERM ends processes on POSIX only"),
]


class Server:
    """`sdamd ui` in a process of its own."""

    def __init__(self, home: Path) -> None:
        # Variables of whoever runs the tests must not reach into them.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SDAMD_")}
        self.temporary = home.parent / "tmp"
        self.temporary.mkdir()
        environment["TMPDIR"] = str(self.temporary)
        command = [sys.executable, "-m", "sdamd", "ui", "--port", "0", "--no-browser"]
        self.process = subprocess.Popen(
            [*command, "--device", "cpu", "--home", str(home)],
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.address = self._first_line()

    def _first_line(self) -> str:
        lines: SimpleQueue[str] = SimpleQueue()
        stdout = self.process.stdout
        assert stdout is not None
        threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
        return lines.get(timeout=START_MS / 1000).strip()

    def end(self) -> tuple[int, str]:
        """Terminate it; gives its status and what it said on stderr."""
        self.process.send_signal(signal.SIGTERM)
        try:
            _, said = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, said = self.process.communicate()
        return self.process.returncode, said


@pytest.fixture
def server(home: Path) -> Iterator[Server]:
    started = Server(home)
    yield started
    if started.process.poll() is None:
        started.end()


@pytest.fixture
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


class Desk:
    """The page, with what went wrong in it."""

    def __init__(self, browser: Browser, address: str) -> None:
        context = browser.new_context(
            viewport={"width": 1366, "height": 768}, locale="en-US", accept_downloads=False
        )
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.page: Page = context.new_page()
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "request",
            lambda request: (
                self.elsewhere.append(request.url)
                if not request.url.startswith((address, "data:", "blob:"))
                else None
            ),
        )
        self.page.goto(address)
        # The page has come to life when the model's own values stand in the empty fields.
        expect(self.field("steps")).to_have_attribute("placeholder", "20", timeout=START_MS)
        self.status = self.page.locator("#status")
        self.problems = self.page.locator("#problems textarea")
        self.record = self.page.locator("#record textarea")
        self.picture = self.page.locator("#gallery .preview .media-button img")

    def field(self, name: str) -> Locator:
        return self.page.locator(f"#field-{name} :is(input, textarea)")

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def bottom(self, selector: str) -> float:
        """The lowest pixel of an element."""
        box = self.page.locator(selector).bounding_box()
        assert box is not None
        return box["y"] + box["height"]


def test_a_prompt_becomes_a_picture(server: Server, browser: Browser, home: Path) -> None:
    """C16, E25, F10: big seeds, /tmp/gradio of somebody else, prompts shown as HTML."""
    prompt = "mountains by the sea <img src=x onerror=alert(1)> <b>bold</b>"
    desk = Desk(browser, server.address)
    generate = desk.page.get_by_role("button", name="Generate")

    desk.field("prompt").fill(prompt)
    desk.field("width").fill("100")
    desk.field("steps").fill("0")
    generate.click()
    expect(desk.problems).to_have_value(
        "width is 100; allowed multiples of 8, the nearest 96 and 104\n"
        "steps is 0; allowed 1 to 150",
        timeout=START_MS,
    )
    expect(desk.status).to_have_text("Not started")

    desk.field("width").fill("")
    desk.field("steps").fill("2")
    desk.field("seed").fill(str(SEED_MAX - 1))
    desk.field("seed").press("ArrowUp")
    desk.field("prompt").press("Control+Enter")
    expect(generate).to_be_disabled(timeout=START_MS)
    expect(desk.picture).to_be_visible(timeout=RUN_MS)
    expect(desk.status).to_contain_text("1 of 1 done", timeout=START_MS)
    expect(desk.problems).to_have_count(0)
    expect(generate).to_be_enabled()
    expect(desk.field("seed")).to_have_value(str(SEED_MAX))

    [saved] = (home / "outputs").glob("*.png")
    record = read_record(saved)
    assert (record.job.seed, record.job.prompt, record.job.steps) == (SEED_MAX, prompt, 2)
    expect(desk.record).to_have_value(to_parameters(record))
    assert desk.picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 512
    for part in ("#field-prompt", "#generate", "#stop", "#gallery", "#record", "#field-upscale"):
        assert desk.bottom(part) <= 768, part

    # A page that is opened later finds the run, and fits a phone.
    later = Desk(browser, server.address)
    expect(later.record).to_have_value(to_parameters(record), timeout=START_MS)
    later.page.set_viewport_size({"width": 390, "height": 844})
    assert later.page.evaluate("document.documentElement.scrollWidth") <= 390

    for opened in (desk, later):
        assert opened.errors == []
        assert opened.elsewhere == []
    status, said = server.end()
    assert status == 0
    assert said == ""
    assert not (server.temporary / "gradio").exists()
    assert list((home / "cache").glob("ui-*")) == []
