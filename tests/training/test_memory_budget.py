"""A plan meets a model: put in place, corrected by a measured step, the same for all layers on request."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fewbits.decoder.fuse import fuse
from fewbits.decoder.keep import KEEP_ACTIVATIONS, Keep
from fewbits.errors import BadInput
from fewbits.models.plan.memory_budget import MemoryBudget, Target, auto_budget, budget_for
from fewbits.models.plan.memory_plan import GIB, planner
from fewbits.recipes import qlora_nf4
from tests.training.test_memory_plan import LLAMA_8B
from tests.training.test_packing import TINY


@dataclass
class Layer:
    keep: Keep = KEEP_ACTIVATIONS


class FakeMeter:
    """A device on which a step takes ``factor`` times what was predicted."""

    def __init__(self, dynamic: int) -> None:
        self.dynamic, self.resets, self.emptied = dynamic, 0, 0

    def allocated(self) -> int:
        self.resets += 1
        return 1000

    def peak(self) -> int:
        return 1000 + self.dynamic

    def empty(self) -> None:
        self.emptied += 1


def planner_for(num_tokens: int):
    return planner(LLAMA_8B, qlora_nf4(), num_tokens=num_tokens, sequence_length=2048)


def made(budget_gib: float, factor: float = 1.0, tokens: int = 8192) -> MemoryBudget:
    target = Target(nn.Linear(2, 2), [Layer() for _ in range(32)])
    budget = MemoryBudget(target, planner_for, 8192, int(budget_gib * GIB))
    expected = planner_for(tokens).price_of(budget.plan).predicted.dynamic
    budget.meter = FakeMeter(int(factor * expected))
    return budget


def test_the_first_plan_is_in_place() -> None:
    budget = made(24)
    assert [layer.keep for layer in budget.target.layers] == list(budget.plan.keeps)
    assert budget.notes == [f"memory: {budget.plan}"]
    assert "no plan is expected to fit" in made(7).notes[1]


@pytest.mark.parametrize("tokens", [2048, 8192])
@pytest.mark.parametrize(("factor", "word"), [(1.0, "stays"), (1.2, "new plan"), (0.7, "new plan")])
def test_the_first_step_corrects_the_plan(factor: float, word: str, tokens: int) -> None:
    """Also if its batch was smaller than those to come."""
    budget = made(20, factor, tokens)
    before = budget.plan
    budget.begin(tokens // 2)
    budget.begin(tokens)
    budget.end_step()
    assert word in budget.notes[-1] and len(budget.notes) == 2
    if factor > 1:
        assert budget.plan.seconds > before.seconds and budget.plan.fits
    if factor < 1:
        assert budget.plan.seconds < before.seconds
    budget.begin(tokens)
    budget.end_step()
    assert len(budget.notes) == 2 and budget.meter.resets == 1, "once is enough"


@pytest.mark.parametrize(("factor", "word"), [(1.0, "stays"), (0.7, "new plan")])
def test_gathered_layers_are_weights_and_not_what_a_step_takes(factor: float, word: str) -> None:
    budget = made(20, factor)
    budget.gathered = 6 * GIB
    budget.meter.dynamic += 6 * GIB
    budget.begin(8192)
    budget.end_step()
    assert word in budget.notes[-1]


def test_steps_down_from_what_was_measured() -> None:
    budget = made(24)
    assert budget.step_down("Tried to allocate 1 GiB", 5)
    assert "step 5 ran out of memory (Tried to allocate 1 GiB)" in budget.notes[-1]
    while budget.step_down("again", 6):
        pass
    assert budget.plan.offloads
    budget.target.model.weight.grad = torch.ones(2, 2)
    budget.release()
    assert budget.target.model.weight.grad is None and budget.meter.emptied == 1


def test_auto_leaves_a_margin() -> None:
    assert 100 * GIB < auto_budget(139 * GIB) < 139 * GIB
    assert auto_budget(8 * GIB) <= 7.5 * GIB


def tiny(**options):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY, **options))


def checkpointed(model) -> bool:
    return any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


def test_on_a_cpu_only_numbers_are_planned() -> None:
    model = tiny()
    options = {"recipe": None, "lora": None, "batch": (2, 16)}
    assert budget_for(model, "auto", **options) is None
    assert budget_for(model, "recompute", **options) is None and checkpointed(model)
    assert budget_for(model, "keep", **options) is None and not checkpointed(model)
    roomy = budget_for(model, 1.0, **options)
    assert roomy is not None and roomy.plan.fits and not checkpointed(model)
    tight = budget_for(model, 1e-6, **options)
    assert tight is not None and not tight.plan.fits and checkpointed(model)


def test_a_model_of_unknown_shapes_is_refused_for_a_number() -> None:
    model = tiny()
    del model.config.intermediate_size
    with pytest.raises(BadInput, match="intermediate_size"):
        budget_for(model, 1.0, recipe=None, lora=None, batch=(2, 16))


def test_fused_layers_that_run_unfused_are_planned_as_such() -> None:
    model = tiny(attention_dropout=0.1)
    fuse(model)
    budget = budget_for(model, 1.0, recipe=None, lora=None, batch=(2, 16))
    assert budget.plan.keeps
    budget.meter = FakeMeter(1 << 20)
    budget.begin(32)
    ids = torch.randint(0, 96, (2, 16))
    with pytest.warns(UserWarning, match="dropout"):
        model(input_ids=ids, labels=ids).loss.backward()
    budget.end_step()
    assert not budget.plan.keeps and "run unfused (the configuration asks for dropout)" in budget.notes[-1]
    assert not budget.plan.checkpointing
    assert budget.step_down("again", 2) and checkpointed(model)
