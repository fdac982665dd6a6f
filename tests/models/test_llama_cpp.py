"""llama.cpp itself, from the prebuilt package xllamacpp, runs what is exported, and its own blocks are read.

The package is no dependency of the tests: ``pip install -e '.[engines]'`` brings it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fewbits import FastLanguageModel
from fewbits.export import gguf_file
from fewbits.nn.linear import QuantizedLinear
from tests.models.llama_engine import compared

gguf = pytest.importorskip("gguf")
llama = pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow


@pytest.fixture(params=["stories260k", "stories3m"])
def story_teller(request: pytest.FixtureRequest, shared: Path) -> tuple[Any, Any]:
    """A real small model and its tokenizer."""
    folder = shared / "data" / "models" / request.param
    return FastLanguageModel.from_pretrained(folder, load_in_4bit=False, dtype=torch.float32)


def test_it_writes_the_same_tokens(story_teller: tuple[Any, Any], tmp_path: Path) -> None:
    """In float16 all; where weights are packed it rounds activations to 8 bits: near-ties alone may turn."""
    model, words = story_teller
    methods = ["f16", "q8_0", "q5_k_m", "q4_k_m", "q4_0", "iq4_nl"]
    for receipt in model.save_pretrained_gguf(tmp_path / "out", words, methods):
        loaded, _ = FastLanguageModel.from_pretrained(receipt.path, dtype=torch.float32)
        different, gap, error = compared(loaded, words, receipt.path)
        if receipt.method == "GGUF F16":
            assert different == 0 and error < 0.01
        else:
            assert error < 0.3 and different <= 8 and gap < 2 * error, receipt.method


def test_blocks_that_it_wrote_are_read(
    story_teller: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own quantiser's bytes: decoded here as by the gguf package, and run here as there."""
    model, words = story_teller
    ours = gguf_file.encode

    def theirs(weight: torch.Tensor, kind: str, *rest: Any) -> Any:
        values = np.ascontiguousarray(weight.numpy())
        if kind in ("F32", "F16"):
            return ours(weight, kind)
        made = np.zeros(values.nbytes, dtype=np.uint8)
        rows, columns = values.shape
        size = quantize(
            int(gguf.GGMLQuantizationType[kind]), values.ctypes.data, made.ctypes.data, 0, rows, columns, None
        )
        return made[:size].reshape(rows, -1)

    quantize = ctypes.CDLL(llama.xllamacpp.__file__).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    monkeypatch.setattr(gguf_file, "encode", theirs)
    for receipt in model.save_pretrained_gguf(tmp_path / "out", words, ["q4_k_m", "q5_1", "iq4_nl"]):
        loaded, _ = FastLanguageModel.from_pretrained(receipt.path, dtype=torch.float32)
        layers = [m for m in loaded.modules() if isinstance(m, QuantizedLinear)]
        assert layers and all(layer.format.name.startswith("gguf_") for layer in layers)
        different, gap, error = compared(loaded, words, receipt.path)
        assert error < 0.3 and different <= 8 and gap < 2 * error, receipt.method
