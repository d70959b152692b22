"""What all tests share: hypothesis' profile, and small values to build on."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sdamd.checkpoint import FAMILIES, Checkpoint, Layout
from sdamd.request import Job
from sdamd.settings import Settings

# The machines that run the tests are slow and shared, so time says nothing about the code.
settings.register_profile("sdamd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sdamd")


@pytest.fixture
def job() -> Job:
    return Job(
        index=0,
        prompt="a red house",
        negative_prompt="",
        checkpoint="",
        width=128,
        height=128,
        steps=4,
        guidance_scale=4.0,
        scheduler="Euler",
        seed=7,
        upscale=1,
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def machine(home: Path) -> Settings:
    """The settings of a machine that renders on its CPU."""
    return Settings(home=home, device="cpu")


@pytest.fixture
def published() -> dict[str, Checkpoint]:
    """The checkpoint of each family as it was published, without a file."""
    return {
        name: Checkpoint(
            name=name,
            path=Path(),
            layout=Layout.FILE,
            family=family,
            bytes=family.parameters.total * 2,
            prediction_type=family.prediction_type,
            dtype="float16",
            parameters=family.parameters,
        )
        for name, family in FAMILIES.items()
    }
