import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from scripts import train_tiny_model as training  # noqa: E402
from sdamd.checkpoint import identify  # noqa: E402


def test_newton_schulz_gives_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((32, 64), (64, 32), (16, 8, 3, 3)):
        made = training.orthogonal(torch.randn(shape))
        values = torch.linalg.svdvals(made.reshape(shape[0], -1))
        assert made.shape == shape
        assert values.min() > 0.4
        assert values.max() < 1.4


@pytest.mark.parametrize(("step", "factor"), [(0, 0.1), (9, 1.0), (50, 1.0), (75, 0.5), (100, 0.0)])
def test_the_rate_warms_up_holds_and_decays(step: int, factor: float) -> None:
    given = training.schedule(step, 100, warm_up=10, decay_from=0.5)
    assert given == pytest.approx(factor)


def test_a_checkpoint_restores_live_and_averaged_weights(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 3)
    average = training.Average({"a": module}, 0.9)
    with torch.no_grad():
        module.weight.add_(1)
    average.update(50)
    training.checkpoint(tmp_path / "run.safetensors", average, step=51)
    live, mean = module.weight.detach().clone(), average.mean["a.weight"].clone()
    other = torch.nn.Linear(3, 3)
    restored = training.Average({"a": other}, 0.9)
    assert training.restore(tmp_path / "run.safetensors", restored) == 51
    assert torch.equal(other.weight, live)
    assert torch.equal(restored.mean["a.weight"], mean)


@pytest.mark.slow
def test_all_stages_run_resume_and_export_a_pipeline(tmp_path: Path) -> None:
    """A few steps of everything, in one process; the run goes on where it stopped."""
    training.pictures(tmp_path, 96, 96, 2)
    training.tokenizer(tmp_path)
    training.train_vae(tmp_path, 0, 1, steps=2, batch=2, side=64, lr=1e-3)
    training.train_vae(tmp_path, 0, 1, steps=3, batch=2, side=64, lr=1e-3)
    training.latents(tmp_path, 2)
    training.train_unet(tmp_path, 0, 1, steps=2, batch=2, lr=1e-3, decay_from=0.5)
    training.export(tmp_path, tmp_path / "model")
    found = identify(tmp_path / "model")
    assert found.family.name == "tiny"
    assert found.prediction_type == "v_prediction"
    training.unpack(tmp_path / "model", tmp_path / "again")
    training.export(tmp_path / "again", tmp_path / "same")
    for weights in (tmp_path / "model").rglob("*.safetensors"):
        same = tmp_path / "same" / weights.relative_to(tmp_path / "model")
        assert weights.read_bytes() == same.read_bytes()
    tokens = json.loads((tmp_path / "tokenizer" / "vocab.json").read_text())
    assert {"mountains</w>", "sunset</w>", "<|endoftext|>"} <= set(tokens)
