"""The fused decoder against the layers' own forward: loss and gradients, every family, every `Keep`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewbits.decoder.fuse import fuse, fused_layers, fusion_of, unfuse
from fewbits.decoder.keep import KEEP_NONE, KEEPS
from fewbits.errors import BadInput
from fewbits.formats import E4M3, E4M3_ROW, NF4
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.packing.convert import convert
from fewbits.nn.loss import LazyHead, LazyLogits, LogitFreeLoss
from fewbits.recipes.recipe import LoRA, Recipe, Rule
from fewbits.training.checkpoints.folders import load_weights, save_weights
from tests.models.tiny import FAMILIES, tiny, tokens

LORA = LoRA(r=8)
NF4_ONLY = Recipe(name="nf4", linear=Rule(weight=NF4))


def adapted(
    family: str, recipe: Recipe | None = NF4_ONLY, *, lora: LoRA | None = LORA, **changes: Any
) -> Any:
    """A tiny model in training mode, packed, with adapters whose B is not zero."""
    model = tiny(family, **changes)
    if recipe is not None:
        convert(model, recipe)
    if family != "gemma2":  # whose soft cap transformers computes in "eager" only
        model.set_attn_implementation("sdpa")
    if lora is not None:
        model = get_peft_model(model, lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    return model.train()


def loss_and_gradients(model: Any, ids: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(input_ids=ids, use_cache=False, **{"labels": ids, **kwargs}).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(
    a: tuple[Tensor, dict[str, Tensor]], b: tuple[Tensor, dict[str, Tensor]], rtol: float = 1e-4
) -> None:
    """Equal up to the order of float32 sums: 2**-24 times a few hundred terms of like size."""
    torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=1e-6)
    assert a[1].keys() == b[1].keys() and a[1]
    for name in a[1]:
        error = (a[1][name] - b[1][name]).norm() / b[1][name].norm().clamp(min=1e-12)
        assert error < rtol, (name, float(error))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [12, 37])  # one within the sliding windows of 16, one beyond
def test_a_family_learns_the_same(family: str, length: int) -> None:
    model, ids = adapted(family), tokens(3, length)
    plain = loss_and_gradients(model, ids)
    receipt = fuse(model)
    assert len(fused_layers(model)) == 2 and "fused" in str(receipt)
    assert_same(loss_and_gradients(model, ids), plain)
    assert not fusion_of(model).fallbacks
    unfuse(model)
    assert_same(loss_and_gradients(model, ids), plain, rtol=1e-7)


def test_the_receipt_has_one_line_for_all_layers() -> None:
    lines = str(fuse(adapted("llama"))).splitlines()
    assert lines[0] == "llama, fused decoder: 3 modules changed"  # no bytes: no parameter was touched
    assert [" ".join(line.split()).removeprefix("base_model.model.") for line in lines[1:3]] == [
        "model.layers.* x2 LlamaDecoderLayer, computed as two fused autograd nodes",
        "lm_head x1 Linear, its loss computed without holding the logits",
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_what_is_kept_changes_nothing(family: str, keep: Any) -> None:
    model, ids = adapted(family), tokens(2, 20)
    fuse(model)
    everything = loss_and_gradients(model, ids)
    for layer in fused_layers(model):
        layer.keep = keep
    assert_same(loss_and_gradients(model, ids), everything, rtol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_full_fine_tuning(family: str) -> None:
    """No adapters, no packing: every weight, bias and norm has its gradient."""
    model, ids = adapted(family, None, lora=None), tokens(2, 20)
    plain = loss_and_gradients(model, ids)
    fuse(model)
    assert_same(loss_and_gradients(model, ids), plain)
    assert not fusion_of(model).fallbacks


def test_a_padded_batch() -> None:
    model, ids = adapted("llama"), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, 13:] = 0
    batch = {"attention_mask": mask, "labels": ids.where(mask.bool(), -100)}
    plain = loss_and_gradients(model, ids, **batch)
    fuse(model)
    assert_same(loss_and_gradients(model, ids, **batch), plain)
    assert not fusion_of(model).fallbacks


def test_some_linears_without_adapters_and_odd_ranks() -> None:
    lora = LoRA(r=5, alpha=7, targets=("q_proj", "v_proj", "up_proj"))
    model, ids = adapted("llama", lora=lora), tokens(2, 20)
    plain = loss_and_gradients(model, ids)
    fuse(model)
    assert_same(loss_and_gradients(model, ids), plain)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.set_adapter("default"), None),
        (lambda m: m.disable_adapter_layers(), None),
        (lambda m: m.base_model.set_adapter(["default", "other"]), "several adapters"),
    ],
)
def test_adapters_come_and_go(change: Any, reason: str | None) -> None:
    model, ids = adapted("llama"), tokens(2, 12)
    get_peft_model(model, LoRA(r=4), adapter_name="other")
    fuse(model)
    change(model)
    x = model.get_input_embeddings()(ids).detach().requires_grad_()
    if reason is None:
        model(inputs_embeds=x, labels=ids).loss.backward()
        assert not fusion_of(model).fallbacks
    else:
        with pytest.warns(UserWarning, match=reason):
            model(inputs_embeds=x, labels=ids).loss.backward()
        assert any(reason in why for why in fusion_of(model).fallbacks)


def test_dropout_takes_the_layers_own_forward() -> None:
    model, ids = adapted("llama", lora=LoRA(r=4, dropout=0.5)), tokens(2, 12)
    fuse(model)
    with pytest.warns(UserWarning, match="dropout"):
        model(input_ids=ids, labels=ids).loss.backward()
    assert sum(fusion_of(model).fallbacks.values()) == 2
    model.eval()
    model(input_ids=ids, labels=ids).loss.backward()  # no dropout there
    assert sum(fusion_of(model).fallbacks.values()) == 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "an adapter of the kind"),
        ({"lora_bias": True}, "has a bias"),
        ({"r": 129}, "rank is 129"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_adapters_that_no_node_takes_are_said_and_left_to_the_layer(
    settings: dict[str, Any], reason: str
) -> None:
    model, ids = get_peft_model(tiny("llama"), **settings).train(), tokens(2, 12)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    plain = loss_and_gradients(model, ids)
    fuse(model)
    with pytest.warns(UserWarning, match=reason):
        assert_same(loss_and_gradients(model, ids), plain)
    assert sum(fusion_of(model).fallbacks.values()) == 2


def test_generation_and_hidden_states_stay_as_they_were() -> None:
    model, ids = adapted("llama"), tokens(2, 12)
    model.eval()
    with torch.no_grad():
        before = model(input_ids=ids, output_hidden_states=True)
    text = model.generate(ids, max_new_tokens=5, do_sample=False)
    fuse(model)
    with torch.no_grad():
        after = model(input_ids=ids, output_hidden_states=True)
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-4, atol=1e-4)
    assert not fusion_of(model).fallbacks
    assert torch.equal(text, model.generate(ids, max_new_tokens=5, do_sample=False))
    model.train()
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    for a, b in zip(before.hidden_states, states, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_logits_are_right_for_whoever_asks() -> None:
    model, ids = adapted("gemma2", final_logit_softcapping=3.0), tokens(2, 12)
    right = model(input_ids=ids, labels=ids)
    fuse(model)
    out = model(input_ids=ids, labels=ids)
    assert isinstance(out.logits, LazyLogits) and out.logits.shape == right.logits.shape
    torch.testing.assert_close(out.logits + 0, right.logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(out.logits.argmax(-1), right.logits.argmax(-1))
    torch.testing.assert_close(out.loss, right.loss, rtol=1e-5, atol=1e-6)
    model.zero_grad()
    (model(input_ids=ids).logits.float().square().mean()).backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora" in n)


def test_a_second_backward_pass_says_why_not() -> None:
    model, ids = adapted("llama"), tokens(2, 12)
    fuse(model)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    with pytest.raises(Exception, match="one backward pass"):
        loss.backward()


def test_a_change_in_place_between_forward_and_backward_is_refused() -> None:
    """As torch refuses it of plain layers; the gradients would be of neither the old values nor the new."""
    model, ids = adapted("llama"), tokens(1, 8)
    fuse(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    first, second = (model(input_ids=ids, labels=ids).loss for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(BadInput, match="changed in place"):
        second.backward()
    out = model(input_ids=ids, labels=ids, output_hidden_states=True)
    with torch.no_grad():
        out.hidden_states[1].zero_()
    with pytest.raises(BadInput, match="changed in place"):
        out.loss.backward()
    model(input_ids=ids, labels=ids).loss.backward()


def test_a_copy_is_a_model_of_its_own() -> None:
    model, ids = adapted("llama"), tokens(2, 12)
    fuse(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            if p.is_floating_point() and p.requires_grad:
                p.zero_()
    a, b = (m(input_ids=ids, labels=ids).loss for m in (model, twin))
    assert not torch.equal(a, b)


def test_a_loss_that_is_held_holds_no_activations() -> None:
    model, ids = adapted("llama"), tokens(2, 12)
    fuse(model)
    held = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        held.append(loss)
    node = held[0].grad_fn
    seen, stack = set(), [node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        assert getattr(getattr(node, "kept", None), "_tensors", None) is None
        stack.extend(parent for parent, _ in node.next_functions)
    assert any(hasattr(node, "kept") for node in seen)


FLOAT8 = Rule(weight=NF4, weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_float8_products_err_as_their_definition_does(family: str) -> None:
    """Each operand is rounded once, with 2**-4 at most; the definition's rounding is as far from exact."""
    ids = tokens(3, 20)
    exact = loss_and_gradients(adapted(family), ids)[1]
    model = adapted(family, Recipe(name="nf4_float8", linear=FLOAT8))
    defined = loss_and_gradients(model, ids)[1]
    fuse(model)
    fused = loss_and_gradients(model, ids)[1]
    assert not fusion_of(model).fallbacks
    for layer in fused_layers(model):
        layer.keep = KEEP_NONE
    again = loss_and_gradients(model, ids)[1]
    for name in exact:
        norm = exact[name].norm()
        assert torch.equal(again[name], fused[name])
        assert (fused[name] - exact[name]).norm() < 1.5 * (defined[name] - exact[name]).norm() + 0.02 * norm
        assert (fused[name] - exact[name]).norm() > 1e-4 * norm, "nothing was rounded"


def test_delayed_scales_come_from_the_step_before() -> None:
    """Step 1 has no history and is the row-scaled one; from step 2 on the error is about as small."""
    ids = tokens(3, 20)
    exact = loss_and_gradients(adapted("llama"), ids)[1]
    by_row = adapted("llama", Recipe(name="nf4_float8", linear=FLOAT8))
    fuse(by_row)
    rows = loss_and_gradients(by_row, ids)[1]
    model = adapted("llama", Recipe(name="nf4_float8", linear=FLOAT8))
    fuse(model, delayed_scaling=True)
    first, second, third = (loss_and_gradients(model, ids)[1] for _ in range(3))
    for name in exact:
        norm = exact[name].norm()
        assert torch.equal(first[name], rows[name])
        assert not torch.equal(second[name], rows[name]) or "self_attn" in name or "layers.1" in name
        for later in (second, third):
            assert (later[name] - exact[name]).norm() < 2 * (rows[name] - exact[name]).norm() + 0.02 * norm
    scales = next(iter(fusion_of(model).scales.values()))
    state = scales.state_dict()
    fourth = loss_and_gradients(model, ids)[1]
    scales.load_state_dict(state)
    again = loss_and_gradients(model, ids)[1]
    assert all(torch.equal(again[name], fourth[name]) for name in again)


def _only_forward(model: Any, ids: Tensor) -> None:
    model(input_ids=ids, labels=ids, use_cache=False)


def _all_masked(model: Any, ids: Tensor) -> None:
    loss_and_gradients(model, ids, labels=torch.full_like(ids, -100))


def _out_of_memory(model: Any, ids: Tensor) -> None:
    """On the way back, before the first layer's turn."""

    def fail(_: Any) -> None:
        raise torch.cuda.OutOfMemoryError

    inner = model.get_base_model().model
    handle = inner.layers[1].register_forward_pre_hook(lambda _, args: args[0].register_hook(fail) and None)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        loss_and_gradients(model, ids)
    handle.remove()


@pytest.mark.parametrize("before", [_only_forward, _all_masked, _out_of_memory])
@pytest.mark.parametrize("times", [1, 3])
def test_a_pass_that_recorded_no_gradient_leaves_no_scale(before: Any, times: int) -> None:
    """A slot counts when it has recorded a magnitude; until then rows have their own scales."""
    ids = tokens(3, 20)
    exact = loss_and_gradients(adapted("llama"), ids)[1]
    model = adapted("llama", Recipe(name="nf4_float8", linear=FLOAT8))
    fuse(model)
    rows = loss_and_gradients(model, ids)[1]
    unfuse(model)
    fuse(model, delayed_scaling=True)
    for _ in range(times):
        before(model, ids)
    for _ in range(2):
        found = loss_and_gradients(model, ids)[1]
        for name in exact:
            allowed = 2 * (rows[name] - exact[name]).norm() + 0.02 * exact[name].norm()
            assert (found[name] - exact[name]).norm() < allowed, name


def test_passes_without_a_backward_pass_leave_the_history() -> None:
    """Evaluations with gradients on do not push older magnitudes out; and known slots are not asked again."""
    ids = tokens(3, 20)
    model = adapted("llama", Recipe(name="nf4_float8", linear=FLOAT8))
    fuse(model, delayed_scaling=True)
    for _ in range(2):
        loss_and_gradients(model, ids)
    (scales,) = fusion_of(model).scales.values()
    for _ in range(2):  # the first takes up what the last step recorded
        _only_forward(model, ids)
        history = scales.state_dict()["history"][:, 1::2].clone()
    _only_forward(model, ids)
    assert torch.equal(scales.state_dict()["history"][:, 1::2], history)
    assert all(scales.slot(i).has_scale for i in range(4))
    scales._look(torch.zeros(4, device="meta"))  # a tensor that nobody can read


def test_a_checkpoint_keeps_the_scales(tmp_path: Path) -> None:
    """A run that is resumed goes on under the scales that it had, to the same bits."""
    ids = tokens(3, 20)
    model = adapted("llama", Recipe(name="nf4_float8", linear=FLOAT8))
    fuse(model, delayed_scaling=True)
    for _ in range(2):
        loss_and_gradients(model, ids)
    save_weights(model, tmp_path)
    next_step = loss_and_gradients(model, ids)[1]
    resumed = adapted("llama", Recipe(name="nf4_float8", linear=FLOAT8))
    fuse(resumed, delayed_scaling=True)
    load_weights(resumed, tmp_path)
    again = loss_and_gradients(resumed, ids)[1]
    assert all(torch.equal(next_step[name], again[name]) for name in next_step)


def test_a_soft_cap_under_torch_compile() -> None:
    """Which functions were called on logits that do not exist is not mistaken for another."""
    torch.compiler.reset()
    head = nn.Linear(8, 32, bias=False)
    head.forward = LazyHead(head)  # type: ignore[method-assign,assignment]
    loss = LogitFreeLoss(lambda **_: torch.zeros(()))

    def step(x: Tensor, y: Tensor) -> Tensor:
        z = head(x)
        z = z / 3.0
        z = torch.tanh(z)
        z = z * 3.0
        return loss(z, y, 32)

    x, y = 4 * torch.randn(2, 6, 8), torch.randint(32, (2, 6))
    need = step(x, y)
    assert need > 0
    torch.testing.assert_close(torch.compile(step, backend="eager")(x, y), need)


@pytest.mark.nightly  # half a minute each
@pytest.mark.parametrize(("family", "layers"), [("llama", 1), ("gemma2", 2)])  # the other six: once, by hand
def test_compiled_or_not(family: str, layers: int) -> None:
    """torch.compile goes round the nodes, which are launched as they are."""
    torch.compiler.reset()
    model, ids = adapted(family, num_hidden_layers=layers), tokens(2, 20)
    plain = loss_and_gradients(model, ids)
    fuse(model)
    model.zero_grad()
    loss = torch.compile(model, backend="aot_eager")(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_same((loss.detach(), gradients), plain)
    assert not fusion_of(model).fallbacks


def test_labels_that_do_not_count_cost_no_rows() -> None:
    model, ids = adapted("llama"), tokens(2, 24)
    labels = ids.clone()
    labels[:, :20] = -100
    plain = loss_and_gradients(model, ids, labels=labels)
    fuse(model)
    assert_same(loss_and_gradients(model, ids, labels=labels, valid_rows=12), plain)
    with pytest.raises(BadInput, match="give a bound"):
        loss_and_gradients(model, ids, labels=labels, valid_rows=4)


def test_float8_full_fine_tuning() -> None:
    """y and dx from E4M3 operands; no gradient errs more than under the definition, whose dW has them too."""
    rule = Rule(weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW)
    ids = tokens(4, 24)
    exact = loss_and_gradients(adapted("qwen3", None, lora=None), ids)[1]
    model = adapted("qwen3", Recipe(name="float8", linear=rule), lora=None)
    defined = loss_and_gradients(model, ids)[1]
    fuse(model)
    fused = loss_and_gradients(model, ids)[1]
    assert not fusion_of(model).fallbacks and fused.keys() == exact.keys()
    for name in exact:
        norm = exact[name].norm()
        assert (fused[name] - exact[name]).norm() < 1.5 * (
            defined[name] - exact[name]
        ).norm() + 0.02 * norm, name


def test_float8_scales_follow_weights_that_a_fused_optimizer_changed() -> None:
    rule = Rule(weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW)
    ids = tokens(2, 12)
    model = adapted("llama", Recipe(name="float8", linear=rule), lora=None)
    fuse(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)  # counts no versions
    loss_and_gradients(model, ids)
    optimizer.step()
    kept = loss_and_gradients(model, ids)
    unfuse(model)
    fuse(model)
    assert_same(loss_and_gradients(model, ids), kept)
