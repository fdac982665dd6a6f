"""A plan that batches find in trainers that know of none: in place, corrected, made anew, stepped down."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from fewbits import FastLanguageModel, restore
from fewbits.decoder.fuse import fuse, fused_layers
from fewbits.errors import BadInput
from fewbits.host.record import part_of
from fewbits.models.plan.from_batches import BatchPlan
from fewbits.models.plan.memory_budget import budget_for
from tests.models.loading import save_tiny
from tests.models.tiny import tokens

TIGHT = 1e-5  # GiB: everything that can be is given up


def made(folder: Any, choice: Any, *, fused: bool = True) -> Any:
    if not (folder / "base").exists():
        save_tiny(folder / "base")
    model, _ = FastLanguageModel.from_pretrained(folder / "base", load_in_4bit=False)
    if fused:
        fuse(model)
    return FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=choice)


def step(model: Any, batch: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    model.zero_grad()
    ids = tokens(batch, length)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def keeps(model: Any) -> list[str]:
    return [str(layer.keep) for layer in fused_layers(model)]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_first_batch_that_trains_finds_a_plan(tmp_path):
    """And the numbers stay those of a model that keeps everything."""
    plain, model = made(tmp_path, False), made(tmp_path, TIGHT)
    plan = part_of(model, BatchPlan)
    with torch.no_grad():
        model(input_ids=tokens(2, 8))
    assert plan.budget is None
    expected, found = step(plain), step(model)
    assert plan.budget.num_tokens == 16 and not plan.budget.plan.fits
    assert keeps(model) == ["inputs"] * 2
    assert same(expected, found)
    roomy = made(tmp_path, 1.0)
    assert same(expected, step(roomy)) and "attention+mlp" in keeps(roomy)[0]


def test_a_larger_batch_makes_another_plan(tmp_path):
    model = made(tmp_path, 1.0)
    step(model)
    budget = part_of(model, BatchPlan).budget
    static = budget.plan.predicted.static.total
    budget.budget_bytes = static + budget.plan.predicted.dynamic
    before = keeps(model)
    step(model, 1, 4)
    assert keeps(model) == before and budget.num_tokens == 16
    step(model, 4, 32)
    assert budget.num_tokens == 128 and keeps(model) != before
    assert "a batch has 128 tokens; new plan" in budget.notes[-1]


class Meter:
    """A device on which the first step takes a million times what was predicted."""

    def allocated(self) -> int:
        return 0

    def peak(self) -> int:
        return 1 << 40

    def empty(self) -> None:
        pass


def test_the_first_step_corrects_the_plan_once_it_has_gone_back(tmp_path):
    model = made(tmp_path, 1.0)
    plan = part_of(model, BatchPlan)
    ids = tokens(2, 8)
    loss = model(input_ids=ids, labels=ids).loss
    plan.budget.meter = Meter()
    plan.budget.begin(16)
    model(input_ids=ids, labels=ids)
    assert len(plan.budget.notes) == 1, "no backward pass has been yet"
    loss.backward()
    assert len(plan.budget.notes) == 1
    before = keeps(model)
    step(model)
    assert "the first step took 1024.00 GiB" in plan.budget.notes[1] and keeps(model) != before
    step(model)
    assert len(plan.budget.notes) == 2


@pytest.mark.parametrize("fused", [True, False])
def test_memory_that_ends_on_the_way_forward_is_met_by_a_smaller_plan(tmp_path, fused):
    """The pass is repeated with its random numbers; gradients that were there stay."""
    model, again = made(tmp_path, 1.0, fused=fused), made(tmp_path, 1.0, fused=fused)
    failures = []

    def noisy(module: Any, args: Any, kwargs: Any) -> Any:
        return (args[0] * (1 + torch.rand(())), *args[1:]), kwargs

    def ends(module: Any, args: Any) -> None:
        plan = part_of(again, BatchPlan)
        if plan.budget is not None and len(failures) < 1:
            failures.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And so on.")

    for one in (model, again):
        one.get_base_model().model.layers[0].register_forward_pre_hook(noisy, with_kwargs=True)
    again.get_base_model().model.layers[1].register_forward_pre_hook(ends)
    found = []
    for one in (model, again):
        torch.manual_seed(5)
        first = step(one)
        ids = tokens(2, 8)
        one(input_ids=ids, labels=ids).loss.backward()
        second = {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None}
        found.append((first, second))
    assert failures and same(found[0][0], found[1][0]) and same(found[0][1], found[1][1])
    budget = part_of(again, BatchPlan).budget
    assert "ran out of memory (CUDA out of memory. Tried to allocate 2.00 GiB)" in budget.notes[-1]


def test_memory_that_never_suffices_is_raised(tmp_path):
    model = made(tmp_path, 1.0)

    def ends(module: Any, args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.get_base_model().model.layers[1].register_forward_pre_hook(ends)
    with pytest.raises(torch.OutOfMemoryError):
        step(model)
    assert keeps(model) == ["inputs"] * 2


def test_another_choice_and_a_plan_that_is_given_take_its_place(tmp_path):
    model = made(tmp_path, 1.0)
    step(model)
    FastLanguageModel.for_training(model, use_gradient_checkpointing=True)
    hooks = model.get_base_model()._forward_pre_hooks.values()
    assert part_of(model, BatchPlan) is None and not any("BatchPlan" in repr(hook) for hook in hooks)
    assert "forward" not in vars(model.get_base_model().model)
    FastLanguageModel.for_training(model, use_gradient_checkpointing=2)
    given = budget_for(model, TIGHT, recipe=None, lora=None, batch=(2, 8))
    step(model)
    assert part_of(model, BatchPlan).budget is None and keeps(model) == list(map(str, given.plan.keeps))
    with pytest.raises(BadInput, match="give True, False, 'unsloth', 'auto' or a number of GiB"):
        FastLanguageModel.for_training(model, use_gradient_checkpointing="fast")


@pytest.mark.parametrize("begins_fused", [True, False])
def test_layers_that_come_or_go_get_a_plan_of_their_own(tmp_path, begins_fused):
    """That of the layers before would give up values in layers that are not there any more."""
    model = made(tmp_path, TIGHT, fused=begins_fused)
    first = step(model)
    fuse(model) if not begins_fused else restore(model)
    again = step(model)
    plan = part_of(model, BatchPlan).budget.plan
    assert keeps(model) == ([] if begins_fused else ["inputs"] * 2)
    assert plan.checkpointing == begins_fused
    assert first.keys() == again.keys()
    for name, gradient in first.items():
        assert (again[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_copies_find_plans_of_their_own(tmp_path):
    model = made(tmp_path, 1.0)
    step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        plan = part_of(other, BatchPlan)
        assert plan is not part_of(model, BatchPlan) and plan.budget is None and plan.choice == 1.0
        assert same(step(model), step(other))
        assert plan.budget.target.model is other.get_base_model()


def test_trl_trains_under_a_plan_of_its_first_batch(tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    model = made(tmp_path, TIGHT)
    _, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base")
    config = trl.SFTConfig(
        output_dir=str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=2, max_length=16,
        report_to="none", use_cpu=True, bf16=False, save_strategy="no",
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": tokens(4, 16).tolist()})
    trainer = trl.SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    assert part_of(model, BatchPlan).budget.num_tokens == 32 and keeps(model) == ["inputs"] * 2
