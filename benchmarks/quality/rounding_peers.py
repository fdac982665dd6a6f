"""KL and perplexity of a model rounded by fewbits and by others, calibrated and measured on the same text.

    python benchmarks/quality/rounding_peers.py prepare WORK
    python benchmarks/quality/rounding_peers.py gptqmodel WORK 4 sym    # each in an environment that has it
    python benchmarks/quality/rounding_peers.py auto_round WORK 4 sym
    python benchmarks/quality/rounding_peers.py llama WORK q4_k_m       # needs xllamacpp and gguf
    python benchmarks/quality/rounding_peers.py fewbits WORK int4_g64 gptq+learned
    python benchmarks/quality/rounding_peers.py measure WORK

From a checkout with ../shared beside it. The model is stories3m, in float32. The first half of
tinystories_val.txt calibrates: 128 windows of 256 tokens, the same ids for everybody. Settings of ours are
chosen on the third quarter and shown on the fourth (48 windows of 256 tokens each). KL is that of the model
before rounding from the rounded one, in nats a token, with the standard error of its mean over the windows.
Bits are those of the decoder's linears, scales, zero points and minima included at the width that the file
keeps (float16 where the layout is GPTQ's or GGUF's); head and embedding stay as they were, for everybody.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
MODEL = SHARED / "models" / "stories3m"
TEXT = SHARED / "text" / "tinystories_val.txt"
GROUP, WINDOW, CALIBRATING, MEASURED = 64, 256, 128, 48


def quarters() -> list[str]:
    """The text that calibrates, the one that settings are chosen on, and the one that is shown."""
    text = TEXT.read_text(encoding="utf-8")
    half = len(text) // 2
    middle = half + (len(text) - half) // 2
    return [text[:half], text[half:middle], text[middle:]]


def prepare(work: Path) -> None:
    """Write the rows, and the ids of the windows that calibrate."""
    import torch
    from transformers import AutoTokenizer

    from fewbits.models.writing.calibration_rows import read_windows

    work.mkdir(parents=True, exist_ok=True)
    stories = [story.strip() for story in quarters()[0].split("<|endoftext|>") if story.strip()]
    rows = work / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    torch.save(read_windows(rows, tokenizer, length=WINDOW, count=CALIBRATING, least=1), work / "windows.pt")


def gptqmodel(work: Path, bits: str, kind: str) -> None:
    """GPTQModel with what it does by itself, on a CPU."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "4")
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig

    windows = torch.load(work / "windows.pt")
    rows = [{"input_ids": w.tolist(), "attention_mask": [1] * len(w)} for w in windows]
    config = QuantizeConfig(bits=int(bits), group_size=GROUP, sym=kind == "sym", desc_act=False, device="cpu")
    model = GPTQModel.load(str(MODEL), config)
    model.quantize(rows, batch_size=8)
    model.save(str(work / f"gptqmodel-{bits}-{kind}"))


def auto_round(work: Path, bits: str, kind: str) -> None:
    """AutoRound with its own 200 steps of 8 windows."""
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    windows = torch.load(work / "windows.pt")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    rounding = AutoRound(
        model,
        AutoTokenizer.from_pretrained(MODEL),
        bits=int(bits),
        group_size=GROUP,
        sym=kind == "sym",
        dataset=[{"input_ids": w[None], "attention_mask": torch.ones_like(w[None])} for w in windows],
        seqlen=WINDOW,
        nsamples=CALIBRATING,
        iters=200,
        batch_size=8,
        device_map="cpu",
        enable_torch_compile=False,
    )
    rounding.quantize_and_save(str(work / f"auto_round-{bits}-{kind}"), format="auto_gptq")


def llama(work: Path, method: str) -> None:
    """llama.cpp's own quantiser under an importance matrix, each tensor in its mix's type."""
    import ctypes

    import gguf
    import numpy as np
    import xllamacpp

    from fewbits import FastLanguageModel
    from fewbits.export import gguf_file

    quantize = ctypes.CDLL(xllamacpp.xllamacpp.__file__).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    numbers = [ctypes.c_int64] * 3
    quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *numbers, ctypes.c_void_p]
    ours = gguf_file.encode

    def theirs(weight: Any, kind: str, importance: Any = None) -> Any:
        if kind in ("F32", "F16", "BF16"):
            return ours(weight, kind)
        values = np.ascontiguousarray(weight.float().numpy())
        matrix = None if importance is None else np.ascontiguousarray(importance.float().numpy())
        out = np.zeros(values.nbytes, dtype=np.uint8)
        address = None if matrix is None else matrix.ctypes.data
        code = int(gguf.GGMLQuantizationType[kind])
        size = quantize(code, values.ctypes.data, out.ctypes.data, 0, *values.shape, address)
        return out[:size].reshape(values.shape[0], -1)

    gguf_file.encode = theirs
    model, tokenizer = FastLanguageModel.from_pretrained(MODEL, load_in_4bit=False)
    model.save_pretrained_gguf(
        work / f"llama-{method}", tokenizer, method, calibrate=work / "rows.jsonl", check=False
    )


def fewbits(work: Path, format: str, method: str) -> None:
    """Ours; ``format`` is one of ours or gguf:METHOD."""
    from fewbits.inference.rounding.pipeline import calibrate_checkpoint
    from fewbits.models.packing.gguf_mix import recipe_of_format

    target = work / f"fewbits-{format.replace(':', '_')}-{method.replace(':', '_')}"
    size = (CALIBRATING, WINDOW)
    recipe = recipe_of_format(MODEL, format)
    calibrate_checkpoint(MODEL, target, recipe, work / "rows.jsonl", method=method, windows=size)


def _bits(model: Any) -> float:
    """Bits of a value of the packed linears, float32 scales counted as the float16 that files keep."""
    from fewbits.nn.linear import QuantizedLinear

    num_bits = count = 0
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            packed = module.packed
            count += math.prod(packed.shape)
            for name, part in packed.parts.items():
                width = 16 if name == "scales" and part.element_size() == 4 else 8 * part.element_size()
                code_bits = packed.format.contract.coding.bits if name == "zero_points" else width
                num_bits += code_bits * part.numel()
    return num_bits / count


def measure(work: Path) -> None:
    """Print a row for every model in the folder."""
    import torch

    from fewbits import FastLanguageModel

    plain, tokenizer = FastLanguageModel.from_pretrained(MODEL, load_in_4bit=False, dtype=torch.float32)

    @torch.no_grad()
    def log_probs(model: Any, windows: Any) -> Any:
        return torch.cat([model(input_ids=w[None]).logits.float().log_softmax(-1) for w in windows])

    measured = []
    for part in quarters()[1:]:
        ids = torch.tensor(tokenizer(part).input_ids)
        windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)[:MEASURED]
        measured.append((windows, log_probs(plain, windows)))
    print("| what | bits | KL where chosen | KL shown | perplexity shown |\n|---|---|---|---|---|")
    for place in sorted(work.iterdir()):
        files = [*place.glob("*.gguf"), *(f.parent for f in place.rglob("config.json"))]
        if not place.is_dir() or not files:
            continue
        model, _ = FastLanguageModel.from_pretrained(files[0], dtype=torch.float32)
        cells, loss = [], 0.0
        for windows, wanted in measured:
            found = log_probs(model, windows)
            kl = (wanted.exp() * (wanted - found)).sum(-1).mean(-1)
            loss = float(-found[:, :-1].gather(-1, windows[:, 1:, None]).mean())
            cells.append(f"{kl.mean():.4f} ± {kl.std() / len(kl) ** 0.5:.4f}")
        print(
            f"| {place.name} | {_bits(model):.3f} | {' | '.join(cells)} | {math.exp(loss):.3f} |", flush=True
        )


COMMANDS: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (prepare, gptqmodel, auto_round, llama, fewbits, measure)
}


def main() -> None:
    """One command of those above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("work", type=Path)
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    COMMANDS[args.command](args.work, *args.words)


if __name__ == "__main__":
    sys.exit(main())
