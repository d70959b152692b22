"""The model that ships with sdamd: complete, small, and obedient to its prompts."""

import json
import random
import struct
from pathlib import Path

import pytest

from sdamd.checkpoint import identify
from sdamd.models import EMBEDDED

torch = pytest.importorskip("torch")

from scripts import evaluate_tiny_model as evaluation  # noqa: E402
from scripts.train_tiny_model import load_tokenizer  # noqa: E402

ASSETS = EMBEDDED.parent


def test_all_assets_take_at_most_32_megabytes() -> None:
    assert sum(f.stat().st_size for f in ASSETS.rglob("*") if f.is_file()) <= 32 * 10**6


def test_it_is_a_complete_stable_diffusion_folder_in_float16() -> None:
    index = json.loads((EMBEDDED / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    parts = [name for name, kind in index.items() if isinstance(kind, list) and kind[0]]
    assert sorted(parts) == ["scheduler", "text_encoder", "tokenizer", "unet", "vae"]
    assert all((EMBEDDED / part).is_dir() for part in parts)
    for weights in EMBEDDED.rglob("*.safetensors"):
        with weights.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        dtypes = {v["dtype"] for k, v in header.items() if k != "__metadata__"}
        assert dtypes <= {"F16", "I64"}, weights


def test_no_file_names_a_folder_of_the_machine_that_trained_it() -> None:
    for config in EMBEDDED.rglob("*.json"):
        assert "_name_or_path" not in json.loads(config.read_text()), config


def test_it_is_identified_as_the_embedded_family() -> None:
    found = identify(EMBEDDED)
    assert (found.family.name, found.prediction_type) == ("tiny", "v_prediction")


def test_its_vocabulary_keeps_common_words_whole_and_takes_any_text() -> None:
    tokens = load_tokenizer(EMBEDDED.parent / "tiny")
    whole = "a beautiful photo of mountains by the sea at sunset with clouds"
    assert len(tokens(whole).input_ids) == len(whole.split()) + 2
    for text in ("Größe", "猫", "🙂", "\\n\\t", "x" * 500):
        ids = tokens(text, truncation=True, max_length=77).input_ids
        assert 2 < len(ids) <= 77


def test_its_autoencoder_reconstructs_at_29_decibels() -> None:
    assert evaluation.vae_psnr(EMBEDDED, pictures=16) >= 29.0


@pytest.mark.slow
def test_subject_and_background_have_the_colours_of_the_prompt() -> None:
    """A sample of what scripts/evaluate_tiny_model.py measures in full."""
    asked = [a for a in evaluation.prompts(random.Random(4), 40) if "shape" in a.facts]
    found = [evaluation.colours(image) for image in evaluation.render(Path(EMBEDDED), asked)]
    subjects = sum(s == a.facts["subject colour"] for (s, _), a in zip(found, asked, strict=True))
    grounds = sum(b == a.facts["background colour"] for (_, b), a in zip(found, asked, strict=True))
    assert subjects / len(asked) >= 0.9
    assert grounds / len(asked) >= 0.9
