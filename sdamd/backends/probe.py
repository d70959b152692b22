"""What the installed torch says of itself, as one line of JSON; run as a child, since it may crash.

`python -m sdamd.backends.probe` imports torch and asks for its devices. A driver that does not
fit ends the process there, without an exception, so what is being done is said before on stderr.
"""

import json
import sys
from typing import Any


def read() -> dict[str, Any]:
    """Ask torch for its build, and for the devices that it sees."""
    _doing("importing torch")
    import torch  # noqa: PLC0415 - the import itself may crash, and then the last line says so

    built = getattr(torch, "version", None)
    found: dict[str, Any] = {
        "version": str(getattr(torch, "__version__", "")),
        "hip": getattr(built, "hip", None),
        "cuda": getattr(built, "cuda", None),
        "devices": [],
    }
    _doing("torch.cuda.is_available()")
    found["available"] = bool(torch.cuda.is_available())
    _doing("torch.cuda.device_count()")
    found["device_count"] = int(torch.cuda.device_count())
    _doing("torch.cuda.get_arch_list()")
    found["archs"] = list(torch.cuda.get_arch_list())
    for index in range(found["device_count"]):
        _doing(f"torch.cuda.get_device_properties({index})")
        properties = torch.cuda.get_device_properties(index)
        found["devices"].append(
            {
                "name": str(properties.name),
                # "gfx90a:sramecc+:xnack-" names features after the target.
                "gfx": str(getattr(properties, "gcnArchName", "")).partition(":")[0],
                "memory_bytes": int(properties.total_memory),
            }
        )
    return found


def _doing(what: str) -> None:
    print(what, file=sys.stderr, flush=True)  # noqa: T201 - this program's output


def main() -> int:
    """Print the line."""
    print(json.dumps(read()), flush=True)  # noqa: T201 - this program's output
    return 0


if __name__ == "__main__":
    sys.exit(main())
