import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, SlicedAttnProcessor
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from scripts.bench import peak_bytes
from sdamd.backends.attention import (
    MIN_ROWS,
    Blocks,
    Processor,
    attend_with,
    blocks_of,
    chunked,
)
from sdamd.errors import BadRequest

KIB = 1024


def heads_of(width: int, tokens: int = 100, *, seed: int, batch: int = 2) -> torch.Tensor:
    """Random heads as they come out of a projection: a view whose heads lie beside each other."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, 3, width, generator=drawn).transpose(1, 2)


def three(width: int, tokens: int = 100, keys: int = 100) -> tuple[torch.Tensor, ...]:
    lengths = (tokens, keys, keys)
    return tuple(heads_of(width, n, seed=seed) for seed, n in enumerate(lengths))


# -- equal to torch's own ------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 40, 64, 80, 160, 512])
@pytest.mark.parametrize("kib", [1, 4, 64, 512, 64 * KIB], ids=lambda kib: f"{kib}KiB")
@pytest.mark.parametrize(
    ("tokens", "keys"), [(100, 100), (131, 77), (1, 300), (257, 1), (64, 65)], ids=str
)
def test_blocks_give_what_fused_attention_gives(
    width: int, kib: int, tokens: int, keys: int
) -> None:
    query, key, value = three(width, tokens, keys)
    made = chunked(query, key, value, block_bytes=kib * KIB)
    expected = functional.scaled_dot_product_attention(query, key, value)
    assert made.dtype == expected.dtype
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)


MASKS = {
    "bias of all": lambda: torch.randn(2, 3, 131, 150),
    "bias of keys": lambda: torch.randn(2, 1, 1, 150) * 10,
    "bias of one head": lambda: torch.randn(1, 3, 131, 150),
    "bool": lambda: torch.rand(2, 1, 131, 150) > 0.5,
    "minus infinity": lambda: torch.zeros(131, 150).masked_fill(
        torch.rand(131, 150) > 0.5, -torch.inf
    ),
    "nowhere to look": lambda: torch.zeros(2, 1, 131, 150, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("kib", [8, 200, 64 * KIB], ids=["over keys", "over queries", "at once"])
def test_masks_mean_what_they_mean_to_torch(kind: str, kib: int) -> None:
    query, key, value = three(40, 131, 150)
    mask = MASKS[kind]()
    made = chunked(query, key, value, mask, block_bytes=kib * KIB)
    expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)


@given(
    st.integers(1, 40), st.integers(1, 90), st.integers(1, 90), st.integers(1, 9000),
    st.integers(0, 2**31),
)  # fmt: skip
def test_any_size_in_any_blocks_is_equal(
    width: int, tokens: int, keys: int, budget: int, seed: int
) -> None:
    lengths = (tokens, keys, keys)
    query, key, value = (heads_of(width, n, seed=seed + i) for i, n in enumerate(lengths))
    made = chunked(query, key, value, block_bytes=budget)
    expected = functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kib", [8, 200, 64 * KIB])
def test_scores_far_apart_are_no_overflow(kib: int) -> None:
    query, key, value = three(64)
    made = chunked(query * 100, key * 100, value, block_bytes=kib * KIB)
    expected = functional.scaled_dot_product_attention(query * 100, key * 100, value)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kib", [8, 200, 64 * KIB])
def test_nan_is_never_hidden(kib: int) -> None:
    query, key, value = three(40)
    key[0, 1, 3, 5] = torch.nan
    made = chunked(query, key, value, block_bytes=kib * KIB)
    expected = functional.scaled_dot_product_attention(query, key, value)
    assert torch.equal(made.isnan(), expected.isnan())
    assert made.isnan().any()


@pytest.mark.report("C06")
@pytest.mark.parametrize("kib", [8, 200, 64 * KIB])
def test_scores_that_overflow_float16_are_computed_in_float32(kib: int) -> None:
    """400 * 400 * 64 is 20 times the range of float16; SD 2.x asks for `upcast_attention`."""
    query = torch.full((1, 1, 100, 64), 400.0, dtype=torch.float16)
    value = heads_of(64, seed=0, batch=1)[:, :1].half()
    assert not chunked(query, query, value, block_bytes=kib * KIB).isfinite().all()
    made = chunked(query, query, value, block_bytes=kib * KIB, upcast=True)
    expected = value.float().mean(2, keepdim=True).expand_as(value)
    torch.testing.assert_close(made.float(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("kib", [4, 100, 64 * KIB])
def test_half_precision_stays_near_float32(dtype: torch.dtype, limit: float, kib: int) -> None:
    narrow = [part.to(dtype) for part in three(64, 200, 200)]
    made = chunked(narrow[0], narrow[1], narrow[2], block_bytes=kib * KIB)
    query, key, value = (part.float() for part in narrow)
    expected = functional.scaled_dot_product_attention(query, key, value)
    assert made.dtype == dtype
    torch.testing.assert_close(made.float(), expected, rtol=0, atol=limit)


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "tokens", "keys", "scores", "blocks"),
    [
        pytest.param(8, 100, 100, 10**6, (8, 100, 100), id="all at once"),
        pytest.param(8, 100, 100, 25_000, (2, 100, 100), id="some heads"),
        pytest.param(8, 100, 100, 70_000, (4, 100, 100), id="even groups of heads"),
        pytest.param(8, 4096, 4096, 2**20, (1, 256, 4096), id="some queries"),
        pytest.param(8, 4096, 77, 2**17, (1, 1366, 77), id="even blocks of queries"),
        pytest.param(8, 4096, 4096, 2**17, (1, MIN_ROWS, 2048), id="some keys"),
        pytest.param(8, 10, 4096, 1, (1, 10, 1), id="one key"),
    ],
)
def test_a_block_holds_as_many_scores_as_allowed(
    heads: int, tokens: int, keys: int, scores: int, blocks: tuple[int, int, int]
) -> None:
    of_heads, rows, of_keys = blocks
    assert blocks_of(heads, tokens, keys, scores) == Blocks(heads=of_heads, rows=rows, keys=of_keys)


@given(st.integers(1, 64), st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 10**9))
def test_no_block_is_larger_than_allowed_but_for_the_least(
    heads: int, tokens: int, keys: int, scores: int
) -> None:
    size = blocks_of(heads, tokens, keys, scores)
    assert 1 <= size.heads <= heads
    assert 1 <= size.rows <= tokens
    assert 1 <= size.keys <= keys
    assert size.heads * size.rows * size.keys <= max(scores, min(tokens, MIN_ROWS))


@pytest.mark.report("B12")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_of_the_size_of_the_score_matrix_is_ever_alive(
    dtype: torch.dtype, masked: bool
) -> None:
    """B12: without kernels torch's own attention allocates all scores at once."""
    query, key, value = (part.to(dtype) for part in three(16, 768, 768))
    mask = torch.zeros(1, 1, 1, 768, dtype=dtype) if masked else None
    all_scores = 2 * 3 * 768 * 768 * dtype.itemsize
    for block_bytes in (2**17, 2**19):
        attend = partial(chunked, query, key, value, mask, block_bytes=block_bytes)
        # The result, the keys and values of a head in float32, and a block of queries beside it.
        beside = query.nbytes + 2 * 768 * 16 * 4 + 2**17
        assert peak_bytes(attend) <= block_bytes + beside < all_scores / 3


# -- as a processor ------------------------------------------------------------------------------


@pytest.fixture
def blocks() -> Processor:
    return Processor(lambda *parts, **asked: chunked(*parts, block_bytes=4 * KIB, **asked))


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"query_dim": 96, "heads": 4, "dim_head": 24}, id="self"),
        pytest.param({"query_dim": 96, "cross_attention_dim": 32, "bias": True}, id="cross"),
        pytest.param(
            {
                "query_dim": 96,
                "heads": 1,
                "dim_head": 96,
                "norm_num_groups": 8,
                "residual_connection": True,
                "rescale_output_factor": 1.5,
                "_from_deprecated_attn_block": True,
            },
            id="the VAE's",
        ),
        pytest.param({"query_dim": 96, "qk_norm": "layer_norm"}, id="normed"),
        pytest.param(
            {"query_dim": 96, "cross_attention_dim": 32, "cross_attention_norm": "layer_norm"},
            id="normed context",
        ),
        pytest.param({"query_dim": 96, "upcast_attention": True}, id="upcast"),
    ],
)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("image", [False, True], ids=["tokens", "image"])
def test_a_module_of_diffusers_gives_the_same_with_it(
    blocks: Processor, asked: dict[str, Any], masked: bool, image: bool
) -> None:
    torch.manual_seed(0)
    module = Attention(**{"heads": 8, "dim_head": 12, **asked}).eval()
    entered = torch.randn(2, 96, 9, 7) if image else torch.randn(2, 63, 96)
    cross = "cross_attention_dim" in asked
    context = torch.randn(2, 21, 32) if cross else None
    mask = torch.randn(2, 1, 21 if cross else 63) if masked else None
    with torch.inference_mode():
        made = []
        for processor in (AttnProcessor2_0(), blocks):
            module.set_processor(processor)
            made.append(module(entered, encoder_hidden_states=context, attention_mask=mask))
    assert made[0].shape == entered.shape
    torch.testing.assert_close(made[1], made[0], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def unet() -> Any:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        cross_attention_dim=24, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def vae() -> Any:
    torch.manual_seed(0)
    return AutoencoderKL(block_out_channels=(32, 32), norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2).eval()  # fmt: skip


@torch.inference_mode()
def step(unet: Any) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(3)
    made: torch.Tensor = unet(
        torch.randn(2, 4, 16, 24, generator=drawn), 500,
        encoder_hidden_states=torch.randn(2, 77, 24, generator=drawn), return_dict=False,
    )[0]  # fmt: skip
    return made


@pytest.mark.parametrize("kind", ["chunked", "sliced", "math"])
def test_a_unet_gives_the_same_in_every_way(unet: Any, kind: str) -> None:
    attend_with(unet, "fused", block_bytes=0)
    expected = step(unet)
    attend_with(unet, kind, block_bytes=64 * KIB)
    used = {type(processor) for processor in unet.attn_processors.values()}
    kinds = {"chunked": Processor, "sliced": SlicedAttnProcessor, "math": AttnProcessor2_0}
    assert used == {kinds[kind]}
    torch.testing.assert_close(step(unet), expected, rtol=0, atol=1e-5)


def test_going_back_to_fused_takes_the_blocks_away(unet: Any) -> None:
    attend_with(unet, "chunked", block_bytes=1)
    attend_with(unet, "fused", block_bytes=1)
    assert {type(p) for p in unet.attn_processors.values()} == {AttnProcessor2_0}


@torch.inference_mode()
def test_a_vae_decodes_and_encodes_the_same_in_blocks(vae: Any) -> None:
    drawn = torch.Generator().manual_seed(4)
    latents = torch.randn(1, 4, 24, 16, generator=drawn)
    picture = torch.rand(1, 3, 48, 32, generator=drawn)
    made = []
    for kind in ("fused", "chunked"):
        attend_with(vae, kind, block_bytes=16 * KIB, upcast=True)
        made.append((vae.decode(latents).sample, vae.encode(picture).latent_dist.mode()))
    for fused, blocked in zip(*made, strict=True):
        torch.testing.assert_close(blocked, fused, rtol=0, atol=1e-5)


# -- packages ------------------------------------------------------------------------------------


class Package(ModuleType):
    """Stands in for flash-attention or xFormers; computes, and counts its calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls = 0

    def flash_attn_func(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.calls += 1
        heads, keys, values = (part.transpose(1, 2) for part in (query, key, value))
        return functional.scaled_dot_product_attention(heads, keys, values).transpose(1, 2)

    memory_efficient_attention = flash_attn_func


@pytest.mark.parametrize(
    ("kind", "module"), [("flash", "flash_attn"), ("xformers", "xformers.ops")]
)
def test_an_installed_package_attends(
    kind: str, module: str, unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Package(module)
    monkeypatch.setitem(sys.modules, module.partition(".")[0], package)
    monkeypatch.setitem(sys.modules, module, package)
    attend_with(unet, "fused", block_bytes=0)
    expected = step(unet)
    attend_with(unet, kind, block_bytes=64 * KIB)
    torch.testing.assert_close(step(unet), expected, rtol=0, atol=1e-5)
    # Not for float32, which neither of them takes.
    assert package.calls == 0
    module_of = Attention(query_dim=64, heads=2, dim_head=32).bfloat16().eval()
    entered = torch.randn(1, 50, 64).bfloat16()
    with torch.inference_mode():
        module_of.set_processor(AttnProcessor2_0())
        expected = module_of(entered)
        module_of.set_processor(next(iter(unet.attn_processors.values())))
        torch.testing.assert_close(module_of(entered), expected, rtol=0, atol=1e-2)
    assert package.calls == 1


@pytest.mark.parametrize("kind", ["flash", "xformers"])
def test_a_package_that_is_not_there_is_named(
    kind: str, unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flash_attn", "xformers", "xformers.ops"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadRequest, match=f"attention is {kind}, and its package cannot be used"):
        attend_with(unet, kind, block_bytes=1)
