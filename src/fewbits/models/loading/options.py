"""The options of Unsloth's calls, sorted into honoured, noted and refused; none is dropped in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fewbits.errors import BadInput, Unsupported

# Passed on to transformers as they are.
_TO_TRANSFORMERS = {
    "token",
    "revision",
    "cache_dir",
    "attn_implementation",
    "max_memory",
    "subfolder",
    "variant",
}
# Names of Unsloth's that choose nothing here, with the reason that the note gives.
_CHOOSES_NOTHING = {
    "fix_tokenizer": "tokenizers are used as they are",
    "use_exact_model_name": "names are always exact",
    "fast_inference": "there is no vLLM; fast_generate and TRL's completions come from model.generate",
    "max_lora_rank": "it concerns vLLM",
    "gpu_memory_utilization": "it concerns vLLM",
    "disable_log_stats": "it concerns vLLM",
    "random_state": "loading draws no random numbers",
    "unsloth_tiled_mlp": "the memory plan chooses what of an MLP is kept, recomputed or offloaded",
    "float32_mixed_precision": "the Trainer's bf16/fp16 options decide the precision of training",
}
# Names of Unsloth's that would change the result: refused unless off.
_REFUSED = {
    "float8_kv_cache": "a recipe chooses it, as recipe={'name': 'qlora_nf4', 'kv_cache': 'fp8'}",
    "load_in_fp8": "pass recipe='float8_full' for products in FP8",
    "qat_scheme": "pass recipe='int4_qat' for quantisation-aware training",
    "rope_scaling": "a larger max_seq_length stretches positions; set others in config.json",
    "offload_embedding": "name the embedding's device in device_map",
    "layers_pattern": "name layers with layers_to_transform, or target_modules as a regular expression",
}
PEFT_CHOOSES_NOTHING = {
    "max_seq_length": "from_pretrained has set it",
    "temporary_location": "nothing is swapped to disk",
    "task_type": "it is CAUSAL_LM",
}
PEFT_FIELDS = {
    "layers_to_transform",
    "exclude_modules",
    "modules_to_save",
    "init_lora_weights",
    "loftq_config",
    "trainable_token_indices",
    "rank_pattern",
    "alpha_pattern",
    "use_dora",
    "ensure_weight_tying",
}


@dataclass
class Loading:
    """The options of one from_pretrained call, sorted."""

    notes: list[str] = field(default_factory=list)
    hf: dict[str, Any] = field(default_factory=dict)
    allow_pickle: bool = False
    trust_remote_code: bool = False
    local_files_only: bool = False
    device_map: Any = None
    use_gradient_checkpointing: Any = None
    resize_model_vocab: int | None = None
    base_model: str | None = None
    is_trainable: bool = True
    length: int | None = None


def sort_options(options: Mapping[str, Any], length: int | None = None) -> Loading:
    """Sort the keyword arguments of one from_pretrained call.

    Raises:
        BadInput, Unsupported: an unknown name, or one that cannot be honoured.
    """
    rest = dict(options)
    loading = Loading(length=length)
    for name in _TO_TRANSFORMERS & set(rest):
        loading.hf[name] = rest.pop(name)
    for name in ("allow_pickle", "trust_remote_code", "local_files_only", "is_trainable"):
        setattr(loading, name, bool(rest.pop(name, getattr(loading, name))))
    for name in ("device_map", "use_gradient_checkpointing", "resize_model_vocab", "base_model"):
        setattr(loading, name, rest.pop(name, getattr(loading, name)))
    if rest.pop("load_in_16bit", False):
        loading.hf["load_in_16bit"] = True
    note_or_refuse(rest, loading.notes, "from_pretrained", _CHOOSES_NOTHING)
    return loading


def whole_embeddings(model: Any, targets: Any, fields: dict[str, Any], notes: list[str]) -> str | list[str]:
    """Targets without the embedding, which as a target trains as a whole, and with it a head among them.

    So do Unsloth's notebooks mean it, whose trainer then has a learning rate for both.

    Args:
        model: what is adapted.
        targets: names of modules, or a text that stands for some.
        fields: of PEFT's configuration; gets ``modules_to_save``.
        notes: gets a sentence.
    """
    if isinstance(targets, str):
        return targets
    embedding = model.get_input_embeddings()
    name = next((name for name, module in model.named_modules() if module is embedding), "")
    leaf = name.rpartition(".")[2]
    if not leaf or leaf not in targets:
        return list(targets)
    whole = [target for target in targets if target in (leaf, "lm_head")]
    fields["modules_to_save"] = list(dict.fromkeys([*(fields.get("modules_to_save") or ()), *whole]))
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        fields["modules_to_save"] = [n for n in fields["modules_to_save"] if n != "lm_head"]
        fields.setdefault("ensure_weight_tying", True)
    notes.append(
        f"get_peft_model: {' and '.join(whole)} among the targets: trained as a whole, without adapters."
    )
    return [target for target in targets if target not in whole]


def note_or_refuse(options: dict[str, Any], notes: list[str], where: str, nothing: Mapping[str, str]) -> None:
    """Note what chooses nothing, refuse what would change the result, and what nobody knows."""
    for name, value in options.items():
        if name in nothing:
            notes.append(f"{where}: {name}={value!r} chooses nothing here: {nothing[name]}.")
        elif name not in _REFUSED:
            raise BadInput(f"{where} knows no option {name!r}; leave it out.")
        elif value not in (None, False, {}, 0):
            raise Unsupported(f"{where} cannot honour {name}={value!r}: {_REFUSED[name]}; leave it out.")
