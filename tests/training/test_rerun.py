"""Memory that runs out anywhere in a step changes the plan and nothing else."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fewbits.decoder.fuse import fuse, fusion_of
from fewbits.decoder.keep import KEEP_ACTIVATIONS, Keep
from fewbits.decoder.offload import HostStash
from fewbits.errors import TrainingStopped
from fewbits.models.plan.memory_budget import MemoryBudget, Target, budget_for
from fewbits.models.plan.memory_ends import first_sentence, is_out_of_memory
from fewbits.models.plan.memory_plan import planner
from fewbits.recipes import Recipe
from fewbits.training.data.collator import Collator
from fewbits.training.data.packing import SequenceDataset
from fewbits.training.step.graph import GraphedStep
from fewbits.training.step.trainer import Trainer
from tests.training.test_graph import CallingBackend
from tests.training.test_packing import TINY, make_examples
from tests.training.test_trainer import arguments, losses

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB.\nMore advice."
LENGTHS = [5, 9, 3, 12, 7, 4, 10, 6, 8, 11, 5, 7]


@dataclass
class Layer:
    keep: Keep = KEEP_ACTIVATIONS


def model_with_dropout():
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **TINY, attention_dropout=0.2)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def budget_of(model, *, num_layers=4, fused=True, can_offload=True):
    config = model.config.to_dict()
    layers = [Layer() for _ in range(num_layers)] if fused else []
    target = Target(model, layers, HostStash())

    def planner_for(num_tokens):
        options = {"is_fused": fused, "can_offload": can_offload, "capability": None}
        return planner(config, Recipe(name="plain"), num_tokens=num_tokens, **options)

    return MemoryBudget(target, planner_for, 3 * 12, 1 << 40)


def run(folder, model, *, memory=None, **options):
    trainer = Trainer(
        model=model,
        args=arguments(folder, **options),
        train_dataset=SequenceDataset(make_examples(LENGTHS)),
        data_collator=Collator(0),
        memory=memory,
    )
    trainer.train()
    return trainer


class Shortage:
    """Raises out-of-memory at chosen passes over the layers, forward or backward; each is counted."""

    def __init__(self, model, at: set[int]) -> None:
        self.at, self.count, self.raised = at, 0, 0
        for layer in model.model.layers:
            layer.register_forward_hook(self._forward)

    def _forward(self, module, inputs, output):
        self._point()
        if output.requires_grad:
            output.register_hook(lambda grad: self._point())

    def _point(self):
        self.count += 1
        if self.count in self.at:
            self.raised += 1
            raise torch.OutOfMemoryError(SAID)


@pytest.mark.parametrize("seed", range(3))
def test_weights_losses_and_counts_are_those_of_an_undisturbed_run(tmp_path, seed):
    plain = run(tmp_path / "plain", model_with_dropout())
    model = model_with_dropout()
    points = 4 * 2 * 2 * 4  # steps, batches, directions, layers
    shortage = Shortage(model, set(random.Random(seed).sample(range(1, points), 4)))
    memory = budget_of(model)
    first = memory.plan
    trainer = run(tmp_path / "short", model, memory=memory)
    assert shortage.raised == trainer._rerun.count == 4
    assert losses(trainer) == losses(plain)
    assert trainer.progress.tokens == plain.progress.tokens
    for (name, p), q in zip(model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert memory.plan.predicted.total < first.predicted.total
    assert [layer.keep for layer in memory.target.layers] == list(memory.plan.keeps)
    told = [note for note in memory.notes if "ran out of memory" in note]
    assert len(told) == 4 and all("Tried to allocate 2.00 GiB" in note for note in told)
    assert all("advice" not in note for note in told)


def test_a_model_that_is_not_fused_falls_back_to_whole_layers(tmp_path):
    plain = run(tmp_path / "plain", model_with_dropout())
    model = model_with_dropout()
    Shortage(model, {11})
    memory = budget_of(model, fused=False)
    run(tmp_path / "short", model, memory=memory)
    assert memory.plan.checkpointing and "not fused" in memory.notes[-1]
    assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    for (name, p), q in zip(model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_no_smaller_plan_is_one_sentence(tmp_path):
    model = model_with_dropout()
    Shortage(model, set(range(1, 10_000)))
    memory = budget_of(model)
    with pytest.raises(
        TrainingStopped, match=r"step 1 does not fit into memory .* take a smaller batch_size"
    ):
        run(tmp_path, model, memory=memory)
    assert all(p.grad is None for p in model.parameters())


def test_what_a_dead_step_put_on_the_host_is_gone(tmp_path):
    model = model_with_dropout()
    memory = budget_of(model)
    handles = []

    def put(module, inputs, output):
        handles.append(memory.target.stash.put(output))

    model.model.layers[0].register_forward_hook(put)
    Shortage(model, {7})
    run(tmp_path, model, memory=memory, max_steps=1)
    assert handles[0].taken and not handles[-1].taken


def test_other_errors_and_other_places_stay_what_they_are(tmp_path):
    model = model_with_dropout()

    def fail(module, inputs, output):
        raise RuntimeError("the sizes of tensors must match")

    model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="sizes of tensors"):
        run(tmp_path / "a", model, memory=budget_of(model))
    model = model_with_dropout()
    Shortage(model, {3})
    with pytest.raises(TrainingStopped, match=r"memory ran out after step 0 \(CUDA out of memory"):
        run(tmp_path / "b", model)


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert first_sentence(torch.OutOfMemoryError(SAID)) == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert first_sentence(torch.OutOfMemoryError("")) == "no message"


def test_a_graph_is_captured_again_under_the_smaller_plan(tmp_path, monkeypatch):
    """With a stand-in for CUDA's graphs, and a shortage once they replay."""
    backend = CallingBackend()
    made = functools.partial(GraphedStep, backend=backend)
    monkeypatch.setattr("fewbits.training.step.trainer.GraphedStep", made)
    options = {"max_steps": 12, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    models = [model_with_dropout() for _ in range(2)]
    examples = SequenceDataset(make_examples([8] * 12))
    trainers = []
    for i, model in enumerate(models):
        memory = budget_of(model, can_offload=False)
        trainer = Trainer(
            model=model,
            args=arguments(tmp_path / str(i), **options),
            train_dataset=examples,
            data_collator=Collator(0),
            memory=memory,
            cuda_graph=i == 1,
        )
        if i == 1:
            Shortage(model, {8 * 6 + 3})
        trainer.train()
        trainers.append(trainer)
    graphed = trainers[1].graphed
    assert backend.captures == 2 and graphed.replays == 12 - 2 * 2 and trainers[1]._rerun.count == 1
    assert losses(trainers[1]) == losses(trainers[0])
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)


def test_fused_layers_under_ever_smaller_plans(tmp_path):
    """The real layers: every plan down to inputs on the host gives the same bits."""

    def fused():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", **TINY), attn_implementation="sdpa"
        )
        fuse(model)
        return model

    plain = run(tmp_path / "plain", fused())
    model = fused()
    memory = budget_for(model, 1.0, recipe=None, lora=None, batch=(3, 12))
    assert memory.plan.keeps == (KEEP_ACTIVATIONS,) * 4
    Shortage(model, {3, 14, 60, 90})
    trainer = run(tmp_path / "short", model, memory=memory)
    assert trainer._rerun.count == 4 and memory.plan.offloads
    assert not fusion_of(model).fallbacks and len(fusion_of(model).stash) == 0
    assert losses(trainer) == losses(plain)
    for (name, p), q in zip(model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p, q), name
