"""What presets make of a request: defaults < presets < what is asked."""

import pytest

from sdamd.preset import Change, Preset, applied, from_request
from sdamd.request import Request


def preset(
    name: str = "p", tiers: dict[int, dict[str, object]] | None = None, **values: object
) -> Preset:
    return Preset(name=name, values=values, tiers=tiers or {})


@pytest.mark.parametrize(
    ("presets", "asked", "made"),
    [
        ([], {"width": 64}, {"width": 64}),
        ([preset(width=512)], {}, {"width": 512}),
        ([preset(width=512)], {"width": 64}, {"width": 64}),
        ([preset(width=512), preset(width=768, steps=5)], {}, {"width": 768, "steps": 5}),
        ([preset(prompt="photo of {prompt}")], {"prompt": "a cat"}, {"prompt": "photo of a cat"}),
        ([preset(prompt="photo of {prompt}")], {}, {"prompt": "photo of"}),
        ([preset(prompt="{prompt}, soft")], {}, {"prompt": "soft"}),
        ([preset(prompt="a dog")], {}, {"prompt": "a dog"}),
        ([preset(prompt="a dog")], {"prompt": "a cat"}, {"prompt": "a cat"}),
        ([preset(prompt="[{prompt}]"), preset(prompt="<{prompt}>")], {"prompt": "c"},
         {"prompt": "<[c]>"}),
        ([preset(prompt="a dog"), preset(prompt="<{prompt}>")], {}, {"prompt": "<a dog>"}),
        ([preset(prompt="<{prompt}>"), preset(prompt="a dog")], {}, {"prompt": "a dog"}),
        ([preset(negative_prompt="{prompt}, bad")], {"negative_prompt": "ugly"},
         {"negative_prompt": "ugly, bad"}),
        ([preset(prompt="{prompt} {prompt}")], {"prompt": "{prompt}"},
         {"prompt": "{prompt} {prompt}"}),
    ],
)  # fmt: skip
def test_the_later_and_the_asked_go_first(
    presets: list[Preset], asked: dict[str, object], made: dict[str, object]
) -> None:
    assert applied(presets, asked, None)[0] == made


@pytest.mark.parametrize(
    ("vram", "scale"), [(None, 1.5), (7.98, 1.5), (11.98, 2.0), (15.98, 2.5), (23.98, 2.5)]
)
def test_the_highest_tier_that_the_card_has_counts(vram: float | None, scale: float) -> None:
    tiers: dict[int, dict[str, object]] = {16: {"hires_scale": 2.5}, 12: {"hires_scale": 2.0}}
    made, _ = applied([preset(hires_scale=1.5, tiers=tiers)], {}, vram)
    assert made["hires_scale"] == scale


def test_every_change_is_told_and_nothing_else() -> None:
    presets = [preset("a", width=512, steps=5), preset("b", width=512, prompt="photo of {prompt}")]
    _, changes = applied(presets, {"steps": 9, "prompt": "x"}, None)
    assert changes == (
        Change(field="width", before=None, after=512, preset="a"),
        Change(field="prompt", before="x", after="photo of x", preset="b"),
    )


@pytest.mark.report("E28")
def test_a_request_becomes_a_preset_without_seed_and_paths() -> None:
    request = Request(
        prompt="a cat", checkpoint="/home/alice/model.safetensors", seed=7, count=3, width=64,
        init_image="/home/alice/x.png",
    )  # fmt: skip
    assert from_request(request, name="x").values == {"prompt": "a cat", "width": 64}
