import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd.hardware.visibility import VARIABLES, mask_for, visible_indices

UUIDS = ["GPU-1122334455667788", "", "GPU-11aa334455667788"]


@pytest.mark.parametrize(
    ("gpus", "rocr", "hip", "cuda", "ordinal", "seen"),
    [
        (2, None, None, None, None, (0, 1)),
        (2, "1", None, None, None, (1,)),
        (2, None, "1", None, None, (1,)),
        (2, None, None, "1", None, (1,)),
        (2, None, None, None, "1", (1,)),
        (2, "1", "1", None, None, ()),  # HIP counts what ROCr left
        (2, "1", "0", None, None, (1,)),
        (8, "0,3,4,7", "0,1", None, None, (0, 3)),
        (8, "0,3,4,7", None, "3,0", None, (7, 0)),
        (8, "0,3,4,7", None, "1", "2,3", (7,)),
        (2, None, "0", "1", None, (0,)),  # HIP's own variable goes before its alias
        (2, "1,0", None, None, None, (1, 0)),
        (2, "", None, None, None, ()),
        (2, None, "", None, None, ()),
        (2, "-1", None, None, None, ()),
        (2, None, "-1", None, None, ()),
        (2, "0,5,1", None, None, None, (0,)),  # what follows an invalid entry is ignored
        (2, "1,1,0", None, None, None, (1, 0)),
        (2, " 1 , 0 ", None, None, None, (1, 0)),
        (2, "nonsense", None, None, None, ()),
        (2, "9" * 5000, None, None, None, ()),
        (0, "0", None, None, None, ()),
    ],
)
def test_masks_filter_in_layers_and_number_anew(
    gpus: int,
    rocr: str | None,
    hip: str | None,
    cuda: str | None,
    ordinal: str | None,
    seen: tuple[int, ...],
) -> None:
    """A25."""
    values = {
        "ROCR_VISIBLE_DEVICES": rocr,
        "HIP_VISIBLE_DEVICES": hip,
        "CUDA_VISIBLE_DEVICES": cuda,
        "GPU_DEVICE_ORDINAL": ordinal,
    }
    environ = {name: text for name, text in values.items() if text is not None}
    assert visible_indices([""] * gpus, environ) == seen


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("GPU-1122334455667788", (0,)),
        ("gpu-11AA334455667788", (2,)),
        ("GPU-11aa334455667788,GPU-1122334455667788", (2, 0)),
        ("GPU-11aa,1", (2, 1)),
        ("GPU-11", ()),  # two GPUs begin so
        ("GPU-", ()),
        ("GPU-ffff", ()),
        ("1122334455667788", ()),
    ],
)
def test_a_uuid_names_a_gpu_in_any_order_of_the_bus(text: str, seen: tuple[int, ...]) -> None:
    """A25: ROCR_VISIBLE_DEVICES also takes UUIDs."""
    assert visible_indices(UUIDS, {"ROCR_VISIBLE_DEVICES": text}) == seen


@pytest.mark.parametrize(
    ("environ", "index", "mask"),
    [
        ({}, 1, {"ROCR_VISIBLE_DEVICES": "1"}),
        ({"ROCR_VISIBLE_DEVICES": "1"}, 1, {}),
        ({"ROCR_VISIBLE_DEVICES": "2,1"}, 1, {"ROCR_VISIBLE_DEVICES": "1"}),
        ({"HIP_VISIBLE_DEVICES": "1,2"}, 2, {"HIP_VISIBLE_DEVICES": "2"}),
        (
            {"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "0,1"},
            1,
            {"HIP_VISIBLE_DEVICES": "1"},
        ),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 0, {"CUDA_VISIBLE_DEVICES": "0"}),
    ],
)
def test_one_variable_is_set_and_the_topmost_is_narrowed(
    environ: dict[str, str], index: int, mask: dict[str, str]
) -> None:
    """A25."""
    assert mask_for(index, UUIDS, environ) == mask


def test_a_hidden_gpu_cannot_be_masked_into_sight() -> None:
    with pytest.raises(ValueError, match="GPU 0 is hidden"):
        mask_for(0, UUIDS, {"ROCR_VISIBLE_DEVICES": "1"})


ENTRIES = st.lists(
    st.one_of(st.integers(-1, 4).map(str), st.sampled_from(UUIDS), st.text("-, 0x", max_size=4))
).map(",".join)
ENVIRONS = st.dictionaries(st.sampled_from(VARIABLES), ENTRIES)


@given(ENVIRONS)
def test_under_the_mask_torch_sees_the_wanted_gpu_alone(environ: dict[str, str]) -> None:
    for index in visible_indices(UUIDS, environ):
        mask = mask_for(index, UUIDS, environ)
        assert len(mask) <= 1
        assert visible_indices(UUIDS, environ | mask) == (index,)


@pytest.mark.parametrize(
    ("environ", "mask"),
    [
        ({}, {"HIP_VISIBLE_DEVICES": "1"}),
        ({"ROCR_VISIBLE_DEVICES": "0"}, {"HIP_VISIBLE_DEVICES": "1"}),
        ({"HIP_VISIBLE_DEVICES": "1"}, {}),
        ({"HIP_VISIBLE_DEVICES": "2,1"}, {"HIP_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"GPU_DEVICE_ORDINAL": "1,2"}, {"GPU_DEVICE_ORDINAL": "1"}),
    ],
)
def test_windows_has_no_rocr_so_hip_hides_the_other_gpus(
    environ: dict[str, str], mask: dict[str, str]
) -> None:
    uuids = ["", "", ""]
    assert mask_for(1, uuids, environ, "windows") == mask
    assert visible_indices(uuids, environ | mask, "windows") == (1,)
