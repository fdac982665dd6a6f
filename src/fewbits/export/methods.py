"""Which engine and format a word means: ``gptq:int4_g128``, ``compressed_tensors_w4a16``, ``awq``.

To add an engine: write its `fewbits.export.codec.Codec` and name it in `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fewbits.errors import BadInput, FewbitsError
from fewbits.export.bitsandbytes_folder import BitsAndBytesCodec
from fewbits.export.codec import Codec, Model
from fewbits.export.compressed_schemes import CompressedCodec
from fewbits.export.gguf_types import METHODS as GGUF_METHODS
from fewbits.export.gptq_awq import AWQ, GPTQ, GPTQ_V2, WordsCodec
from fewbits.export.torchao_folder import TorchaoCodec

ENGINES: dict[str, Callable[[str, Model], Codec]] = {
    "compressed_tensors": CompressedCodec,
    GPTQ: lambda method, model: WordsCodec(GPTQ, method, model),
    GPTQ_V2: lambda method, model: WordsCodec(GPTQ_V2, method, model),
    AWQ: lambda method, model: WordsCodec(AWQ, method, model),
    "bitsandbytes": BitsAndBytesCodec,
    "torchao": TorchaoCodec,
}
# Formats of ours by the schemes of compressed-tensors that store them.
_SCHEMES = {
    **{f"int{bits}": f"w{bits}a16" for bits in (2, 3, 4, 5, 6, 7, 8)},
    "int4_zp": "w4a16_asym",
    "float8_e4m3": "fp8_dynamic",
    "nvfp4": "nvfp4a16",
    "mxfp4": "mxfp4a16",
    "mxfp6_e2m3": "mxfp6a16",
    "mxfp8_e4m3": "mxfp8a16",
}
_EMPTY = Model({}, torch.float32)


def engine_and_method(name: str) -> tuple[str, str] | None:
    """An engine of `ENGINES` and the rest of a word, or None if the word begins with none of them."""
    if name in ENGINES:
        return name, ""
    for engine in sorted(ENGINES, key=len, reverse=True):
        for mark in (":", "_"):
            if name.startswith(engine + mark):
                return engine, name[len(engine) + 1 :].lower()
    return None


def codec_for(engine: str, method: str, model: Model = _EMPTY) -> Codec:
    """The codec of a method over a model; over no model it only says if there is such a method.

    Raises:
        BadInput: there is none; the message says which engines have that format.
        Unsupported: the engine's package is missing, or the model's sizes do not fit.
    """
    try:
        return ENGINES[engine](method, model)
    except BadInput as error:
        others = takers(method, apart_from=engine)
        if not others:
            raise
        raise BadInput(f"{error} {method} is written to {', '.join(others)}.") from error


def takers(format: str, *, apart_from: str = "") -> list[str]:
    """The words after ``--to`` by which a format of ours is written as it is."""
    names = []
    for engine in (GPTQ, AWQ, "torchao", "bitsandbytes"):
        if engine != apart_from and format and _has(engine, format):
            names.append(f"{engine}:{format}")
    stem = format.partition("_g")[0] + ("_zp" if format.endswith("_zp") and "_g" in format else "")
    stem = "float8_e4m3" if format.startswith("float8_e4m3") else stem
    if apart_from != "compressed_tensors" and (format in _SCHEMES or stem in _SCHEMES):
        names.append(f"compressed_tensors:{_SCHEMES.get(format) or _SCHEMES[stem]}")
    plain = format.removeprefix("gguf_")
    if plain in GGUF_METHODS:
        names.append(f"gguf:{plain}")
    return names


def _has(engine: str, format: str) -> bool:
    try:
        ENGINES[engine](format, _EMPTY)
    except FewbitsError:
        return False
    return True
