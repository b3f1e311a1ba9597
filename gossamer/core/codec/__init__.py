"""Codecs: how a tree becomes bytes. Import them from here.

| name | bytes per number | loses |
|---|---|---|
| `fp32` | 4 | nothing |
| `fp16`, `bf16` | 2 | rounding |
| `int8` | 1 + 4 / block | at most half a step of absmax / 127 per block |
| `sign` | 1/8 + one magnitude a group | all but the sign and the mean size |
| `topk` | share x (2 + 2 or 4) | all but the largest |

>>> by_name("int8")(block=64)
Int8(block=64)
"""

from __future__ import annotations

from gossamer.core.codec.base import Codec, Stats
from gossamer.core.codec.dense import Bf16, Fp16, Fp32
from gossamer.core.codec.int8 import Int8
from gossamer.core.codec.payload import checked_name
from gossamer.core.codec.sign import Sign
from gossamer.core.codec.topk import TopK
from gossamer.core.codec.write import write

_CODECS: dict[str, type[Codec]] = {"fp32": Fp32, "fp16": Fp16, "bf16": Bf16, "int8": Int8, "sign": Sign, "topk": TopK}


def by_name(name: str) -> type[Codec]:
    """The codec class of that name; its arguments are its fields.

    Raises:
        BadInput: no codec has the name; the message gives the nearest.
    """
    checked_name("codec", name, _CODECS)
    return _CODECS[name]


__all__ = ["Bf16", "Codec", "Fp16", "Fp32", "Int8", "Sign", "Stats", "TopK", "by_name", "write"]
