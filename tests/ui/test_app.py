"""The server: where it listens, and what of the disk it gives away."""

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from sdamd.errors import BadRequest, UserError
from sdamd.hardware.detect import Detection
from sdamd.hardware.device import CPU
from sdamd.render import LocalRender
from sdamd.settings import Settings
from sdamd.studio import Studio
from tests.fakes import FakeBackend
from ui import app
from ui.page import make_app
from ui.runs import Runs

NO_GPU = Detection(platform="linux", reason="no <b>AMD</b> GPU was found", mask={})
HOST = "http://127.0.0.1:7860"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def browser(settings: Settings) -> Iterator[TestClient]:
    render = LocalRender(settings, CPU, FakeBackend)
    runs = Runs(Studio(settings, render=render, detection=NO_GPU, environ={}))

    async def make() -> FastAPI:
        return make_app(runs, app.LOOPBACK)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(settings.cache / "ui-test"))
        # It is fixed when Gradio is imported, which `app.run` puts off until then.
        patch.setattr("gradio.routes.DEFAULT_TEMP_DIR", str(settings.cache / "ui-test"))
        # In a running loop, since outside of one Gradio makes some that it never closes.
        web = asyncio.run(make())
        with TestClient(web, base_url=HOST) as client:
            yield client
    runs.close(10)


def test_the_page_comes_from_here_alone(browser: TestClient) -> None:
    page = browser.get("/").text
    assert "Ctrl+Enter anywhere" in page
    for elsewhere in ("fonts.googleapis", "cdn", "huggingface.co", "api.gradio"):
        assert elsewhere not in page


def test_what_the_machine_says_of_itself_is_text(browser: TestClient) -> None:
    """F10: text from elsewhere was shown as HTML."""
    config = browser.get("/config").text
    assert "&lt;b&gt;AMD" in config
    assert "<b>AMD" not in config


@pytest.mark.parametrize(
    "path",
    ["settings.toml", "sdamd.db", "outputs/page.html", "outputs/.env", "models/a.safetensors"],
)
@pytest.mark.parametrize("form", ["{}", "../{}", "//{}"])
def test_no_file_of_the_data_folder_is_given_away(
    browser: TestClient, settings: Settings, path: str, form: str
) -> None:
    """F01, F02, F03: configs, keys and whole drives could be fetched."""
    file = settings.home / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("secret", encoding="utf-8")
    answer = browser.get(f"/gradio_api/file={form.format(file)}")
    assert answer.status_code in (403, 404)
    assert "secret" not in answer.text


@pytest.mark.parametrize("path", ["/etc/passwd", "..%2f..%2f..%2fetc/passwd", "%2e%2e/etc/passwd"])
def test_no_file_of_the_system_is_given_away(browser: TestClient, path: str) -> None:
    """F01: `/etc/passwd` was served."""
    assert browser.get(f"/gradio_api/file={path}").status_code in (403, 404)


def test_another_name_for_this_machine_is_refused(browser: TestClient) -> None:
    """A page from elsewhere can make its own name point to 127.0.0.1."""
    assert browser.get("/", headers={"host": "evil.example:7860"}).status_code == 400


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999"])
def test_a_page_from_elsewhere_cannot_send_anything(browser: TestClient, origin: str) -> None:
    answer = browser.post("/gradio_api/queue/join", content=b"{}", headers={"origin": origin})
    assert answer.status_code == 403


def test_the_own_page_can(browser: TestClient) -> None:
    answer = browser.post("/gradio_api/queue/join", content=b"{}", headers={"origin": HOST})
    assert answer.status_code == 422  # it got through, and was not understood


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.com", ""])
def test_only_this_machine_may_connect(machine: Settings, host: str) -> None:
    """F03: a UI without a password was open to the network."""
    with pytest.raises(BadRequest, match=r"host is .*; allowed 127\.0\.0\.1 and localhost"):
        app.run(machine, host=host, port=0, browser=False)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_refused(machine: Settings, port: int) -> None:
    with pytest.raises(BadRequest, match=f"port is {port}; allowed 0"):
        app.run(machine, port=port, browser=False)


def test_a_port_that_is_taken_is_told_in_a_sentence(machine: Settings) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} cannot be used .*--port 0 takes a free"):
            app.run(machine, port=port, browser=False)


def test_the_cache_is_this_users_alone(machine: Settings) -> None:
    """E25: /tmp/gradio belonged to somebody else."""
    with app._cache(machine) as folder:
        assert Path(folder).parent == machine.cache
        assert Path(folder).stat().st_mode & 0o077 == 0
    assert not Path(folder).exists()


def test_what_a_killed_server_left_is_removed_after_a_week(machine: Settings) -> None:
    """E25: temporary pictures piled up."""
    for name, days in (("ui-old", 8), ("ui-new", 1), ("other", 8)):
        folder = machine.cache / name
        folder.mkdir(parents=True)
        (folder / "picture.png").touch()
        then = time.time() - days * 24 * 3600
        os.utime(folder, (then, then))
    with app._cache(machine):
        left = {path.name for path in machine.cache.iterdir()}
    assert {"ui-new", "other"} < left
    assert "ui-old" not in left
