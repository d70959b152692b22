"""Makes `sdamd/assets/clip/merges.txt.gz`, the vocabulary that every CLIP text encoder shares.

Single-file checkpoints hold no tokenizer, so sdamd ships it. The published list of merges
(`bpe_simple_vocab_16e6.txt.gz`, MIT, inside the package open-clip-torch 3.3.0) is longer than
what the encoders know: they were trained on the first 48 894 merges. The token ids follow from
the merges alone, so only those are kept (see `sdamd.backends.loading.clip_tokenizer`).

    python scripts/make_clip_vocabulary.py open_clip_torch-3.3.0-py3-none-any.whl
"""

import argparse
import gzip
import hashlib
import sys
import zipfile
from pathlib import Path

MEMBER = "open_clip/bpe_simple_vocab_16e6.txt.gz"
SHA256 = "924691ac288e54409236115652ad4aa250f48203de50a9e4722a6ecd48d6804a"
MERGES = 48_894
"""With 512 tokens for bytes (within a word and at its end) and 2 for start and end: 49 408 ids."""

ASSETS = Path(__file__).resolve().parent.parent / "sdamd" / "assets" / "clip"


def main() -> int:
    """Read the wheel, check it, write the asset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path, help="open_clip_torch-3.3.0-py3-none-any.whl")
    arguments = parser.parse_args()
    with zipfile.ZipFile(arguments.wheel) as wheel:
        packed = wheel.read(MEMBER)
        licence = wheel.read("open_clip_torch-3.3.0.dist-info/licenses/LICENSE")
    found = hashlib.sha256(packed).hexdigest()
    if found != SHA256:
        print(f"{MEMBER} has SHA-256 {found}; expected {SHA256}", file=sys.stderr)
        return 1
    lines = gzip.decompress(packed).decode("utf-8").splitlines()[1 : MERGES + 1]
    ASSETS.mkdir(parents=True, exist_ok=True)
    text = ("\n".join(lines) + "\n").encode("utf-8")
    # mtime 0 and no name: the same bytes each time.
    (ASSETS / "merges.txt.gz").write_bytes(gzip.compress(text, 9, mtime=0))
    (ASSETS / "LICENSE").write_bytes(licence)
    print(f"{len(lines)} merges -> {ASSETS / 'merges.txt.gz'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
