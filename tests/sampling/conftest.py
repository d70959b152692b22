"""k-diffusion as an oracle, and a checkpoint's scheduler config."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ORACLE = "k_diffusion_oracle"


@pytest.fixture(scope="session")
def k_diffusion() -> Iterator[SimpleNamespace]:
    """k-diffusion's `sampling` and `external`, without its package.

    The package's own __init__ imports training code and with it torchvision; so does `utils`, of
    which sampling needs one function.
    """
    spec = importlib.util.find_spec("k_diffusion")
    if spec is None or spec.origin is None:
        pytest.skip("k-diffusion is not installed; scripts/test.py installs it")
    package = ModuleType(ORACLE)
    package.__path__ = [str(Path(spec.origin).parent)]
    utils = ModuleType(f"{ORACLE}.utils")
    utils.append_dims = _append_dims  # type: ignore[attr-defined]  # a module made by hand
    package.utils = utils  # type: ignore[attr-defined]
    odeint = ModuleType("torchdiffeq")
    odeint.odeint = None  # type: ignore[attr-defined]  # for log likelihoods alone
    made = {ORACLE: package, f"{ORACLE}.utils": utils}
    if importlib.util.find_spec("torchdiffeq") is None:
        made["torchdiffeq"] = odeint
    sys.modules.update(made)
    yield SimpleNamespace(
        sampling=importlib.import_module(f"{ORACLE}.sampling"),
        external=importlib.import_module(f"{ORACLE}.external"),
    )
    for name in (*made, f"{ORACLE}.sampling", f"{ORACLE}.external"):
        del sys.modules[name]


@pytest.fixture
def sd_config() -> dict[str, object]:
    """What Stable Diffusion 1.5's scheduler_config.json says of its training, and more."""
    return {
        "_class_name": "PNDMScheduler",
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "num_train_timesteps": 1000,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "trained_betas": None,
        "clip_sample": False,
    }


def _append_dims(x: torch.Tensor, dimensions: int) -> torch.Tensor:
    return x[(...,) + (None,) * (dimensions - x.ndim)]
