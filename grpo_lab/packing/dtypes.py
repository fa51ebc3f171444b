"""The dtypes that the packer knows: their names, sizes, and codes in the extension (``csrc/elements.h``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_lab.errors import PackingError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Dtype:
    """``castable`` dtypes convert into each other; all others travel as they are."""

    name: str
    itemsize: int
    code: int
    castable: bool = False


_RAW_CODES = {1: 5, 2: 6, 4: 7, 8: 8, 16: 9}
_CASTABLE = [
    ("float32", 4, 0),
    ("float16", 2, 1),
    ("bfloat16", 2, 2),
    ("float8_e4m3fn", 1, 3),
    ("float8_e5m2", 1, 4),
]
_RAW_NAMES = {
    1: "bool int8 uint8 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu",
    2: "int16 uint16",
    4: "int32 uint32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}

DTYPES: dict[str, Dtype] = {name: Dtype(name, size, code, castable=True) for name, size, code in _CASTABLE}
DTYPES |= {
    name: Dtype(name, size, _RAW_CODES[size]) for size, names in _RAW_NAMES.items() for name in names.split()
}

# Sources that a ``wire_dtype`` applies to. An 8-bit float is the product of a quantisation with scales of its
# own, so it is never widened behind the user's back; integers, bool and float64 have no meaning in 16 bits.
CAST_SOURCES = frozenset({"float32", "float16", "bfloat16"})


def dtype_named(name: str, what: str) -> Dtype:
    """Looks a dtype up by its torch name without ``torch.``; raises PackingError naming `what` has it."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise PackingError(f"{what} has dtype {name!r}; the packer knows {', '.join(DTYPES)}") from None


def dtype_name(tensor: torch.Tensor) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(tensor.dtype).removeprefix("torch.")
