"""Takes the readings of a Windows machine: DXGI through COM by hand, and the registry.

Only `read_machine` needs Windows; walking the COM tables works on objects of any origin.
"""

import ctypes
import sys
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from sdamd.errors import HardwareError
from sdamd.hardware.windows import Adapter, Readings

if sys.platform == "win32":
    import winreg

    from sdamd.hardware.windows import DriverKey, parse_driver_key

# Places in the COM tables. Source: dxgi.h of the Windows SDK.
_RELEASE = 2
_GET_DESC1 = 10
_ENUM_ADAPTERS1 = 12

_IID_FACTORY1 = UUID("770aae78-f26f-4dba-a829-253c83d1b387")
_NOT_FOUND = 0x887A0002
_SOFTWARE = 2
_MOST_ADAPTERS = 64

_DISPLAY_CLASS = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"


class AdapterDescription(ctypes.Structure):
    """DXGI_ADAPTER_DESC1."""

    _fields_ = (
        ("description", ctypes.c_uint16 * 128),
        ("vendor_id", ctypes.c_uint32),
        ("device_id", ctypes.c_uint32),
        ("subsystem_id", ctypes.c_uint32),
        ("revision", ctypes.c_uint32),
        ("dedicated_video_memory", ctypes.c_size_t),
        ("dedicated_system_memory", ctypes.c_size_t),
        ("shared_system_memory", ctypes.c_size_t),
        ("luid_low", ctypes.c_uint32),
        ("luid_high", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
    )


def adapters_of(factory: ctypes.c_void_p) -> Iterator[Adapter]:
    """Yield the adapters of an IDXGIFactory1 in its order; the factory stays the caller's.

    Raises:
        HardwareError: DXGI refuses.
    """
    for index in range(_MOST_ADAPTERS):
        adapter = ctypes.c_void_p()
        found = _call(
            factory, _ENUM_ADAPTERS1, (ctypes.c_uint32, index), (ctypes.c_void_p, _at(adapter))
        )
        if found == _NOT_FOUND:
            return
        _check("IDXGIFactory1.EnumAdapters1", found)
        try:
            yield _describe(adapter)
        finally:
            _call(adapter, _RELEASE)


def _describe(adapter: ctypes.c_void_p) -> Adapter:
    description = AdapterDescription()
    described = _call(adapter, _GET_DESC1, (ctypes.c_void_p, _at(description)))
    _check("IDXGIAdapter1.GetDesc1", described)
    return Adapter(
        description=bytes(description.description).decode("utf-16-le", "replace").split("\0")[0],
        vendor_id=description.vendor_id,
        device_id=description.device_id,
        revision=description.revision,
        dedicated_bytes=description.dedicated_video_memory,
        shared_bytes=description.shared_system_memory,
        luid=description.luid_high << 32 | description.luid_low,
        software=bool(description.flags & _SOFTWARE),
    )


def _at(target: Any) -> int:
    return ctypes.addressof(target)


def _call(instance: ctypes.c_void_p, place: int, *arguments: tuple[Any, Any]) -> int:
    """Call the method at `place` of a COM object; arguments are (C type, value).

    64-bit Windows has one calling convention, so the C one is right for COM too.
    """
    table = ctypes.cast(instance, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))).contents
    kinds = [kind for kind, _ in arguments]
    method = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, *kinds)(table[place] or 0)
    return int(method(instance, *(value for _, value in arguments)))


def _check(what: str, result: int) -> None:
    if result >= 0x80000000:
        raise HardwareError(f"{what} failed with 0x{result:08x}; no GPU can be found through DXGI")


if sys.platform == "win32":

    def read_machine() -> Readings:
        """Read the adapters and the display drivers of this machine.

        Raises:
            HardwareError: DXGI is missing or refuses.
        """
        try:
            library = ctypes.WinDLL("dxgi")
        except OSError as error:
            raise HardwareError(f"dxgi.dll cannot be loaded: {error}") from error
        factory = ctypes.c_void_p()
        iid = (ctypes.c_ubyte * 16).from_buffer_copy(_IID_FACTORY1.bytes_le)
        create = library.CreateDXGIFactory1
        create.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        create.restype = ctypes.c_uint32
        _check("CreateDXGIFactory1", create(ctypes.byref(iid), ctypes.byref(factory)))
        try:
            return Readings(adapters=tuple(adapters_of(factory)), drivers=tuple(_driver_keys()))
        finally:
            _call(factory, _RELEASE)

    def _driver_keys() -> Iterator[DriverKey]:
        """Yield the display drivers' keys; those that may not be read are left out."""
        try:
            parent = winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _DISPLAY_CLASS)
        except OSError:
            return
        with parent:
            for number in range(winreg.QueryInfoKey(parent)[0]):
                try:
                    with winreg.OpenKey(parent, winreg.EnumKey(parent, number)) as key:
                        values = dict(_values(key))
                except OSError:  # "Properties" is for the system alone
                    continue
                parsed = parse_driver_key(values)
                if parsed is not None:
                    yield parsed

    def _values(key: winreg.HKEYType) -> Iterator[tuple[str, object]]:
        for number in range(winreg.QueryInfoKey(key)[1]):
            name, value, _ = winreg.EnumValue(key, number)
            yield name, value
