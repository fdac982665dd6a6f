"""A model's attention through fewbits: same numbers, packed rows apart, undone without a trace."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from fewbits.decoder.fuse import fuse, fusion_of
from fewbits.families.catalog import SPECS
from fewbits.host.attention import (
    NAMES,
    attention_facts,
    attention_receipt,
    is_plain_mask,
    restore_attention,
    use_attention,
    used_attention,
)
from fewbits.models.packing.convert import convert, restore
from fewbits.nn.segments import Segments
from fewbits.recipes import get_recipe
from tests.models.tiny import FAMILIES, tiny, tokens

QWEN_WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
VARIANTS = {family: {} for family in FAMILIES} | {
    "qwen2+window": QWEN_WINDOW,
    "qwen3+window": QWEN_WINDOW,
    "phi3+window": {"sliding_window": 7},
}
LENGTHS = [[9, 1, 14, 6], [20, 10]]


def make(variant, attention="eager"):
    family = variant.partition("+")[0]
    model = tiny(family, dtype=torch.float64, **VARIANTS[variant])
    return model if attention == "eager" else with_name(model, attention)


def with_name(model, name):
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name
    return model


def positions(lengths):
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    ids = inputs["input_ids"]
    out = model(**inputs, labels=ids, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(got, want, attention="eager"):
    """The models are in float64; eager attention takes its softmax in float32, and every model its loss."""
    close = 2**-20 if attention == "eager" else 2**-40
    assert (got[0] - want[0]).norm() <= close * want[0].norm()
    for name, gradient in want[1].items():
        assert (got[1][name] - gradient).norm() <= 2**-18 * gradient.norm() + 1e-12, name


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_stay(variant, attention):
    """Plain, padded at the right, packed by positions and by segments: as transformers computes it."""
    if attention == "sdpa" and variant == "gemma2":
        pytest.skip("transformers does not cap scores in SDPA")
    model = make(variant, attention)
    ids = tokens(2, 30)
    packed = {"input_ids": ids, "position_ids": positions(LENGTHS)}
    padded = {"input_ids": ids, "attention_mask": torch.ones(2, 30, dtype=torch.long)}
    cases = [({"input_ids": ids},) * 2, (packed, packed), (padded, padded)]
    segments = Segments.from_lengths([n for row in LENGTHS for n in row])
    cases.append((packed, {**packed, **segments.keywords()}))
    want = [loss_and_gradients(model, **theirs) for theirs, _ in cases]
    assert "by fewbits" in str(use_attention(model))
    for (_, ours), expected in zip(cases, want, strict=True):
        assert_same(loss_and_gradients(model, **ours), expected, attention)
    assert used_attention(model).taken == {"plain": 4}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layer_gets_the_segments_and_the_empty_mask(variant):
    """The keywords pass through the model's forward to each layer and to its attention."""
    model = make(variant)
    use_attention(model)
    seen = []
    for layer in model.model.layers:
        for module in (layer, layer.self_attn):
            module.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    segments = Segments.from_lengths([n for row in LENGTHS for n in row])
    model(input_ids=tokens(2, 30), position_ids=positions(LENGTHS), use_cache=False, **segments.keywords())
    assert len(seen) == 4
    for kwargs in seen:
        assert is_plain_mask(kwargs["attention_mask"])
        assert Segments.from_keywords(kwargs, 60).cu_seqlens is segments.cu_seqlens


@pytest.mark.parametrize("variant", ["llama", "gemma2", "mistral"])
def test_what_is_not_plain_goes_the_hosts_way(variant):
    model = make(variant)
    other = copy.deepcopy(model)
    use_attention(model)
    ids = tokens(2, 20)
    left = torch.ones(2, 20, dtype=torch.long)
    left[0, :5] = 0
    for inputs in (
        {"attention_mask": left},
        {"output_attentions": True},
        {"attention_mask": torch.zeros(2, 1, 20, 20, dtype=torch.float64)},
    ):
        with torch.no_grad():
            got, want = (m(input_ids=ids, **inputs, use_cache=False) for m in (model, other))
        torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=0, equal_nan=True)
        if "output_attentions" in inputs:
            assert torch.equal(got.attentions[1], want.attentions[1])
    both = [m.generate(ids, attention_mask=left, max_new_tokens=6, do_sample=False) for m in (model, other)]
    assert torch.equal(*both)
    lines = "\n".join(attention_receipt(model))
    for reason in ("more than padding at the right end", "weights were asked for", "key-value cache"):
        assert reason in lines
    assert "plain" not in used_attention(model).taken


def test_right_padding_is_plain_for_the_real_tokens():
    model = make("mistral")
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, 13:] = 0
    with torch.no_grad():
        want = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        use_attention(model)
        got = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    got, want = got[mask.bool()], want[mask.bool()]
    assert (got - want).norm() <= 2**-20 * want.norm()
    assert used_attention(model).taken == {"plain": 1}


def test_dropout_in_training_goes_the_hosts_way():
    model = tiny("llama", attention_dropout=0.5)
    other = copy.deepcopy(model)
    assert "because attention has dropout 0.5" in str(use_attention(model))
    logits = []
    for m in (model, other):
        torch.manual_seed(3)
        logits.append(m.train()(input_ids=tokens(), use_cache=False).logits)
    assert torch.equal(*logits)
    assert used_attention(model).taken == {"attention has dropout": 1}
    model.eval()(input_ids=tokens(), use_cache=False)
    assert used_attention(model).taken["plain"] == 1


def test_with_adapters_and_recomputed_layers():
    ids = tokens(2, 30)
    inputs = {"input_ids": ids, "position_ids": positions(LENGTHS)}
    inputs |= Segments.from_lengths([n for row in LENGTHS for n in row]).keywords()
    model = get_peft_model(
        make("qwen3"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    want = loss_and_gradients(model.train(), **inputs)
    assert "by fewbits" in str(use_attention(model))
    assert_same(loss_and_gradients(model, **inputs), want)
    model.enable_input_require_grads()
    base = model.get_base_model()
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    assert_same(loss_and_gradients(model, **inputs), want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("variant", ["llama", "mistral", "gemma2"])
def test_under_autocast(variant, device):
    """Weights in float32, products in bfloat16: queries come in float32 and values in bfloat16."""
    model = tiny(variant, **VARIANTS[variant]).to(device)
    ids = tokens(2, 30).to(device)
    packed = {"input_ids": ids, "position_ids": positions(LENGTHS).to(device)}
    packed |= Segments.from_lengths([n for row in LENGTHS for n in row], device=device).keywords()
    use_attention(model)
    exact = [loss_and_gradients(model, **inputs) for inputs in ({"input_ids": ids}, packed)]
    for inputs, want in zip(({"input_ids": ids}, packed), exact, strict=True):
        with torch.autocast(device, torch.bfloat16):
            got = loss_and_gradients(model, **inputs)
        assert 1e-4 < (got[0].float() - want[0]).norm() / want[0].norm() < 0.1


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_layers_see_the_same_rows(variant):
    """Windows, caps and segments, with one attention under both kinds of layers."""
    model = tiny(variant.partition("+")[0], **VARIANTS[variant]).train()
    ids = tokens(2, 30)
    packed = {"input_ids": ids, "position_ids": positions(LENGTHS)}
    packed |= Segments.from_lengths([n for row in LENGTHS for n in row]).keywords()
    use_attention(model)
    wants = [loss_and_gradients(model, **inputs) for inputs in ({"input_ids": ids}, packed)]
    fuse(model, loss=False)
    for inputs, want in zip(({"input_ids": ids}, packed), wants, strict=True):
        got = loss_and_gradients(model, **inputs)
        assert (got[0] - want[0]).norm() <= 1e-5 * want[0].norm()
        for name, gradient in want[1].items():
            assert (got[1][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name
    assert not fusion_of(model).fallbacks and used_attention(model).taken == {"plain": 4}


@pytest.mark.parametrize("attention", NAMES)
def test_it_is_undone_and_never_saved(tmp_path, attention):
    model, other = make("llama", attention), make("llama", attention)
    hooks = len(model.model._forward_pre_hooks)
    use_attention(model)
    assert model.config._attn_implementation == NAMES[attention]
    assert other.config._attn_implementation == attention
    assert "already" in str(use_attention(model))
    model.save_pretrained(tmp_path)
    assert "fewbits" not in (tmp_path / "config.json").read_text()
    assert str(restore_attention(model)).endswith(f"{attention} again")
    assert model.config._attn_implementation == attention and used_attention(model) is None
    assert len(model.model._forward_pre_hooks) == hooks
    assert "as it was" in str(restore_attention(model))


def test_restore_brings_the_hosts_attention_back():
    model = tiny("llama")
    convert(model, get_recipe("qlora_nf4"))
    use_attention(model)
    assert "attention: transformers' eager again" in str(restore(model))
    assert used_attention(model) is None and model.config._attn_implementation == "eager"


def test_a_copy_of_the_model_works_by_itself():
    model = make("llama")
    use_attention(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(input_ids=tokens()).logits, model(input_ids=tokens()).logits)
    restore_attention(twin)
    assert used_attention(model) is not None and model.config._attn_implementation == NAMES["eager"]


def test_models_that_keep_their_own():
    model = with_name(make("llama"), "flex_attention")
    assert "flex_attention, as this model asked" in str(use_attention(model))
    model = make("llama")
    model.config.model_type = "rwkv"
    assert "no spec for 'rwkv'" in str(use_attention(model)) and attention_receipt(model) == []


def test_the_receipt_names_the_backend_of_each_kind_of_layer():
    model = make("gemma2")
    assert attention_receipt(model) == [
        "attention x1 (4/2 heads of 16, window 16, scores capped at 50): transformers' eager",
        "attention x1 (4/2 heads of 16, scores capped at 50): transformers' eager",
    ]
    use_attention(model)
    lines = attention_receipt(model, packed=True)
    assert len(lines) == 2 and all("reference, on a CPU nothing else caps scores" in line for line in lines)
    facts = [attention_facts(layer.self_attn, SPECS["gemma2"].attention) for layer in model.model.layers]
    assert [f.window for f in facts] == [16, None] and facts[0].scale == 0.25
    for variant, windows in (("mistral", [16, 16]), ("qwen2+window", [7, None]), ("phi3+window", [7, 7])):
        attention = SPECS[variant.partition("+")[0]].attention
        facts = [attention_facts(layer.self_attn, attention) for layer in make(variant).model.layers]
        assert [f.window for f in facts] == windows


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_rows_on_a_gpu(variant):
    """bfloat16 through the kernels against float64 through the definition, both packed."""
    torch._dynamo.reset()  # after eight compiled kernels of other tests it would take the next uncompiled
    model = make(variant)
    ids = tokens(2, 30)
    inputs = {"input_ids": ids, "position_ids": positions(LENGTHS)}
    inputs |= Segments.from_lengths([n for row in LENGTHS for n in row]).keywords()
    want, _ = loss_and_gradients(model, **inputs)
    theirs, _ = loss_and_gradients(copy.deepcopy(model).to("cuda", torch.bfloat16), **cuda(inputs))
    use_attention(model.to("cuda", torch.bfloat16))
    ours, gradients = loss_and_gradients(model, **cuda(inputs))
    assert used_attention(model).taken == {"plain": 1}
    assert all(g.isfinite().all() for g in gradients.values())
    errors = [(x.double().cpu() - want).norm() / want.norm() for x in (ours, theirs)]
    assert errors[0] <= 1.2 * errors[1] + 1e-3


def cuda(inputs):
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
