import os
from pathlib import Path

import pytest

from sdamd import tuned
from sdamd.backends.backend import open_backend
from sdamd.hardware.kernel_cache import claim
from sdamd.hardware.runtime import Engine
from sdamd.hardware.tuning import MIOPEN_FOLDERS


@pytest.mark.report("D07")
def test_rocm_keeps_its_kernels_in_a_locked_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in MIOPEN_FOLDERS:
        os.environ.pop(name, None)
    backend = open_backend(Engine.ROCM, tmp_path, "gfx1100")
    expected = tmp_path / "miopen" / f"{tuned.torch_version()}-gfx1100"
    assert {Path(os.environ[name]).parent for name in MIOPEN_FOLDERS} == {expected}
    beside = claim(tmp_path, tuned.torch_version(), "gfx1100", {})
    assert Path(beside.variables[MIOPEN_FOLDERS[0]]).parent == Path(f"{expected}-2")
    beside.close()
    backend._kernels.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", [Engine.CPU])
def test_other_engines_have_no_kernels_to_keep(tmp_path: Path, engine: Engine) -> None:
    open_backend(engine, tmp_path, "gfx1100")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.report("D07")
def test_a_cache_that_cannot_be_written_is_a_warning_and_no_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    open_backend(Engine.ROCM, tmp_path / "cache", "gfx1100")
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "cannot be used" in said
