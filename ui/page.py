"""The web application: the page, its looks, and who may use it."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import gradio as gr
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ui.generate import add_generate
from ui.i18n import translations
from ui.runs import Runs

KEEP_SECONDS = 24 * 3600
"""How long copies of shown pictures stay while the server runs."""

ASSETS = Path(__file__).parent


def make_app(runs: Runs, hosts: Sequence[str]) -> FastAPI:
    """The UI's page under the names in `hosts`, and what it needs; nothing else of the disk."""
    app = FastAPI(openapi_url=None)
    app.add_middleware(OwnPagesOnly)
    # Nor may a page from elsewhere come in through a name that it has made point here.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
    return gr.mount_gradio_app(  # type: ignore[no-any-return]  # Gradio ships no types
        app,
        make_blocks(runs),
        path="/",
        i18n=translations(),
        theme=make_theme(),
        css_paths=ASSETS / "style.css",
        head_paths=ASSETS / "head.html",
        footer_links=[],
        run_history=False,
        allowed_paths=[],
        max_file_size="1mb",
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        enable_monitoring=False,
        show_error=False,
    )


class OwnPagesOnly:
    """Refuses what a page from elsewhere sends. Gradio only keeps the answer from such a page."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None or urlsplit(origin).netloc == headers.get("host"):
            await self._app(scope, receive, send)
        else:
            refusal = PlainTextResponse("this page may not use sdamd", status_code=403)
            await refusal(scope, receive, send)


def make_blocks(runs: Runs) -> gr.Blocks:
    """The page."""
    i18n = translations()
    with gr.Blocks(
        title="sdamd",
        analytics_enabled=False,
        fill_width=True,
        delete_cache=(3600, KEEP_SECONDS),
    ) as blocks:
        add_generate(blocks, runs, i18n)
    return blocks


def make_theme() -> gr.Theme:
    """Gradio's plainest theme with the system's fonts: nothing is fetched from anywhere."""
    return gr.themes.Base(
        primary_hue="orange",
        neutral_hue="zinc",
        spacing_size="sm",
        radius_size="md",
        text_size="sm",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )
