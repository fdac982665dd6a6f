"""The Trainer against the plain one of transformers, and its stops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from fewbits.decoder.fuse import fuse
from fewbits.errors import TrainingStopped
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.recipes import LoRA
from fewbits.training.data.collator import Collator
from fewbits.training.data.packing import SequenceDataset, pack
from fewbits.training.step.trainer import Trainer
from tests.training.test_packing import FAMILIES, TINY, make_examples


def tiny(family="llama"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY, **FAMILIES[family]))


def arguments(folder, **options):
    options = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "use_cpu": True,
        **options,
    }
    return TrainingArguments(output_dir=str(folder), **options)


def make_trainer(folder, examples, model=None, *, packed=None, **options):
    return Trainer(
        model=model or tiny(),
        args=arguments(folder, **options),
        train_dataset=SequenceDataset(examples, packed),
        eval_dataset=SequenceDataset(examples, packed),
        data_collator=Collator(0, packed=packed is not None),
    )


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_same_losses_and_weights_as_the_plain_trainer(tmp_path, family):
    examples = make_examples([5, 9, 3, 12, 7, 4, 10, 6, 8, 11, 5, 7, 3, 9, 4, 6, 8, 10, 12, 5, 5, 6, 7, 8])
    ours = make_trainer(tmp_path / "a", examples, tiny(family))
    ours.train()

    def collate(features):
        width = max(len(f["input_ids"]) for f in features)
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {
            key: torch.tensor([list(f[key]) + [value] * (width - len(f[key])) for f in features])
            for key, value in fill.items()
        }

    rows = [
        {
            "input_ids": e.input_ids.tolist(),
            "labels": [
                int(i) if t and n else -100
                for n, (i, t) in enumerate(zip(e.input_ids, e.trained, strict=True))
            ],
            "attention_mask": [1] * len(e),
        }
        for e in examples
    ]
    plain = transformers.Trainer(
        model=tiny(family),
        args=arguments(tmp_path / "b", train_sampling_strategy="sequential"),
        train_dataset=[rows[i] for i in ours.order.order(0)],
        data_collator=collate,
    )
    plain.train()
    torch.testing.assert_close(losses(ours), losses(plain), rtol=1e-5, atol=0)
    for (name, p), q in zip(ours.model.named_parameters(), plain.model.parameters(), strict=True):
        # Adam divides by the gradient's own size: where that is near zero, a rounding moves a whole step.
        assert (p - q).norm() <= 1e-3 * q.norm(), name
    assert ours.state.total_flos == plain.state.total_flos > 0
    norms = [[e["grad_norm"] for e in t.state.log_history if "grad_norm" in e] for t in (ours, plain)]
    torch.testing.assert_close(*norms, rtol=1e-4, atol=0)


def test_accumulated_and_packed_steps_equal_one_large_batch(tmp_path):
    examples = make_examples([5, 9, 3, 12, 7, 4])
    options = {
        "max_steps": 1,
        "optim": "sgd",
        "learning_rate": 1.0,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
    }
    bins = pack([len(e) for e in examples], 16)
    runs = {
        "whole": make_trainer(
            tmp_path / "a", examples, per_device_train_batch_size=6, gradient_accumulation_steps=1, **options
        ),
        "parts": make_trainer(
            tmp_path / "b", examples, per_device_train_batch_size=2, gradient_accumulation_steps=3, **options
        ),
        "packed": make_trainer(
            tmp_path / "c",
            examples,
            packed=bins,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=len(bins),
            **options,
        ),
    }
    for run in runs.values():
        run.train()
    want = runs["whole"]
    for run in runs.values():
        torch.testing.assert_close(losses(run), losses(want), rtol=1e-6, atol=0)
        assert run.progress.tokens == sum(map(len, examples))
        for p, q in zip(run.model.parameters(), want.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_evaluation_counts_tokens_not_batches(tmp_path):
    examples = make_examples([12, 3, 4, 11, 2, 9, 5])
    bins = pack([len(e) for e in examples], 16)
    means = [
        make_trainer(tmp_path / str(size), examples, per_device_eval_batch_size=size).evaluate()["eval_loss"]
        for size in (1, 2, 7)
    ]
    means.append(make_trainer(tmp_path / "p", examples, packed=bins).evaluate()["eval_loss"])
    assert max(means) - min(means) < 1e-6


def test_only_matrices_decay(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TINY, **FAMILIES["qwen2"]))
    trainer = make_trainer(tmp_path, make_examples([4, 5]), model)
    decay = set(trainer.get_decay_parameter_names(model))
    for name, _ in model.named_parameters():
        assert (name in decay) == ("norm" not in name and not name.endswith("bias")), name


def trained(folder, model, **options):
    trainer = make_trainer(
        folder, make_examples([5, 6, 7, 8, 9, 10]), model, save_strategy="steps", **options
    )
    trainer.train()
    return trainer


def test_a_loss_that_is_not_a_number_stops_the_run_and_names_the_rows(tmp_path):
    model = tiny()

    def poison(module, arguments, output):
        return output * float("nan") if (arguments[0] == 17).any() else output

    model.model.embed_tokens.register_forward_hook(poison)
    examples = make_examples([5, 6, 7, 8, 9, 10])
    for e in examples:
        e.input_ids[e.input_ids == 17] = 18
    examples[4].input_ids[2] = 17
    trainer = make_trainer(
        tmp_path,
        examples,
        model,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_steps=6,
        save_strategy="steps",
        save_steps=1,
    )
    step = trainer._get_train_sampler().order(0).index(4) + 1
    with pytest.raises(
        TrainingStopped, match=rf"loss became nan at step {step} on rows 5 of the training data"
    ):
        trainer.train()
    found = {p.name for p in tmp_path.iterdir()}
    assert found == {f"checkpoint-{i}" for i in range(max(1, step - 2), step)}
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_gradient_that_is_not_finite_names_its_parameter(tmp_path):
    model = tiny()
    model.model.layers[2].mlp.up_proj.weight.register_hook(lambda grad: grad / 0)
    with pytest.raises(
        TrainingStopped, match=r"gradient of model\.layers\.2\.mlp\.up_proj\.weight is not finite at step 1"
    ):
        trained(tmp_path, model)


def test_gradients_that_are_all_zero_stop_the_run(tmp_path):
    model = tiny()
    for p in model.parameters():
        p.register_hook(torch.zeros_like)
    with pytest.raises(TrainingStopped, match="all gradients are zero at step 1"):
        trained(tmp_path, model)


def test_the_first_bad_weight_is_named(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("inf")
    with pytest.raises(
        TrainingStopped, match=r"model\.layers\.1\.mlp\.up_proj\.weight already holds a number"
    ):
        trained(tmp_path, model)


def test_a_step_reads_no_number_of_the_device(tmp_path, monkeypatch):
    """On a GPU each reading is a wait. Those named below read what is on the host, there too."""
    read = ("item", "tolist", "numpy", "nonzero", "cpu", "__bool__", "__float__", "__int__", "__index__")
    on_the_host = {"packing.py": "lengths of rows", "bad_numbers.py": "copies of the step before"}
    cpu_only = {"rows_and_labels.py": "checks of labels, which a GPU is not asked for"}
    places = set()

    def noted(name):
        original = getattr(torch.Tensor, name)

        def reading(self, *args, **kwargs):
            places.add(Path(sys._getframe(1).f_code.co_filename).name)
            return original(self, *args, **kwargs)

        return reading

    model = get_peft_model(tiny(), LoRA(r=2), seed=1)
    fuse(model)
    options = {"logging_steps": 100, "logging_nan_inf_filter": False, "max_steps": 3}
    trainer = make_trainer(tmp_path, make_examples([5, 9, 3, 12, 7, 4] * 3), model, **options)
    steps = []

    class Middle(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:  # the first step prepares, after the last the host sums up
                for name in read:
                    monkeypatch.setattr(torch.Tensor, name, noted(name))

        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)
            monkeypatch.undo()

    trainer.add_callback(Middle())
    trainer.train()
    assert steps == [1, 2, 3] and places <= on_the_host.keys() | cpu_only.keys()
