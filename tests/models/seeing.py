"""Tiny models that see, with processors made of their classes: ``save_seeing(kind, folder)``.

Qwen's and Pixtral's processors of transformers need torchvision, which the tests' packages do not have: tests
of these kinds run where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3Config, Gemma3Processor

from tests.models.loading import tokenizer
from tests.models.test_multimodal import VISION
from tests.models.test_vision import _TEXT as QWEN_TEXT
from tests.models.test_vision import _VISION as QWEN_VISION
from tests.models.tiny import tiny_config

VOCAB = 128
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '#' + m['role'][0] + ': ' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}PLACE{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ '#a: ' }}{% endif %}"
)
# torchvision is in none of the extras; transformers' processors of these kinds ask for it.
KINDS = [
    "gemma3",
    *(
        pytest.param(
            kind, marks=pytest.mark.skipif(not find_spec("torchvision"), reason="torchvision is missing")
        )
        for kind in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "mistral3")
    ),
]


def picture(color: tuple[int, int, int], size: tuple[int, int]) -> Image.Image:
    """One colour, so wide and high."""
    return Image.new("RGB", size, color)


def save_seeing(kind: str, folder: Path) -> None:
    """Write a tiny model, its tokenizer and its processor."""
    processor, config = _MADE[kind]()
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # Gemma's projector begins with zeros, through which no image is seen
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _words(place: str, tokens: list[str], **named: str) -> Any:
    made = tokenizer()
    made.add_special_tokens({"additional_special_tokens": tokens})
    more = {"extra_special_tokens": named} if named else {}
    made = type(made)(
        tokenizer_object=made._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        **more,
    )
    made.chat_template = TEMPLATE.replace("PLACE", place)
    return made


def _gemma3() -> tuple[Any, Any]:
    try:
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil as Images
    except ImportError:  # transformers before it had two of each
        from transformers import Gemma3ImageProcessor as Images

    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft>"}
    words = _words("<start_of_image>", list(named.values()), **named)
    text = tiny_config("gemma3_text", layer_types=["sliding_attention", "full_attention"]).to_dict()
    config = Gemma3Config(
        text_config=text | {"vocab_size": VOCAB}, vision_config=VISION, mm_tokens_per_image=4
    )
    config.image_token_index = config.image_token_id = words.image_token_id
    config.boi_token_index, config.eoi_token_index = words.boi_token_id, words.eoi_token_id
    seen = Images(size={"height": 28, "width": 28})
    return Gemma3Processor(seen, words, image_seq_length=4, chat_template=words.chat_template), config


def _qwen(kind: str) -> tuple[Any, Any]:
    import transformers as hf

    tokens = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
    words = _words("<|vision_start|><|image_pad|><|vision_end|>", tokens)
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")
    ends = dict(zip(names, words.convert_tokens_to_ids(tokens), strict=True))
    text, vision, side = {**QWEN_TEXT, "vocab_size": VOCAB}, QWEN_VISION, 28
    if kind != "qwen2_5_vl":
        rope = {**QWEN_TEXT["rope_parameters"], "mrope_interleaved": True}
        text |= {"model_type": f"{kind}_text", "head_dim": 16, "rope_parameters": rope}
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        own = {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
        vision, side = {**QWEN_VISION, **own}, 32
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **ends)
    images = hf.Qwen2VLImageProcessor(
        min_pixels=side**2, max_pixels=16 * side**2, patch_size=side // 2, merge_size=2
    )
    old = kind == "qwen2_5_vl"
    videos = hf.Qwen2VLVideoProcessor() if old else hf.Qwen3VLVideoProcessor()
    cls = hf.Qwen2_5_VLProcessor if old else hf.Qwen3VLProcessor
    return cls(images, words, videos, chat_template=words.chat_template), config


def _mistral3() -> tuple[Any, Any]:
    from transformers import PixtralImageProcessor, PixtralProcessor

    words = _words("[IMG]", ["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    text = {**tiny_config("mistral").to_dict(), "vocab_size": VOCAB, "sliding_window": None}
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 14,
        "image_size": 56,
    }
    config = AutoConfig.for_model(
        "mistral3",
        text_config=text,
        vision_config=vision,
        image_token_index=words.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )
    images = PixtralImageProcessor(size={"longest_edge": 56}, patch_size={"height": 14, "width": 14})
    sizes = {"patch_size": 14, "spatial_merge_size": 2}
    return PixtralProcessor(images, words, **sizes, chat_template=words.chat_template), config


_MADE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gemma3": _gemma3,
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl"),
    "qwen3_vl": lambda: _qwen("qwen3_vl"),
    "qwen3_vl_moe": lambda: _qwen("qwen3_vl_moe"),
    "mistral3": _mistral3,
}
