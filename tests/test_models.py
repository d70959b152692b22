import json
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256 as digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sdamd import models
from sdamd.checkpoint import Layout
from sdamd.errors import BadCheckpoint, StorageError, UserError


def weights(count: int) -> bytes:
    """The bytes of a small `.safetensors` file."""
    tensor = {"dtype": "F16", "shape": [count], "data_offsets": [0, 2 * count]}
    text = json.dumps({"weight": tensor}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(256)) * (2 * count // 256)


FOLDER = {
    "model_index.json": b'{"_class_name": "StableDiffusionPipeline"}',
    "unet/config.json": b'{"_class_name": "UNet2DConditionModel", "sample_size": 16}',
    "unet/diffusion_pytorch_model.safetensors": weights(128 * 1024),
    "vae/config.json": b'{"block_out_channels": [1, 2, 3, 4], "latent_channels": 4}',
    "vae/diffusion_pytorch_model.safetensors": weights(256),
    "text_encoder/config.json": b"{}",
    "text_encoder/model.safetensors": weights(128),
    "tokenizer/vocab.json": b"{}",
    "tokenizer/merges.txt": b"#version: 0.2\n",
    "scheduler/scheduler_config.json": b"{}",
}
"""The least that is a model."""

UNWANTED = {
    "README.md": b"#",
    "v1-5-pruned.ckpt": b"pickle",
    "v1-5-pruned.safetensors": b"single file beside the folder",
    "unet/diffusion_pytorch_model.bin": b"pickle",
    "unet/diffusion_pytorch_model.non_ema.safetensors": b"training",
    "safety_checker/model.safetensors": b"checker",
    "feature_extractor/preprocessor_config.json": b"{}",
    "text_encoder/flax_model.msgpack": b"flax",
    "vae_encoder/model.onnx": b"onnx",
}


def place(folder: Path, files: dict[str, bytes] = FOLDER) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


# -- finding -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A models folder: two at the top, two deeper, and things that are none."""
    for name in ("Dream", "sd/Juggernaut XL", "sd/deep/er/model", "other/model"):
        place(tmp_path / "models" / name)
    place(tmp_path / "models" / ".downloads" / "half")
    (tmp_path / "models" / "notes.txt").write_text("x")
    return tmp_path / "models"


def test_models_are_listed_by_name_in_order(folder: Path) -> None:
    assert list(models.model_paths(folder)) == [
        "Dream",
        "other/model",
        "sd/deep/er/model",
        "sd/Juggernaut XL",
    ]
    assert [c.name for c in models.list_checkpoints(folder)] == list(models.model_paths(folder))


def test_what_is_no_checkpoint_is_not_listed(folder: Path) -> None:
    (folder / "lora.safetensors").write_bytes(weights(256))
    assert "lora" in models.model_paths(folder)
    assert "lora" not in [c.name for c in models.list_checkpoints(folder)]


def test_a_missing_models_folder_is_an_empty_one(tmp_path: Path) -> None:
    assert models.list_checkpoints(tmp_path / "none") == []


def test_a_loop_of_links_ends(folder: Path) -> None:
    (folder / "sd" / "again").symlink_to(folder)
    assert len(models.model_paths(folder)) < 100


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Dream", "Dream"),
        ("dream", "Dream"),
        ("sd/Juggernaut XL", "sd/Juggernaut XL"),
        ("sd\\juggernaut xl", "sd/Juggernaut XL"),
        ("JUGGERNAUT XL", "sd/Juggernaut XL"),
        ("er/model", "sd/deep/er/model"),
    ],
)
def test_a_name_is_found_in_any_case_and_by_its_end(folder: Path, name: str, found: str) -> None:
    checkpoint = models.find(name, folder)
    assert checkpoint.name == found
    assert checkpoint.path == folder / found
    assert checkpoint.layout is Layout.FOLDER


def test_an_ambiguous_name_lists_its_meanings(folder: Path) -> None:
    with pytest.raises(UserError, match="ambiguous; allowed are other/model, sd/deep/er/model"):
        models.find("model", folder)


def test_an_unknown_name_comes_with_the_nearest(folder: Path) -> None:
    with pytest.raises(UserError, match="checkpoint 'Draem' is not known; the nearest: Dream"):
        models.find("Draem", folder)


def test_an_empty_folder_says_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no models; allowed are a path, a hub id"):
        models.find("anything", tmp_path)


@pytest.mark.parametrize("name", ["x\0y", "x" * 5000])
def test_a_name_that_no_file_can_have_is_unknown(folder: Path, name: str) -> None:
    with pytest.raises(UserError, match="is not known"):
        models.find(name, folder)


def test_a_path_is_taken_as_it_is(folder: Path, tmp_path: Path) -> None:
    path = place(tmp_path / "elsewhere" / "mine")
    assert models.find(str(path), folder).path == path


def test_a_missing_path_is_no_hub_id(folder: Path) -> None:
    with pytest.raises(BadCheckpoint, match="does not exist"):
        models.find("dir/missing.safetensors/x.safetensors", folder)


def test_the_empty_name_is_the_embedded_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "EMBEDDED", place(tmp_path / "tiny"))
    for name in ("", "embedded"):
        checkpoint = models.find(name, folder)
        assert checkpoint.name == "embedded"
        assert checkpoint.family.name == "tiny"


def test_a_hub_id_is_fetched_only_when_it_may_be(folder: Path) -> None:
    asked: list[tuple[str, Path]] = []

    def fetch(hub_id: str, into: Path) -> Path:
        asked.append((hub_id, into))
        return place(into / "owner" / "new")

    with pytest.raises(UserError, match="`sdamd models download owner/new` gets it"):
        models.find("owner/new", folder)
    assert models.find("owner/new", folder, fetch).name == "owner/new"
    assert asked == [("owner/new", folder)]
    models.find("owner/new", folder, fetch)
    assert len(asked) == 1, "it is in the folder now"


# -- choosing what to download -----------------------------------------------------------------


def test_only_what_is_loaded_is_chosen() -> None:
    assert sorted(models.choose_files("o/n", {**FOLDER, **UNWANTED})) == sorted(FOLDER)


def test_half_precision_is_preferred_where_all_parts_have_it() -> None:
    half = {f.replace(".safetensors", ".fp16.safetensors") for f in FOLDER if "model." in f}
    half -= {"model_index.json"}
    chosen = models.choose_files("o/n", {*FOLDER, *half})
    assert {f for f in chosen if f.endswith(".safetensors")} == {
        f for f in half if f.endswith(".safetensors")
    }
    some = [*FOLDER, "unet/diffusion_pytorch_model.fp16.safetensors"]
    assert sorted(models.choose_files("o/n", some)) == sorted(FOLDER)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["model_index.json", "unet/diffusion_pytorch_model.bin"], "no complete set"),
        (["model.ckpt", "README.md"], "neither model_index.json nor a .safetensors file"),
        (["a.safetensors", "b.safetensors"], "2 single files"),
    ],
)
def test_pickles_are_never_chosen(files: list[str], said: str) -> None:
    """F05: weights that can run code are not even fetched."""
    with pytest.raises(BadCheckpoint, match=re.escape(said)):
        models.choose_files("o/n", files)


def test_the_one_single_file_is_chosen() -> None:
    names = ["README.md", "dream.safetensors", "dream.ckpt", "lora/x.safetensors"]
    assert models.choose_files("o/n", names) == ["dream.safetensors"]


# -- downloading, from a hub on loopback -------------------------------------------------------

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """What the server below serves, and what it was asked."""

    files: dict[str, bytes]
    cut_after: int = 0
    """Close the connection after so many bytes of a file larger than that, once per file."""

    gone_after_cut: bool = False
    """Refuse a file from then on."""

    status: int = 200
    error: str = ""
    sha256: str = ""
    """What is said of every large file, in the place of the truth."""

    sizes: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    url: str = ""


class HubServer(ThreadingHTTPServer):
    """Carries the state that the handlers share."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.hub = hub


class HubHandler(BaseHTTPRequestHandler):
    """Speaks as much of the hub's protocol as a download needs."""

    server: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server.hub
        ranged = self.headers.get("Range", "")
        hub.asked.append(f"{self.command} {self.path} {ranged}".strip())
        files = f"/o/n/resolve/{COMMIT}/"
        if hub.error and self.path.startswith("/api/models/"):
            self.answer(b"{}", {"X-Error-Code": hub.error}, hub.status)
        elif self.path.startswith("/api/models/o/n"):
            self.answer(json.dumps(info_of(hub)).encode(), {"Content-Type": "application/json"})
        elif self.path.startswith(files):
            self.send_file(self.path.removeprefix(files), ranged)
        else:
            self.answer(b"", {}, 404)

    def send_file(self, name: str, ranged: str) -> None:
        hub = self.server.hub
        content = hub.files[name]
        if hub.gone_after_cut and name in hub.cut:
            self.answer(b"", {}, 404)
            return
        headers = {"ETag": f'"{digest(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        begin = int(ranged.removeprefix("bytes=").split("-")[0]) if ranged else 0
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        length = len(content) - begin
        if self.command == "GET" and 0 < hub.cut_after < length and name not in hub.cut:
            hub.cut.add(name)
            length = hub.cut_after
            self.close_connection = True
        self.answer(content[begin:], headers, 206 if begin else 200, length)

    def answer(
        self, body: bytes, headers: dict[str, str], status: int = 200, length: int | None = None
    ) -> None:
        """Promise the whole body and send its first `length` bytes."""
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:length])

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def info_of(hub: Hub) -> dict[str, object]:
    siblings: list[dict[str, object]] = []
    for name, content in hub.files.items():
        size = hub.sizes.get(name, len(content))
        file: dict[str, object] = {"rfilename": name, "size": size}
        if name.endswith(".safetensors"):
            said = hub.sha256 or digest(content).hexdigest()
            file["lfs"] = {"size": size, "sha256": said, "pointerSize": 135}
        siblings.append(file)
    return {"id": "o/n", "sha": COMMIT, "private": False, "siblings": siblings}


@pytest.fixture
def hub() -> Iterator[Hub]:
    served = Hub(files={**FOLDER, **UNWANTED})
    with HubServer(served) as server:
        served.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield served
        server.shutdown()
        thread.join()


CALL = """
import sys
from pathlib import Path
from sdamd import models
from sdamd.errors import SdamdError
try:
    path = models.download(sys.argv[1], Path(sys.argv[2]), lambda *state: print("progress", *state))
except SdamdError as error:
    print(type(error).__name__, error)
else:
    print("path", path)
"""


def download(hub: Hub, folder: Path, hub_id: str = "o/n", **environment: str) -> str:
    """Run in a process of its own, since huggingface_hub reads its environment once."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CALL, hub_id, str(folder)],
        env={
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder.parent / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "PYTHONPATH": str(Path(models.__file__).parents[1]),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_a_download_is_a_model_in_the_folder(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    said = download(hub, folder)
    assert f"path {folder / 'o' / 'n'}" in said
    there = {p.relative_to(folder / "o/n").as_posix() for p in (folder / "o/n").rglob("*")}
    assert {name for name in there if "." in name} == set(FOLDER), "nothing but what is loaded"
    assert models.find("o/n", folder).family.name == "tiny"
    assert not any("bin" in line or "ckpt" in line for line in hub.asked)
    total = sum(map(len, FOLDER.values()))
    assert re.findall(r"progress model_index\.json 0 (\d+)", said) == [str(total)]


def test_what_is_there_is_not_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    download(hub, tmp_path / "models")
    hub.asked.clear()
    assert "path" in download(hub, tmp_path / "models", HF_HUB_OFFLINE="1")
    assert hub.asked == []


@pytest.mark.parametrize("in_the_next_run", [False, True])
def test_a_cut_connection_goes_on_where_it_stopped(
    hub: Hub, tmp_path: Path, *, in_the_next_run: bool
) -> None:
    """huggingface_hub keeps what came in chunks of 10 MB, so the file must be larger."""
    name = "unet/diffusion_pytorch_model.safetensors"
    hub.files[name] = weights(128 * 100_000)
    hub.cut_after = 22_000_000
    hub.gone_after_cut = in_the_next_run
    if in_the_next_run:
        assert "UserError o/n cannot be fetched" in download(hub, tmp_path / "models")
        hub.asked.clear()
        hub.gone_after_cut = False
    assert "path" in download(hub, tmp_path / "models")
    assert (tmp_path / "models/o/n" / name).read_bytes() == hub.files[name]
    begins = [int(n) for line in hub.asked for n in re.findall(rf"{name} bytes=(\d+)-", line)]
    assert begins == [20_971_520]


def test_a_run_that_was_stopped_leaves_no_half_model(hub: Hub, tmp_path: Path) -> None:
    """The files that came are kept aside, and the next run asks only for the others."""
    folder = tmp_path / "models"
    name = "vae/diffusion_pytorch_model.safetensors"
    whole = hub.files.pop(name)
    hub.files[name] = whole[:-100]
    hub.sizes[name] = len(whole)
    assert "UserError o/n arrived incomplete" in download(hub, folder)
    assert models.model_paths(folder) == {}
    hub.sizes.clear()
    hub.files[name] = whole
    hub.asked.clear()
    assert "path" in download(hub, folder)
    assert not any("unet/" in line for line in hub.asked)
    assert models.find("o/n", folder).path == folder / "o/n"


def test_a_file_that_was_damaged_on_the_way_is_not_kept(hub: Hub, tmp_path: Path) -> None:
    hub.sha256 = "0" * 64
    assert "arrived damaged: its SHA-256 is" in download(hub, tmp_path / "models")
    hub.sha256 = ""
    assert "path" in download(hub, tmp_path / "models")


def test_a_disk_without_room_is_found_before_the_first_byte(hub: Hub, tmp_path: Path) -> None:
    hub.sizes["unet/diffusion_pytorch_model.safetensors"] = 10**18
    said = download(hub, tmp_path / "models")
    assert re.search(r"StorageError o/n needs 1\d{18} more bytes in .*; \d+ are free", said)
    assert not any("resolve" in line for line in hub.asked)


def test_offline_says_so_and_asks_nothing(hub: Hub, tmp_path: Path) -> None:
    said = download(hub, tmp_path / "models", HF_HUB_OFFLINE="1")
    assert said.startswith("UserError o/n is not in")
    assert "HF_HUB_OFFLINE forbids" in said
    assert hub.asked == []


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        ("RepoNotFound", 404, "is not on"),
        ("RepoNotFound", 401, "is not on"),
        ("GatedRepo", 403, "is gated: accept its terms"),
        ("RevisionNotFound", 404, "but not this revision"),
        ("Other", 500, "cannot be fetched"),
    ],
)
def test_the_hubs_refusals_are_sentences(
    hub: Hub, tmp_path: Path, error: str, status: int, said: str
) -> None:
    hub.error, hub.status = error, status
    answer = download(hub, tmp_path / "models", "o/n@dev")
    assert answer.startswith("UserError o/n@dev")
    assert said in answer
    assert hub.url in answer


def test_no_connection_is_a_sentence(hub: Hub, tmp_path: Path) -> None:
    said = download(hub, tmp_path / "models", HF_ENDPOINT="http://127.0.0.1:9")
    assert said.startswith("UserError o/n is not in")
    assert "cannot be reached" in said


def test_a_malformed_hub_id_is_refused(tmp_path: Path) -> None:
    for hub_id in ("../x", "a/b/c", "a", "a/../b", "a/b@", "-a/b"):
        with pytest.raises(UserError, match="is no hub id"):
            models.download(hub_id, tmp_path)


# -- hashes ------------------------------------------------------------------------------------


def test_a_hash_is_kept_until_the_file_changes(tmp_path: Path) -> None:
    path, cache = tmp_path / "x.safetensors", tmp_path / "cache"
    path.write_bytes(b"one")
    first = models.sha256(path, cache)
    assert first == digest(b"one").hexdigest()
    stamp = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert models.sha256(path, cache) == first, "same size and time: taken from the cache"
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert models.sha256(path, cache) == digest(b"two").hexdigest()


def test_a_folders_hash_is_that_of_names_and_contents(tmp_path: Path) -> None:
    one, two = place(tmp_path / "one"), place(tmp_path / "two")
    cache = tmp_path / "cache"
    assert models.sha256(one, cache) == models.sha256(two, cache)
    (two / "tokenizer/vocab.json").rename(two / "tokenizer/renamed.json")
    assert models.sha256(one, cache) != models.sha256(two, cache)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 3}'])
def test_a_damaged_cache_is_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "sha256.json").write_text(content)
    (tmp_path / "x").write_bytes(b"one")
    assert models.sha256(tmp_path / "x", tmp_path) == digest(b"one").hexdigest()


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"one")
    (tmp_path / "file").write_bytes(b"")
    assert models.sha256(tmp_path / "x", tmp_path / "file") == digest(b"one").hexdigest()


def test_a_missing_file_has_no_hash(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read: No such file"):
        models.sha256(tmp_path / "none", tmp_path)


def test_finding_models_does_not_import_the_hub() -> None:
    code = (
        "import sys, sdamd.models; print('huggingface_hub' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
