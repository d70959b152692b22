"""Presets: what people send to each other, where they are kept, and the picture with one inside."""

from sdamd.preset.file import read, write
from sdamd.preset.preset import PLACEHOLDER, Change, Need, Preset, applied, from_request

__all__ = [
    "PLACEHOLDER",
    "Change",
    "Need",
    "Preset",
    "applied",
    "from_request",
    "read",
    "write",
]
