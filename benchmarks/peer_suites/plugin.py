"""A pytest plugin that runs the suites of PEFT and TRL over packed bases, without the hub.

* ``--base nf4`` or ``--base int8``: whatever model a test gives to PEFT has its plain linears packed first,
  the same way each time; ``--base plain`` leaves it as it is, which is the peer alone.
* ``--layers fewbits``: configurations of LoRA go through `fewbits.lora_config`'s registration, so that our
  layers are put over linears; ``--layers peft`` leaves PEFT's own.
* Names on the hub stand for tiny random models, built once a session from a config of the family in the name.

Only the process of the tests is changed. See README.md beside this file for the commands.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

_FAMILIES = (
    "gemma3", "mistral", "llama", "qwen2_5", "qwen2", "qwen3", "opt", "gptj", "gpt2", "gpt-2", "gpt_neox",
    "bloom",
)  # fmt: skip
_SIZE = {
    "vocab_size": 1000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip


def pytest_addoption(parser: Any) -> None:
    """The plugin's two options."""
    group = parser.getgroup("fewbits")
    group.addoption("--base", choices=("plain", "nf4", "int8"), default="plain")
    group.addoption("--layers", choices=("peft", "fewbits"), default="peft")
    group.addoption("--every", type=int, default=1, help="of PEFT's tests of LoRA, only each n-th")


def pytest_configure(config: Any) -> None:
    """Before any module of tests is imported."""
    folder = Path(tempfile.mkdtemp(prefix="peer-suites-"))
    _serve_names(folder)
    if config.getoption("--base") != "plain" or config.getoption("--layers") != "peft":
        _wrap_peft(config.getoption("--base"), config.getoption("--layers") == "fewbits")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Of PEFT's parametrised tests, those of LoRA; the other methods share their functions."""
    import peft

    _pack_when_built(items, config.getoption("--base"))
    if not any("test_custom_models" in item.nodeid or "test_decoder_models" in item.nodeid for item in items):
        return
    kept = [item for item in items if _is_of_lora(item, peft.LoraConfig)][:: config.getoption("--every")]
    chosen = set(map(id, kept))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = kept


def _pack_when_built(items: list[Any], base: str) -> None:
    """Pack what the tests' own classes build, before a test compares with it."""

    def packed(build: Any) -> Any:
        @functools.wraps(build)
        def packed_build(*args: Any, **kwargs: Any) -> Any:
            model = build(*args, **kwargs)
            _pack(model, base)
            return model

        return packed_build

    for owner in {getattr(item, "cls", None) for item in items} - {None}:
        kind = getattr(owner, "transformers_class", None)
        if kind is not None and not getattr(kind, "_packs", False):
            kind.from_pretrained, kind._packs = packed(kind.from_pretrained), True
        if hasattr(owner, "resolve_model_cls"):
            owner.resolve_model_cls = packed(owner.resolve_model_cls)


def _is_of_lora(item: Any, kind: type) -> bool:
    if hasattr(item, "callspec") and "config_cls" in item.callspec.params:
        return item.callspec.params["config_cls"] is kind
    return "lora" in item.name.lower()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# Models and tokenizers in the place of names on the hub.


def _family(name: str) -> str | None:
    if Path(name).exists() or "/" not in name:
        return None
    low = name.lower().replace("-", "").replace("_", "")
    return next((f for f in _FAMILIES if f.replace("-", "").replace("_", "") in low), None)


def _build(folder: Path, family: str) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    target = folder / family
    if not target.exists():
        kind = {"gemma3": "gemma3_text", "gpt-2": "gpt2", "qwen2_5": "qwen2"}.get(family, family)
        sizes = dict(_SIZE)
        if kind == "opt":
            sizes |= {"ffn_dim": 64, "word_embed_proj_dim": 32}
        if kind in ("gpt2", "gptj"):
            sizes = {"vocab_size": 1000, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
            sizes |= {"rotary_dim": 4} if kind == "gptj" else {}
        config = AutoConfig.for_model(kind, **sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        state = torch.random.get_rng_state()
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).eval().save_pretrained(target)
        torch.random.set_rng_state(state)
        _tokenizer().save_pretrained(target)
    return str(target)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    made.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return made


def _serve_names(folder: Path) -> None:
    import transformers

    def served(original: Any) -> Any:
        @functools.wraps(original)
        def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            family = _family(str(name))
            if family is not None:
                name = _build(folder, family)
                for option in ("revision", "subfolder"):
                    kwargs.pop(option, None)
            return original.__func__(cls, name, *args, **kwargs)

        return classmethod(from_pretrained)

    kinds = [
        transformers.PreTrainedModel, transformers.AutoConfig, transformers.AutoTokenizer,
        transformers.AutoModelForCausalLM, transformers.GenerationConfig, transformers.AutoProcessor,
        transformers.PreTrainedConfig, transformers.PreTrainedTokenizerBase,
    ]  # fmt: skip
    for kind in kinds:
        kind.from_pretrained = served(kind.__dict__["from_pretrained"])


# Packed bases.


def _pack(model: Any, base: str) -> None:
    """Put packed layers in the place of plain linears, each once; a head tied to an embedding stays."""
    from fewbits.formats import INT8, NF4
    from fewbits.nn.linear import QuantizedLinear
    from fewbits.recipes import Rule

    if base == "plain" or any(hasattr(module, "base_layer") for module in model.modules()):
        return
    rule = Rule(weight={"nf4": NF4, "int8": INT8}[base])
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name and id(module.weight) not in embeddings:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, QuantizedLinear.from_linear(module, rule))


def _wrap_peft(base: str, ours: bool) -> None:
    import peft
    import peft.mapping_func

    from fewbits.models.adapters import _register

    def prepare(model: Any, config: Any) -> None:
        if isinstance(config, peft.LoraConfig) and type(config) is peft.LoraConfig:
            _pack(model, base)
            if ours:
                _register(config, model)

    get_peft_model, init = peft.get_peft_model, peft.PeftModel.__init__

    @functools.wraps(get_peft_model)
    def packed_get_peft_model(model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(model, peft_config)
        return get_peft_model(model, peft_config, *args, **kwargs)

    @functools.wraps(init)
    def packed_init(self: Any, model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        prepare(model, peft_config)
        init(self, model, peft_config, *args, **kwargs)

    for module in (peft, peft.mapping_func):
        module.get_peft_model = packed_get_peft_model
    peft.PeftModel.__init__ = packed_init
