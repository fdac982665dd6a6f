"""What a sequence begins with: family, dtype, recipe, adapters; and two equal models made of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from fewbits import convert
from fewbits.decoder.keep import KEEP_EVERYTHING, KEEP_NONE, KEEPS, Keep
from fewbits.formats import INT8, NF4
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.fast import with_methods
from fewbits.recipes import float8_full, float8_full_head, nf4_qat, qlora_nf4_fp8
from fewbits.recipes.recipe import LoRA, Recipe, Rule
from tests.models.tiny import FAMILIES, VOCAB, tiny

LACKING: dict[str, dict[str, Any]] = {  # no layer of these may run fused
    "granite": {"residual_multiplier": 0.22, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    "olmo2": {},
}
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "nf4": Recipe(name="nf4", linear=Rule(weight=NF4)),
    "int8": Recipe(name="int8", linear=Rule(weight=INT8)),
    "nf4, head int8": Recipe(name="nf4", linear=Rule(weight=NF4), head=Rule(weight=INT8)),
    "head nf4": Recipe(name="nf4", head=Rule(weight=NF4)),
    "qat": nf4_qat(),
    "fp8": float8_full(),
    "nf4 fp8": qlora_nf4_fp8(),
    "fp8, head fp8": float8_full_head(),
}
OFTEN = ("none", "none", "nf4", "fp8", "nf4 fp8")
PLANS = (*KEEPS, KEEP_NONE, KEEP_EVERYTHING, Keep(weights=True), Keep(weights=True, offload=True))
_TARGETS = (
    ("q_proj", "v_proj"),
    ("gate_proj", "down_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "all-linear",
)
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a sequence's two models are made.

    Attributes:
        seed: of their values.
        family: the model type.
        dtype: "float32" or "bfloat16".
        recipe: a key of `RECIPES`.
        layers: how many.
        inner: width of the MLP; FP8 products do not take 40.
        attention: "sdpa" or "eager".
        adapters: "" for none, "lora", "dora", "bias", or "head": lora, and a head that trains whole.
        attention_dropout: of the configuration.
        delayed: `fewbits.fuse` gets ``delayed_scaling=True``.
        device: "cpu" or "cuda".
        plan: number of the plan among `PLANS` that layers are fused with; None: the default.
    """

    seed: int = 0
    family: str = "llama"
    dtype: str = "float32"
    recipe: str = "none"
    layers: int = 2
    inner: int = 48
    attention: str = "sdpa"
    adapters: str = "lora"
    attention_dropout: float = 0.0
    delayed: bool = False
    plan: int | None = None
    device: str = "cpu"

    @classmethod
    def of(cls, seed: int) -> Setup:
        """The one of this seed."""
        choose = random.Random(seed).choice
        recipe = choose((*RECIPES, *OFTEN))
        family = choose((*FAMILIES, *FAMILIES, *LACKING))
        is_float8, is_free = "fp8" in recipe, recipe in ("none", "qat", "fp8", "fp8, head fp8", "head nf4")
        kinds = ["lora", "lora", "lora", "dora", "bias", "head"] + ["", "", ""] * is_free
        if recipe == "qat" or is_float8:  # variants over these are refused, or not compared
            kinds = [kind for kind in kinds if kind in ("lora", "")]
        if "head" in recipe or family in ("gemma", "gemma2", "gemma3_text", "qwen2", *LACKING):
            kinds = [kind for kind in kinds if kind != "head"]  # tied, or packed
        return cls(
            seed=seed,
            family=family,
            dtype=choose(("float32", "float32", "float32", "bfloat16")),
            recipe=recipe,
            layers=choose((1, 2, 2, 3)),
            inner=choose((48, 48, 48, 48, 40)),
            attention="eager" if family == "gemma2" else choose(("sdpa", "eager")),
            adapters=choose(kinds),
            attention_dropout=choose((0.0,) * 15 + (0.2,)),
            delayed=is_float8 and choose((True, False)),
            plan=choose((None, *range(len(PLANS)))),
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype`, as torch's."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def is_float8(self) -> bool:
        """Whether the products have FP8 operands."""
        return "fp8" in self.recipe

    @property
    def fused_layers(self) -> int:
        """How many layers `fewbits.fuse` must take."""
        lacking = self.family in LACKING or (self.is_float8 and self.inner % 16)
        return 0 if lacking else self.layers

    def model(self) -> Any:
        """One of the two models, before it is fused."""
        changes = {
            **_SMALL,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "attention_dropout": self.attention_dropout,
        }
        if self.family in ("mistral", "gemma2", "gemma3_text"):
            changes["sliding_window"] = 6
        if self.family in LACKING:
            model = _lacking(self.family, self.seed, self.torch_dtype, **changes)
        else:
            model = tiny(self.family, seed=self.seed, dtype=self.torch_dtype, **changes)
        model.to(self.device)
        recipe = RECIPES[self.recipe]
        if recipe is not None:
            convert(model, recipe)
        with_methods(model)
        model.set_attn_implementation(self.attention)
        if self.adapters:
            model = self.adapted(model, "default", self.seed)
        return model.train()

    def adapted(self, model: Any, name: str, seed: int, *, rounded: bool = False) -> Any:
        """The model with one more adapter, whose B is not zero."""
        choose = random.Random(seed).choice
        dropout = choose((0.0,) * 7 + (0.2,))
        more: dict[str, Any] = {}
        if name == "default" and self.adapters == "dora":
            more = {"use_dora": True}
        elif name == "default" and self.adapters == "bias":
            more = {"lora_bias": True}
        elif name == "default" and self.adapters == "head":
            more = {"modules_to_save": ["lm_head"]}
        if "bias" in str(more):
            dropout = 0.0
        lora = LoRA(
            r=choose((2, 4, 8)),
            alpha=choose((4, 8)),
            dropout=dropout * (not rounded and self.recipe != "qat"),
            targets="all-linear" if self.family == "phi3" else choose(_TARGETS),
        )
        model = get_peft_model(model, lora, adapter_name=name, seed=7, **more)
        generator = torch.Generator().manual_seed(seed)
        for path, p in model.named_parameters():
            if "lora_B" in path and f".{name}." in path:
                p.data.copy_(torch.randn(p.shape, generator=generator) * 0.05)
        return model


def _lacking(family: str, seed: int, dtype: torch.dtype, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, **{**LACKING[family], **changes},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(4)
    return model.eval()
