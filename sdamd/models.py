"""The models folder: finds checkpoints by name, lists them, downloads them, hashes them."""

import errno
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final, TypeAlias

from sdamd.checkpoint import Checkpoint, identify
from sdamd.checkpoint.folder import COMPONENTS, weight_variant
from sdamd.errors import BadCheckpoint, StorageError, UserError, unknown

log = logging.getLogger(__name__)

EMBEDDED: Final = Path(str(files("sdamd") / "assets" / "tiny"))
"""The model that ships with sdamd; its name is empty in a request."""

DEPTH: Final = 4
"""How many folders deep models are looked for; links are followed, so there must be an end."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the file that comes next, the bytes that are there, and the bytes in all."""

Fetch: TypeAlias = Callable[[str, Path], Path]

_HUB_ID: Final = re.compile(
    r"(?P<owner>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?",
    re.ASCII,
)


def find(name: str, folder: Path, fetch: Fetch | None = None) -> Checkpoint:
    """Find the checkpoint that a request names.

    `name` is empty for the embedded model, or the name of a model in `folder` (its path without
    the suffix, or the last part of it, in any case), or a path, or a hub id `owner/name` with an
    optional `@revision`. A hub id that is not in the folder yet is given to `fetch`, which is
    usually `download`; without `fetch` nothing is downloaded.

    Raises:
        BadCheckpoint: what was found cannot be run.
        UserError: there is no such model; the nearest names are given.
    """
    if name in {"", "embedded"}:
        return replace(identify(EMBEDDED), name="embedded")
    names = model_paths(folder)
    found = _lookup(name, names)
    if len(found) > 1:
        raise UserError(f"checkpoint {name!r} is ambiguous; allowed are {', '.join(found)}")
    if found:
        return replace(identify(names[found[0]]), name=found[0])
    path = Path(name).expanduser()
    if _exists(path):
        return identify(path)
    if _HUB_ID.fullmatch(name):
        if fetch is None:
            raise UserError(
                f"checkpoint {name!r} is not in {folder}; `sdamd models download {name}` gets it"
            )
        return replace(identify(fetch(name, folder)), name=name)
    if path.suffix == ".safetensors" or path.is_absolute():
        raise BadCheckpoint(f"{path} does not exist")
    raise UserError(unknown(name, list(names), "checkpoint") if names else _none(name, folder))


def find_needed(name: str, digest: str, url: str, folder: Path, cache: Path) -> str:
    """The name under which a request finds a checkpoint that a preset needs.

    `digest` is its sha256 or empty, `url` where people get it, or empty. Nothing is downloaded.

    Raises:
        UserError: it is not there, or is another file of the same name.
    """
    names = model_paths(folder)
    found = _lookup(Path(name).stem if name.endswith(".safetensors") else name, names)
    others = []
    for there in found:
        has = sha256(names[there], cache) if digest else ""
        if has == digest:
            return there
        others.append(f"{there} is another file (sha256 {has[:10] or 'of a folder'})")
    said = f"; {'; '.join(others)}" if others else f"; it is not in {folder}"
    where = f"; people get it from {url}" if url else ""
    wanted = f" (sha256 {digest[:10]})" if digest else ""
    raise UserError(
        f"the preset needs the checkpoint {name!r}{wanted}{said}{where}; --checkpoint takes another"
    )


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Identify every model in `folder`; files that are no checkpoint are left out, and logged."""
    checkpoints = []
    for name, path in model_paths(folder).items():
        try:
            checkpoints.append(replace(identify(path), name=name))
        except BadCheckpoint as error:
            log.info("%s", error)
    return checkpoints


def model_paths(folder: Path) -> dict[str, Path]:
    """Names and paths of what looks like a model under `folder`, in order of the names.

    A name is the path below `folder` with `/` between its parts, without `.safetensors`.
    """
    paths = {
        path.relative_to(folder).as_posix().removesuffix(".safetensors"): path
        for path in _walk(folder, DEPTH)
    }
    return dict(sorted(paths.items(), key=lambda item: item[0].casefold()))


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"{folder} cannot be read: {error.strerror}") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if (entry / "model_index.json").is_file():
                yield entry
            elif depth > 1:
                yield from _walk(entry, depth - 1)
        elif entry.suffix.lower() == ".safetensors":
            yield entry


def _lookup(name: str, names: Mapping[str, Path]) -> list[str]:
    """All models that `name` may mean: those of exactly that name, else those that end in it."""
    wanted = name.replace("\\", "/").casefold().removesuffix(".safetensors")
    exact = [known for known in names if known.casefold() == wanted]
    return exact or [known for known in names if known.casefold().endswith(f"/{wanted}")]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # longer than a path may be, or with a NUL
        return False


def _none(name: str, folder: Path) -> str:
    return (
        f"checkpoint {name!r} is not known: {folder} holds no models; allowed are a path, a hub "
        "id such as owner/name, and nothing for the embedded model"
    )


# -- downloads ---------------------------------------------------------------------------------

DOWNLOADS: Final = ".downloads"
"""Where a download lies until it is complete, inside the models folder: the last step is then a
rename on one disk, and a model under its own name is never half there."""


def download(hub_id: str, folder: Path, progress: Progress | None = None) -> Path:
    """Fetch a model from the hub into `folder/owner/name` and return its path.

    Only what is loaded is fetched: configs, tokenizers and one set of `.safetensors` weights
    (float16 where there is one); never pickles. A download that was cut off goes on where it
    stopped, in a later run too. The hub is that of HF_ENDPOINT; HF_HUB_OFFLINE forbids any. The
    bar of each file is drawn on stderr.

    Raises:
        UserError: no such model, no access, or no connection.
        BadCheckpoint: the model has no weights that sdamd may load.
        StorageError: no room, or the folder cannot be written.
    """
    # Not at the top: it costs 0.2 s that no other command needs.
    from huggingface_hub import HfApi, hf_hub_url  # noqa: PLC0415

    match = _HUB_ID.fullmatch(hub_id)
    if match is None:
        raise UserError(f"{hub_id!r} is no hub id; allowed is owner/name or owner/name@revision")
    repository, revision = f"{match['owner']}/{match['name']}", match["revision"]
    suffix = f"@{revision.replace('/', '-')}" if revision else ""
    target = folder / match["owner"] / f"{match['name']}{suffix}"
    if there := _complete(target):
        return there
    with _translated(hub_id, folder):
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
        known = {file.rfilename: file for file in info.siblings or ()}
        wanted = choose_files(hub_id, known)
        sizes = {name: known[name].size or 0 for name in wanted}
        staging = folder / DOWNLOADS / f"{match['owner']}--{match['name']}@{info.sha}"
        staging.mkdir(parents=True, exist_ok=True)
        _check_room(hub_id, staging, sizes)
        for number, name in enumerate(wanted):
            if progress is not None:
                progress(name, sum(sizes[n] for n in wanted[:number]), sum(sizes.values()))
            lfs = known[name].lfs
            _fetch(
                hf_hub_url(repository, name, revision=info.sha),
                staging / name,
                size=sizes[name],
                sha256=lfs.sha256 if lfs else None,
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(target)
    there = _complete(target)
    assert there is not None
    return there


def _fetch(url: str, path: Path, *, size: int, sha256: str | None) -> None:
    """Fetch one file, going on after what an earlier run left, and check it.

    huggingface_hub's own `hf_hub_download` gives each run a file of its own and removes it, so a
    cut connection would cost gigabytes again (since 2.x; huggingface_hub#4228).

    Raises:
        UserError: what came is not what the hub announced.
    """
    from huggingface_hub.file_download import http_get  # noqa: PLC0415  # as in download
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # noqa: PLC0415
        build_hf_headers,
    )

    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    # Small files may come compressed, and then a range counts other bytes.
    with part.open("ab" if sha256 else "wb") as file:
        there = file.tell()
        headers = build_hf_headers()
        http_get(url, file, resume_size=there, headers=headers, expected_size=size)
    if sha256:
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            part.unlink()
            raise UserError(
                f"{url} arrived damaged: its SHA-256 is {found}, the hub says {sha256}; try again"
            )
    part.rename(path)


def choose_files(hub_id: str, names: Iterable[str]) -> list[str]:
    """Choose, among the files of a repository, those that sdamd loads.

    Raises:
        BadCheckpoint: there are none, or several single files of which one must be chosen.
    """
    names = sorted(names)
    if "model_index.json" not in names:
        return [_choose_single_file(hub_id, names)]
    files = [Path(name) for name in names if Path(name).parent.as_posix() in _FOLDERS]
    models = {file.parent for file in files if file.parent.as_posix() in _MODELS}
    variant = next(
        (
            variant
            for variant in ("fp16", "")
            if models == {f.parent for f in files if weight_variant(f.name) == variant}
        ),
        None,
    )
    if variant is None or not models:
        raise BadCheckpoint(
            f"{hub_id} has no complete set of .safetensors weights; pickles are never fetched"
        )
    wanted = [
        file.as_posix()
        for file in files
        if file.suffix in {".json", ".txt"} or weight_variant(file.name) == variant
    ]
    return ["model_index.json", *wanted]


_MODELS: Final = frozenset(name for models in COMPONENTS.values() for name in models)
_FOLDERS: Final = _MODELS | {"tokenizer", "tokenizer_2", "scheduler"}


def _choose_single_file(hub_id: str, names: Sequence[str]) -> str:
    found = [name for name in names if "/" not in name and name.endswith(".safetensors")]
    if len(found) == 1:
        return found[0]
    if found:
        raise BadCheckpoint(
            f"{hub_id} has {len(found)} single files and no diffusers folder: "
            f"{', '.join(found[:8])}; download the one that you want into the models folder"
        )
    raise BadCheckpoint(
        f"{hub_id} has neither model_index.json nor a .safetensors file; pickles are never fetched"
    )


def _complete(target: Path) -> Path | None:
    """Return the model at `target` if it is there: the folder, or the one file in it."""
    if (target / "model_index.json").is_file():
        return target
    return next(iter(sorted(target.glob("*.safetensors"))), None)


def _check_room(hub_id: str, staging: Path, sizes: Mapping[str, int]) -> None:
    """Refuse a download that cannot fit, before it fills the disk.

    Raises:
        StorageError: with both figures.
    """
    there = sum(file.stat().st_size for file in staging.rglob("*") if file.is_file())
    needed = max(0, sum(sizes.values()) - there)
    free = shutil.disk_usage(staging).free
    if needed > free:
        raise StorageError(f"{hub_id} needs {needed} more bytes in {staging}; {free} are free")


@contextmanager
def _translated(hub_id: str, folder: Path) -> Iterator[None]:
    """Turn the errors of huggingface_hub, its HTTP client and the disk into sentences."""
    from huggingface_hub import constants, errors  # noqa: PLC0415  # as in download

    hub = constants.ENDPOINT
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise UserError(
            f"{hub_id} is not in {folder}, and HF_HUB_OFFLINE forbids to download it"
        ) from error
    except errors.GatedRepoError as error:
        raise UserError(
            f"{hub_id} is gated: accept its terms on {hub}, and set HF_TOKEN to a token of yours"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{hub_id}: {hub} has the model, but not this revision") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{hub_id} is not on {hub}, or is private; check the spelling") from error
    except errors.HfHubHTTPError as error:
        raise UserError(f"{hub_id} cannot be fetched: {hub} answers {error}") from error
    except (
        errors.HTTPError,  # type: ignore[attr-defined]  # of its HTTP client, which changed once
        errors.LocalEntryNotFoundError,
        ConnectionError,
    ) as error:
        raise UserError(
            f"{hub_id} is not in {folder}, and {hub} cannot be reached ({error}); "
            "what was fetched is kept, and the next try goes on from there"
        ) from error
    except OSError as error:
        if error.errno is None:
            raise UserError(f"{hub_id} arrived incomplete from {hub} ({error})") from error
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        what = "is full" if full else f"cannot be written: {error.strerror or error}"
        raise StorageError(f"{folder} {what}, while fetching {hub_id}") from error


# -- hashes ------------------------------------------------------------------------------------


def sha256(path: Path, cache: Path) -> str:
    """Hash a model, or take the hash from `cache` while size and time of change are the same.

    A folder's hash is that of the names and hashes of its files.

    Raises:
        StorageError: a file cannot be read.
    """
    known = _read_cache(cache / "sha256.json")
    fresh: dict[str, str] = {}
    try:
        if path.is_dir():
            lines = [
                f"{_file_sha256(file, known, fresh)}  {file.relative_to(path).as_posix()}\n"
                for file in sorted(path.rglob("*"))
                if file.is_file()
            ]
            digest = hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()
        else:
            digest = _file_sha256(path, known, fresh)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    if fresh:
        _write_cache(cache / "sha256.json", {**known, **fresh})
    return digest


def _file_sha256(path: Path, known: Mapping[str, str], fresh: dict[str, str]) -> str:
    """Hash one file unless `known` has it; what is new goes into `fresh` too."""
    status = path.stat()
    key = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    if key not in known:
        with path.open("rb") as file:
            fresh[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return known.get(key) or fresh[key]


def _read_cache(path: Path) -> dict[str, str]:
    """Read the hashes; a cache that is missing or damaged is an empty one."""
    try:
        known = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {key: value for key, value in known.items() if isinstance(value, str)}


def _write_cache(path: Path, hashes: Mapping[str, str]) -> None:
    """Replace the cache whole; a cache that cannot be written costs time, not the job."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False
        ) as file:
            json.dump(hashes, file, indent=0)
        Path(file.name).replace(path)
    except OSError as error:
        log.warning("hashes are not kept: %s cannot be written: %s", path, error.strerror)
