"""What a training step launches on a GPU: which binaries it asks for, and that no GPU runs out of registers.

On a pretended GPU (`kernels.pretended`), so on any machine; nothing is timed here.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits.decoder.fuse import fuse, fusion_of
from fewbits.decoder.loss import float8_head_of
from fewbits.formats import E4M3, E4M3_ROW, NF4_DQ
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.packing.convert import convert
from fewbits.recipes.recipe import LoRA, Recipe, Rule
from tests.kernels.pretended import Launch, Recorder, pretended_gpu, without_memory
from tests.models.tiny import tiny_config

FLOAT8 = {"weight_operand": E4M3, "activation": E4M3_ROW, "gradient": E4M3_ROW}
SMALL: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
SMALL |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "max_position_embeddings": 32768}
LLAMA_8B: dict[str, Any] = {**SMALL, "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8}

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


def adapted(
    family: str,
    shape: dict[str, Any],
    layers: int,
    *,
    float8: bool = False,
    head: bool = False,
    rank: int = 16,
) -> Any:
    """A fused model with adapters over NF4, in bfloat16, without memory; ``head``: in float8 as well."""
    from transformers import AutoModelForCausalLM

    rule = Rule(weight=NF4_DQ, **(FLOAT8 if float8 else {}))
    shape = {**shape, "vocab_size": 1024} if head else shape
    with torch.device("meta"):
        config = tiny_config(family, **{**shape, "num_hidden_layers": layers})
        kind = "eager" if family == "gemma2" else "sdpa"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=kind)
        convert(model, Recipe(name="nf4", linear=rule, head=Rule(**FLOAT8) if head else Rule()))
        model = get_peft_model(model, LoRA(r=rank)).train()
        fuse(model, delayed_scaling=float8)
        assert (float8_head_of(model) is not None) == head
    return model


def step(model: Any, rows: int, length: int, packed: bool = False) -> None:
    """Forward and backward pass of rows x length tokens, perhaps of several documents."""
    ids = torch.ones(rows, length, dtype=torch.long)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    if packed:
        ends = torch.tensor([0, length // 3, length], dtype=torch.int32)
        batch |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends)
        batch |= dict.fromkeys(("max_length_q", "max_length_k"), length - length // 3)
    model(**batch).loss.backward()
    assert not fusion_of(model).fallbacks


def binaries(recorder: Recorder) -> dict[Any, Launch]:
    """One launch of each binary that was asked for."""
    found: dict[Any, Launch] = {}
    for launch in recorder.launches:
        found.setdefault(launch.key, launch)
    return found


@pytest.mark.parametrize(
    ("family", "float8"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("llama", False), ("gemma2", False)]),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in [("llama", True), ("qwen3", False)]),
    ],
)
def test_other_lengths_ask_for_no_other_binary(family: str, float8: bool) -> None:
    """One length that is a multiple of all tiles and one that is not ask for all that there will ever be."""
    model = adapted(family, SMALL, 1, float8=float8, head=float8)
    with pretended_gpu() as recorder:
        without_memory(model)
        for _ in range(2 if float8 else 1):  # the first step under delayed scaling quantises by row
            for length in (8192, 8191, 2048, 2047):
                step(model, 1, length)
        warm = binaries(recorder)
        counts = {name: len(keys) for name, keys in recorder.keys().items()}
        for rows, length in (
            (1, 1),
            (1, 2),
            (1, 16),
            (3, 50),
            (4, 96),
            (1, 777),
            (2, 1000),
            (1, 4101),
            (2, 8208),
        ):
            step(model, rows, length)
        step(model, 1, 6000, packed=family != "gemma2")
        step(model, 1, 6016, packed=family != "gemma2")
        new = [launch for key, launch in binaries(recorder).items() if key not in warm]
    assert not new, [(launch.kernel.__name__, launch.facts()) for launch in new]
    assert len(counts) > 8 and sum(counts.values()) <= (40 if float8 else 30), counts


@pytest.mark.parametrize("float8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_layers_share_their_binaries(float8: bool) -> None:
    """Also where a layer's float8 scale is any element of one tensor, aligned to 4 bytes.

    The first layer's input needs no gradient, so two layers have all that there is.
    """
    found = []
    for layers in (2, 6):
        model = adapted("llama", SMALL, layers, float8=float8)
        with pretended_gpu() as recorder:
            without_memory(model)
            for _ in range(2 if float8 else 1):
                step(model, 1, 256)
            found.append(set(binaries(recorder)))
    assert found[0] == found[1], found[1] - found[0]


SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}  # that one program may have


# Bytes that a thread may spill, beyond the 16 that ptxas takes for a branch now and then. At rank 32 tiles of
# 32 columns would spill nothing and write 8 bytes a value more, to memory that is much further away.
SPILLED = {32: 288}


def registers(built: Any, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and the bytes that it spills to memory."""
    import triton

    (folder / "it.cubin").write_bytes(built.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(folder / "it.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [re.search(rf"{word}:(\d+)", said) for word in ("REG", "STACK")]
    return tuple(int(match[1]) for match in found)  # type: ignore[index,return-value]


def check_resources(capability: int, float8: bool, rank: int, length: int) -> None:
    model = adapted("llama", LLAMA_8B, 1, float8=float8, rank=rank)
    with pretended_gpu(capability) as recorder:
        without_memory(model)
        for _ in range(2):
            step(model, 1, length)
    launches = binaries(recorder).values()
    assert len(launches) > 8
    with tempfile.TemporaryDirectory() as folder:
        for launch in launches:
            built = launch.compile()
            what = launch.kernel.__name__, {k: v for k, v in launch.options.items() if k.isupper()}
            _, spilled = registers(built, Path(folder))
            assert spilled <= SPILLED.get(rank, 16), (what, f"spills {spilled} bytes a thread")
            assert built.metadata.shared <= SHARED_KIB[capability] * 1024, (what, built.metadata.shared)


def test_the_smallest_gpu_runs_the_step_of_an_8b_model() -> None:
    check_resources(120, False, 16, 8192)


@pytest.mark.parametrize(
    ("capability", "float8", "rank"),
    [
        pytest.param(80, False, 128, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((89, True, 32), (90, True, 16), (100, True, 128), (120, True, 32))
        ),
    ],
)
def test_every_gpu_runs_every_rank(capability: int, float8: bool, rank: int) -> None:
    check_resources(capability, float8, rank, 8191)
