"""FastLanguageModel: Unsloth's calls, its option names, adapters as model names, training and saving."""

from __future__ import annotations

import inspect
import re
import socket
import time

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from fewbits import FastLanguageModel, explain
from fewbits.decoder.fuse import fuse, fused_layers
from fewbits.decoder.keep import KEEP_ACTIVATIONS, KEEP_NONE, KEEP_ON_HOST, Keep
from fewbits.errors import BadInput, FewbitsError, SpecMismatch, Unsupported
from fewbits.formats import get_format
from fewbits.models.packing.packed import is_packed
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import Recipe, Rule
from fewbits.recipes.catalog import CATALOG
from tests.models.loading import logits, packed_state, perturb, same, save_tiny
from tests.models.steps import losses_of_steps
from tests.models.tiny import tokens

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def base(tmp_path):
    save_tiny(tmp_path / "base")
    return tmp_path / "base"


def formats(model) -> set[str]:
    return {m.format.name for m in model.modules() if isinstance(m, QuantizedLinear)}


def test_the_flags_choose_the_recipe(base):
    for options, expected in [
        ({}, {"nf4_dq"}),
        ({"load_in_8bit": True, "load_in_4bit": False}, {"int8"}),
        ({"load_in_8bit": True}, {"int8"}),
        ({"load_in_4bit": False}, set()),
        ({"load_in_16bit": True}, set()),
        ({"full_finetuning": True}, set()),
        ({"recipe": "int8", "load_in_4bit": True}, {"int8"}),
    ]:
        model, _ = FastLanguageModel.from_pretrained(str(base), **options)
        found = formats(model)
        assert found == expected or (expected == {"nf4_dq"} and found <= {"nf4", "nf4_dq"} and found), options
        assert is_packed(model) == bool(expected)


def test_unsloths_own_script_arguments(base):
    """The argument lists of Unsloth's notebooks, unchanged."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(base),
        max_seq_length=128,
        dtype=None,
        load_in_4bit=True,
        token=None,
        device_map="sequential",
        fast_inference=False,
        gpu_memory_utilization=0.6,
        max_lora_rank=32,
        random_state=3407,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        target_modules=TARGETS,
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=3407,
        use_rslora=False,
        loftq_config=None,
        layers_to_transform=None,
        max_seq_length=128,
    )
    assert isinstance(model, peft.PeftModel)
    assert model.max_seq_length == 128 and tokenizer.model_max_length == 128
    assert "gpu_memory_utilization" in str(explain(model))
    notes = " ".join(model.fewbits_notes)
    for name in ("gpu_memory_utilization", "max_lora_rank", "get_peft_model: max_seq_length"):
        assert name in notes
    assert {n.split(".")[-3] for n, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


def test_options_are_never_dropped_in_silence(base):
    with pytest.raises(BadInput, match="no option 'colour'"):
        FastLanguageModel.from_pretrained(base, colour="red")
    for name in ("float8_kv_cache", "load_in_fp8", "qat_scheme", "offload_embedding"):
        with pytest.raises(Unsupported, match=name):
            FastLanguageModel.from_pretrained(base, **{name: True})
    model, _ = FastLanguageModel.from_pretrained(base)
    with pytest.raises(BadInput, match="loftq_config"):
        FastLanguageModel.get_peft_model(model, loftq_config={"bits": 4})
    with pytest.raises(BadInput, match="colour"):
        FastLanguageModel.get_peft_model(model, colour="red")


def test_a_step_of_training_and_back_to_inference(base):
    model, _ = FastLanguageModel.from_pretrained(base)
    model = FastLanguageModel.get_peft_model(
        model, r=4, lora_alpha=8, lora_dropout=0.05, target_modules=TARGETS
    )
    before = packed_state(model)
    assert model.training and any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    ids = tokens()
    losses = losses_of_steps(model, ids, 8)
    assert losses[-1] < losses[0]
    assert same(packed_state(model), before)
    FastLanguageModel.for_inference(model)
    assert not model.training and model.config.use_cache
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    with torch.no_grad():
        out = model.generate(input_ids=ids[:, :4], max_new_tokens=3, do_sample=False)
    assert out.shape[1] <= 7
    FastLanguageModel.for_training(model)
    assert model.training


def test_generating_in_the_middle_of_training(base):
    """With checkpointed layers transformers loses the cache; the text must be what evaluation mode gives."""
    model, _ = FastLanguageModel.from_pretrained(base)
    model = FastLanguageModel.get_peft_model(model, r=4, lora_dropout=0.5)
    perturb(model)
    ids = tokens()[:1, :5]
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    dropped = next(m for m in model.modules() if isinstance(m, torch.nn.Dropout)).eval()
    during = model.generate(input_ids=ids, **options)
    assert model.training and not dropped.training
    FastLanguageModel.for_inference(model)
    assert torch.equal(during, model.generate(input_ids=ids, **options))
    assert torch.equal(during, model.generate(input_ids=ids, **options, use_cache=False))


def test_adapters_are_seeded_and_leave_the_callers_random_state(base):
    states = []
    for seed in (1, 1, 2):
        model, _ = FastLanguageModel.from_pretrained(base)
        torch.manual_seed(5)
        model = FastLanguageModel.get_peft_model(model, r=4, random_state=seed)
        states.append({n: p.detach() for n, p in model.named_parameters() if "lora_A" in n})
        after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))
    assert same(states[0], states[1]) and not same(states[0], states[2])


def test_an_adapter_folder_is_a_model_name(base, tmp_path):
    model, tokenizer = FastLanguageModel.from_pretrained(base)
    model = perturb(FastLanguageModel.get_peft_model(model, r=4))
    model.save_pretrained(tmp_path / "lora")
    tokenizer.save_pretrained(tmp_path / "lora")
    again, tok = FastLanguageModel.from_pretrained(tmp_path / "lora")
    assert isinstance(again, peft.PeftModel)
    assert torch.equal(logits(again.eval(), tokens()), logits(model.eval(), tokens()))
    assert any(p.requires_grad for p in again.parameters())
    assert tok("hi").input_ids == tokenizer("hi").input_ids
    assert again.save_pretrained_merged(tmp_path / "m", tok).num_merged == 14
    frozen, _ = FastLanguageModel.from_pretrained(tmp_path / "lora", is_trainable=False)
    assert not any(p.requires_grad for n, p in frozen.named_parameters() if "lora" in n)
    base.rename(tmp_path / "moved")
    with pytest.raises(BadInput, match="base_model"):
        FastLanguageModel.from_pretrained(tmp_path / "lora")
    moved, _ = FastLanguageModel.from_pretrained(tmp_path / "lora", base_model=str(tmp_path / "moved"))
    assert torch.equal(logits(moved.eval(), tokens()), logits(model.eval(), tokens()))


def test_peft_itself_loads_the_adapter_on_the_plain_model(base, tmp_path):
    model, _ = FastLanguageModel.from_pretrained(base, load_in_4bit=False)
    model = perturb(FastLanguageModel.get_peft_model(model, r=4))
    model.save_pretrained(tmp_path / "lora")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "lora")
    torch.testing.assert_close(logits(theirs, tokens()), logits(model.eval(), tokens()), rtol=1e-4, atol=1e-4)


def test_targets_that_match_nothing(base):
    model, _ = FastLanguageModel.from_pretrained(base)
    with pytest.raises(SpecMismatch, match="query_key_value"):
        FastLanguageModel.get_peft_model(model, target_modules=["query_key_value"])


def test_lengths(base):
    model, tokenizer = FastLanguageModel.from_pretrained(base)
    assert model.max_seq_length == 128 == tokenizer.model_max_length
    with pytest.raises(BadInput, match=r"is 32 times the 128 positions"):
        FastLanguageModel.from_pretrained(base, max_seq_length=4096)


def test_resize_model_vocab(base):
    model, _ = FastLanguageModel.from_pretrained(base, resize_model_vocab=100)
    assert model.get_input_embeddings().weight.shape[0] == 100 == model.config.vocab_size


def test_full_finetuning_trains_every_weight(base):
    model, _ = FastLanguageModel.from_pretrained(base, full_finetuning=True)
    assert all(p.requires_grad for p in model.parameters())


def test_full_finetuning_with_a_recipe_trains_every_weight_or_is_refused(base, tmp_path):
    """Packed weights have no gradient; codes in FP8 would take one, and mean nothing by it."""
    packing = []
    for name, recipe in CATALOG.items():
        try:
            model, _ = FastLanguageModel.from_pretrained(base, recipe=name, full_finetuning=True)
        except Unsupported as error:
            assert re.match(
                f"full_finetuning trains all weights, but the recipe '{name}' packs them, ", str(error)
            )
            packing.append(name)
            continue
        assert all(p.requires_grad for p in model.parameters()) and not is_packed(model), name
        assert recipe().qat is not None or recipe().linear.weight is None
    assert packing == ["qlora_nf4", "qlora_nf4_fp8", "qlora_nf4_fp8_head", "int8", "stochastic"]
    in_float8 = Recipe(name="mine", head=Rule(weight=get_format("float8_e4m3_row")))
    with pytest.raises(Unsupported, match="the recipe 'mine' packs them"):
        FastLanguageModel.from_pretrained(base, recipe=in_float8, full_finetuning=True)
    model, tokenizer = FastLanguageModel.from_pretrained(base, recipe="int8")
    folder = tmp_path / "packed"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(Unsupported, match=rf"but those in {folder} are packed, .* load the original model"):
        FastLanguageModel.from_pretrained(folder, full_finetuning=True)


def test_nothing_asks_the_network_for_a_local_folder(base, monkeypatch):
    """With every connection refused, a local folder loads, and a hub id is refused in one sentence."""
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise OSError("network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the hub's client waits between attempts
    model, _ = FastLanguageModel.from_pretrained(base)
    FastLanguageModel.get_peft_model(model, r=2)
    assert not asked
    with pytest.raises(FewbitsError, match="someone/some-model") as caught:
        FastLanguageModel.from_pretrained("someone/some-model")
    assert "\n" not in str(caught.value)


def test_the_class_has_unsloths_parameters_first():
    parameters = list(inspect.signature(FastLanguageModel.from_pretrained).parameters)
    assert parameters[:6] == [
        "model_name",
        "max_seq_length",
        "dtype",
        "load_in_4bit",
        "load_in_8bit",
        "full_finetuning",
    ]


def test_what_checkpointing_means_for_fused_layers(base):
    model, _ = FastLanguageModel.from_pretrained(base)
    if not fused_layers(model):
        fuse(model)
    choices = {False: KEEP_ACTIVATIONS, True: KEEP_NONE, "unsloth": KEEP_ON_HOST, "auto": Keep(), 24: Keep()}
    for choice, keep in choices.items():
        FastLanguageModel.for_training(model, choice)
        assert all(layer.keep == keep for layer in fused_layers(model))
        assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    adapted = FastLanguageModel.get_peft_model(model, r=4)
    assert all(layer.keep == KEEP_ON_HOST for layer in fused_layers(adapted))
    for wrong in ("sometimes", 0.0):
        with pytest.raises(BadInput, match="use_gradient_checkpointing is"):
            FastLanguageModel.for_training(model, wrong)
