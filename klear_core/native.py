"""Compile C functions at first use, for this processor and given sizes.

They replace CPU loops that no single torch call does. Imported without torch: the doctor, too, asks for the compilers.
"""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_HEADERS = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
_BASE = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
_FLAGS = (("-march=native", "-fopenmp"), ("-mcpu=native",), ())
"""Compiler flags, tried in this order: some compilers have no OpenMP, and some spell this processor differently. All
sets compute the same, up to the rounding of a fused multiply-add. -ffast-math is in none of them: it would switch
off denormals for the process."""
_LIST_TIMEOUT_S = 20.0
BFLOAT16_MACRO = "__AVX512BF16__"
"""Macro of compilers for a processor with AVX512_BF16, without which products.c has no products."""
NO_BFLOAT16 = (
    "this processor multiplies bfloat16, but the C compiler here does not know how; install gcc 10 or newer, or set "
    "dtype to float32"
)
_KINDS = {"i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float, "p": ctypes.c_void_p}


def compile_c(
    source: Path,
    sizes: Mapping[str, int],
    signatures: Mapping[str, str] | None = None,
    *,
    compilers: Sequence[str] = COMPILERS,
    timeout_s: float = 120,
) -> ctypes.CDLL | None:
    """Return the functions of `source`, compiled with each of `sizes` as a macro; None, with a warning, on failure.

    `signatures` has a letter for each argument of a function: i int, l int64_t, f float, p pointer. A compiler that
    takes longer than `timeout_s` counts as failed.
    """
    library = _compile(source, tuple(sorted(sizes.items())), tuple(compilers), timeout_s)
    if library is None:
        return None
    for name, kinds in (signatures or {}).items():
        getattr(library, name).argtypes = [_KINDS[kind] for kind in kinds]
    return library


@cache
def compiler_defines(macro: str, *, compilers: Sequence[str] = COMPILERS) -> bool:
    """Return whether there is a C compiler that knows a feature of this processor, by the macro that it defines."""
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None:
        return False
    command = [compiler, "-march=native", "-dM", "-E", "-x", "c", "/dev/null"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_LIST_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return f"#define {macro} " in listed.stdout


def call(library: ctypes.CDLL | None, name: str, *arguments: Tensor | float | None) -> None:
    """Call a C function; tensors are passed as pointers to their first element, None as NULL.

    The caller must see to it that they are contiguous and of the right type.
    """
    values = []
    for argument in arguments:
        values.append(argument if argument is None or isinstance(argument, int | float) else argument.data_ptr())
    getattr(library, name)(*values)


@cache
def _compile(
    source: Path, sizes: tuple[tuple[str, int], ...], compilers: tuple[str, ...], timeout_s: float
) -> ctypes.CDLL | None:
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None:
        log.warning(
            "no C compiler (%s): %s runs as plain torch, several times slower on CPU", ", ".join(compilers), source.name
        )
        return None
    macros = [f"-D{name}={value}" for name, value in sizes]
    complaint = ""
    with tempfile.TemporaryDirectory(prefix="klear-native-") as folder:  # a loaded library outlives its file
        library = Path(folder) / f"{source.stem}.so"
        for flags in _FLAGS:
            command = [compiler, *_BASE, *flags, *macros, f"-I{_HEADERS}", str(source), "-o", str(library), "-lm"]
            try:
                result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
            except subprocess.TimeoutExpired:  # a licence server or a network drive that does not answer
                complaint = f"nothing after {timeout_s:g} s"
                break
            complaint = result.stderr
            if result.returncode == 0:
                try:
                    return ctypes.CDLL(str(library))
                except OSError as e:  # temporary folders can be mounted noexec
                    complaint = str(e)
    log.warning(
        "%s cannot be compiled with %s and runs as plain torch, several times slower on CPU: %s",
        source.name,
        compiler,
        complaint,
    )
    return None
