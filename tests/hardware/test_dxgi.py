"""The walk over COM tables, on objects that this file builds as Windows lays them out."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from sdamd.errors import HardwareError
from sdamd.hardware.dxgi import AdapterDescription, adapters_of
from sdamd.hardware.windows import Adapter

NOT_FOUND = 0x887A0002
DEVICE_REMOVED = 0x887A0005


class Com:
    """A COM object: a pointer to a table of functions."""

    def __init__(self, **methods: Callable[..., int]) -> None:
        places = {"release": (2, 0), "enum_adapters1": (12, 2), "get_desc1": (10, 1)}
        self.table = (ctypes.c_void_p * 14)()
        self.kept: list[Any] = []
        for name, method in methods.items():
            place, pointers = places[name]
            kinds: list[type[Any]] = [ctypes.c_void_p] * pointers
            if name == "enum_adapters1":
                kinds = [ctypes.c_uint32, ctypes.c_void_p]
            function = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, *kinds)(method)
            self.kept.append(function)
            self.table[place] = ctypes.cast(function, ctypes.c_void_p).value
        self.instance = ctypes.c_void_p(ctypes.addressof(self.table))

    @property
    def pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(self.instance))


class FakeAdapter(Com):
    def __init__(self, description: str, *, result: int = 0, **fields: int) -> None:
        self.released = 0

        def get_desc1(_: int, target: int) -> int:
            written = AdapterDescription.from_address(target)
            text = description.encode("utf-16-le")
            ctypes.memmove(written.description, text, len(text))
            for name, value in fields.items():
                setattr(written, name, value)
            return result

        def release(_: int) -> int:
            self.released += 1
            return 0

        super().__init__(get_desc1=get_desc1, release=release)


def factory(adapters: list[FakeAdapter], after: int = NOT_FOUND) -> Com:
    def enum_adapters1(_: int, index: int, target: int) -> int:
        if index >= len(adapters):
            return after
        ctypes.c_void_p.from_address(target).value = adapters[index].pointer.value
        return 0

    return Com(enum_adapters1=enum_adapters1)


def walk(com: Com) -> list[Adapter]:
    # The parameter keeps the object alive, of which C code sees only the address.
    return list(adapters_of(com.pointer))


def test_adapters_are_read_in_order_and_released() -> None:
    card = FakeAdapter(
        "AMD Radeon RX 7900 XTX",
        vendor_id=0x1002,
        device_id=0x744C,
        revision=0xC8,
        dedicated_video_memory=25753026560,
        shared_system_memory=2**34,
        luid_low=0xFFFFFFFF,
        luid_high=1,
    )
    basic = FakeAdapter("Microsoft Basic Render Driver", vendor_id=0x1414, flags=2)
    found = walk(factory([card, basic]))
    assert found[0] == Adapter(
        description="AMD Radeon RX 7900 XTX",
        vendor_id=0x1002,
        device_id=0x744C,
        revision=0xC8,
        dedicated_bytes=25753026560,
        shared_bytes=2**34,
        luid=0x1FFFFFFFF,
    )
    assert (found[1].description, found[1].software) == ("Microsoft Basic Render Driver", True)
    assert (card.released, basic.released) == (1, 1)


def test_the_description_has_the_size_that_windows_writes() -> None:
    """Source: sizeof(DXGI_ADAPTER_DESC1) on 64-bit Windows."""
    assert ctypes.sizeof(AdapterDescription) == 312


@pytest.mark.parametrize(
    ("adapters", "after", "method"),
    [
        ([], DEVICE_REMOVED, "EnumAdapters1"),
        ([FakeAdapter("", result=DEVICE_REMOVED)], NOT_FOUND, "GetDesc1"),
    ],
)
def test_a_refusal_says_which_call_and_why(
    adapters: list[FakeAdapter], after: int, method: str
) -> None:
    with pytest.raises(HardwareError, match=rf"{method} failed with 0x887a0005"):
        walk(factory(adapters, after))
    assert all(adapter.released == 1 for adapter in adapters)


def test_an_endless_list_ends() -> None:
    adapters = [FakeAdapter("AMD", vendor_id=0x1002)] * 1000
    assert len(walk(factory(adapters))) == 64
