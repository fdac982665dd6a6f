"""Run Unsloth's public notebooks against fewbits, imports changed, on tiny models of their families.

    git clone https://github.com/unslothai/notebooks
    python scripts/run_notebooks.py notebooks/nb "Llama3.1_(8B)-Alpaca" ...

Changed are import lines: ``unsloth`` -> ``fewbits``, ``trl`` -> ``fewbits.trl``. Stood in for is what
a small machine lacks: models (a tiny random one of the family), data sets (a few rows of such columns), a GPU
(``"cuda"`` -> ``"cpu"``), and sizes (two steps, four new tokens). Cells that install packages or print what
memory a GPU has are left out. Each notebook runs in a process and a folder of its own; the table says how
far it came. Nothing of the notebooks is kept.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SKIPPED = ("%%capture", "gpu_stats", "used_memory", "!pip", "!uv", "IPython.display")
_SMALLER = (
    (r"\bfrom unsloth\b", "from fewbits"),
    (r"\bimport unsloth\b", "import fewbits"),
    (r"\bfrom trl\b", "from fewbits.trl"),
    (r"\bfrom vllm import SamplingParams", "SamplingParams = dict"),
    (r"(['\"])cuda\1", '"cpu"'),
    (r"max_steps\s*=\s*\d+", "max_steps = 2"),
    (r"num_train_epochs\s*=\s*\d+", "max_steps = 2"),
    (r"max_new_tokens\s*=\s*\d+", "max_new_tokens = 4"),
    (r"max_tokens\s*=\s*\d+", "max_tokens = 4"),
    (r"max_(completion|prompt)_length\s*=\s*[^,\n]+", r"max_\1_length = 16"),
    (r"max_seq_length\s*=\s*\d+", "max_seq_length = 256"),
    (r"num_proc\s*=\s*\d+", "num_proc = None"),
    (r"report_to\s*=\s*\"none\"", 'report_to = "none", use_cpu = True, bf16 = False'),
    (r"^(\s*)(fp16|bf16)\s*=.*$", ""),
)
_NAMED = re.compile(r"(model_name\s*=\s*|Fast\w+\.from_pretrained\(\s*)[\"']([^\"']+)[\"']")
_TOKENS = [
    "<pad>", "<s>", "</s>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>",
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>",
    "<end_of_turn>", "<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|return|>", "<|vision_start|>",
    "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<start_of_image>", "<end_of_image>", "<think>",
    "<image_soft_token>", "</think>", "<|user|>", "<|assistant|>", "<|system|>", "[INST]", "[/INST]",
]  # fmt: skip
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_FAMILIES = (
    ("qwen2.5-vl", "qwen2_5_vl"), ("gpt-oss", "gpt_oss"), ("vision", "gemma3"),
    ("gemma", "gemma3_text"), ("moe", "qwen3_moe"), ("-a3b", "qwen3_moe"), ("qwen3", "qwen3"),
    ("qwen", "qwen2"), ("mistral", "mistral"), ("zephyr", "mistral"), ("bert", "modernbert"), ("", "llama"),
)  # fmt: skip


def tokenizer_of() -> Any:
    """A tokenizer of bytes, with the markers of all families."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate([*_TOKENS, *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=_TOKENS[3:],
        extra_special_tokens={
            "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    )  # fmt: skip
    made.chat_template = _CHATML
    return made


def model_folder(name: str, place: Path) -> str:
    """A tiny model of the family that a name tells."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMaskedLM,
    )

    family = next(kind for word, kind in _FAMILIES if word in name.lower())
    folder = place / family
    if folder.is_dir():
        return str(folder)
    tokenizer = tokenizer_of()
    text: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 8192,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    if family == "qwen2_5_vl":
        text |= {
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
        }
        vision = {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
            "fullatt_block_indexes": [1],
        }  # fmt: skip
        ids = {
            f"{n}_token_id": _TOKENS.index(t)
            for n, t in (
                ("image", "<|image_pad|>"),
                ("video", "<|video_pad|>"),
                ("vision_start", "<|vision_start|>"),
                ("vision_end", "<|vision_end|>"),
            )
        }
        config = AutoConfig.for_model(family, text_config=text, vision_config=vision, **ids)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
        from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

        Qwen2_5_VLProcessor(
            Qwen2VLImageProcessor(min_pixels=784, max_pixels=3136),
            tokenizer,
            Qwen2VLVideoProcessor(),
            chat_template=_CHATML,
        ).save_pretrained(folder)
        return str(folder)
    if family == "gemma3":
        return vision_folder(folder, text, tokenizer)
    more = {
        "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    }.get(family, {})
    config = AutoConfig.for_model(family, **text, **more)
    kind = AutoModelForMaskedLM if family == "modernbert" else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(folder)
    if family == "gpt_oss":
        tokenizer.chat_template = _HARMONY
    tokenizer.save_pretrained(folder)
    return str(folder)


def vision_folder(folder: Path, text: dict[str, Any], tokenizer: Any) -> str:
    """A tiny Gemma 3 that sees, with a processor that needs Pillow alone."""
    from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    begin, end, soft = (
        _TOKENS.index(t) for t in ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
    )
    ids = {"boi_token_index": begin, "eoi_token_index": end, "image_token_index": soft}
    text = {**text, "model_type": "gemma3_text"}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    template = _CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>")
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, do_pan_and_scan=False)
    Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4).save_pretrained(folder)
    return str(folder)


def rows_of(name: str) -> list[dict[str, Any]]:
    """A few rows with the columns of a data set."""
    talk = [{"from": "human", "value": "Name a colour."}, {"from": "gpt", "value": "Blue is one."}]
    chat = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue is one."}]
    bad = [chat[0], {"role": "assistant", "content": "No."}]
    korean = {"conversations": talk, "instruction": "Do.", "output": "Done."}
    name = name.lower()
    table: tuple[tuple[str, Callable[[], dict[str, Any]]], ...] = (
        ("gpt4-korean", lambda: korean),
        ("finetome", lambda: {"conversations": talk}),
        ("guanaco", lambda: {"conversations": talk}),
        ("openhermes", lambda: {"conversations": talk}),
        (
            "openmathreasoning",
            lambda: {"problem": "1 + 1?", "generated_solution": "It is 2.", "expected_answer": "2"},
        ),
        ("ultrafeedback", lambda: {"prompt": "Name a colour.", "chosen": chat, "rejected": bad}),
        ("dolphin", lambda: {"instruction": "Do.", "input": "this", "accepted": "Done.", "rejected": "No."}),
        ("kto", lambda: {"prompt": chat[:1], "completion": chat[1:], "label": True}),
        ("gsm8k", lambda: {"question": "1 + 1?", "answer": "It is 2. #### 2"}),
        ("dapo", lambda: {"prompt": "1 + 1?", "solution": "2"}),
        ("wikipedia", lambda: {"title": "Blue", "text": "Blue is a colour."}),
        ("stories", lambda: {"text": "Once upon a time there was a blue ball."}),
        ("thinking", lambda: {"messages": chat}),
        ("emotion", lambda: {"text": "Blue is one.", "label": 1}),
        ("latex", lambda: {"image": picture(), "text": "x^2"}),
        ("chess", lambda: {"task": "Next?", "input": "e4", "expected_output": "e5"}),
        ("titanic", lambda: {"Age": "22"}),
    )
    make = next((row for word, row in table if word in name), None)
    plain = {
        "instruction": "Do.",
        "input": "this",
        "output": "Done.",
        "instruction_en": "Do.",
        "text": "Blue is one.",
    }
    number = 4096 if "ultrafeedback" in name else 128  # of which a notebook takes 0.5 %
    return [make() if make else dict(plain) for _ in range(number)]


def picture() -> Any:
    """An image of 56 pixels a side."""
    from PIL import Image

    return Image.new("RGB", (56, 56), (20, 40, 200))


def load_dataset(path: str, *args: Any, split: str | None = None, **options: Any) -> Any:
    """A stand-in for that of ``datasets``."""
    options.pop("name", None)
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list(rows_of(path))
    if split is None:
        return DatasetDict(dict.fromkeys(("train", "test", "train_prefs", "test_prefs"), data))
    return data


def cells_of(path: Path) -> list[str]:
    """The code cells that run here, with smaller sizes."""
    cells = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" or any(word in text for word in _SKIPPED):
            continue
        for old, new in _SMALLER:
            text = re.sub(old, new, text, flags=re.MULTILINE)
        cells.append(
            "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("!", "%")))
        )
    return cells


def run_here(path: Path, place: Path) -> str:
    """Run a notebook's cells; "runs", or where and why it stopped."""
    import datasets

    datasets.load_dataset = load_dataset  # of this process
    module = types.ModuleType("__main__")
    kind = "-vision" if "gemma3" in path.stem.lower() and "vision" in path.stem.lower() else ""
    for number, cell in enumerate(cells_of(path), 1):
        cell = _NAMED.sub(lambda m: f"{m[1]}{named(m[2] + kind, place)!r}", cell)
        try:
            exec(compile(cell, f"cell {number}", "exec"), module.__dict__)  # noqa: S102 - that is what it is for
        except BaseException as error:  # noqa: BLE001 - told in the table
            if "--debug" in sys.argv:
                traceback.print_exc()
            line = next(
                (
                    f.lineno
                    for f in reversed(traceback.extract_tb(error.__traceback__))
                    if f.filename.startswith("cell")
                ),
                0,
            )
            code = cell.splitlines()[line - 1].strip()[:60] if line else ""
            return f"cell {number} ({code}): {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return "runs"


def named(name: str, place: Path) -> str:
    """A folder that the notebook has written, or a tiny model."""
    saved = Path(name.removesuffix("-vision"))
    return str(saved) if saved.is_dir() else model_folder(name, place)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="nb of a checkout of the notebooks")
    parser.add_argument("names", nargs="+", help="notebooks, without .ipynb")
    parser.add_argument("--here", action="store_true", help="one, in this process and folder")
    parser.add_argument("--debug", action="store_true", help="with --here: tracebacks")
    args = parser.parse_args()
    if args.here:
        told = run_here(args.folder / f"{args.names[0]}.ipynb", Path.cwd() / "models")
        sys.stdout.write(f"\n{args.names[0]} | {told}\n")
        return
    for name in args.names:
        with tempfile.TemporaryDirectory() as place:
            command = [
                sys.executable,
                "-W",
                "ignore",
                str(Path(__file__).resolve()),
                str(args.folder.resolve()),
                name,
                "--here",
            ]
            shown = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
            lines = [line for line in shown.stdout.splitlines() if line.startswith(f"{name} | ")]
            sys.stdout.write((lines or [f"{name} | the process ended with {shown.returncode}"])[-1] + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
