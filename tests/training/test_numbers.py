"""Bad numbers stop a run one step late, and yet never reach a weight."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fewbits.errors import TrainingStopped
from fewbits.training.step.bad_numbers import NumberCheck, can_skip
from tests.training.test_trainer import make_examples, make_trainer, tiny

OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "plain": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
}


def one_step(model, optimizer, check, step, spoil=None):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 3)).square().mean()
    loss.backward()
    if spoil == "gradient":
        model[1].weight.grad[0, 0] = float("inf")
    if spoil == "zero":
        for p in model.parameters():
            p.grad.zero_()
    loss = loss.detach() * (float("nan") if spoil == "loss" else 1)
    check.see([(loss, [[step]])], step, optimizer)
    optimizer.step()


@pytest.mark.parametrize("spoil", ["gradient", "loss", "zero"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_bad_reaches_a_weight(name, spoil):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = OPTIMIZERS[name](model.parameters())
    check = NumberCheck(model)
    for step in (1, 2):
        one_step(model, optimizer, check, step)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(TrainingStopped, match=r"at step 3 on rows 3|zero at step 3") as caught:
        one_step(model, optimizer, check, 3, spoil)
        assert can_skip(optimizer), "without the flag the stop comes before the update"
        check.settle()
    if spoil == "gradient":
        assert "1.weight is not finite" in str(caught.value)
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key]), key
    for key, entry in optimizer.state_dict()["state"].items():
        for part, value in entry.items():
            assert torch.equal(value, state["state"][key][part]), part


def test_the_step_after_is_told_first():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer, check = OPTIMIZERS["fused"](model.parameters()), NumberCheck(model)
    one_step(model, optimizer, check, 1, "gradient")
    with pytest.raises(TrainingStopped, match="at step 1"):
        one_step(model, optimizer, check, 2)
    check.settle()


@pytest.mark.parametrize(("spoiled", "logging"), [(4, 100), (3, 100), (3, 1)])
def test_a_run_stops_with_the_weights_of_the_last_good_step(tmp_path, spoiled, logging):
    """With a log line only at the end; the stop may be the last thing that the run does."""
    examples = make_examples([5, 6, 7, 8, 9, 10, 4, 5, 6, 7, 8, 9])
    options = {
        "optim": "adamw_torch_fused",
        "logging_steps": logging,
        "logging_first_step": False,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 1,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": 1,
    }
    good = make_trainer(tmp_path / "good", examples, tiny(), **options, max_steps=spoiled - 1)
    good.train()
    model = tiny()
    calls = []

    def spoil(grad):
        calls.append(0)
        return grad * float("nan") if len(calls) == spoiled else grad

    model.model.layers[1].mlp.down_proj.weight.register_hook(spoil)
    trainer = make_trainer(tmp_path / "bad", examples, model, **options, max_steps=4)
    with pytest.raises(TrainingStopped, match=rf"down_proj\.weight is not finite at step {spoiled} on rows"):
        trainer.train()
    for p, q in zip(model.parameters(), good.model.parameters(), strict=True):
        assert torch.equal(p, q)
    kept = sorted(p.name for p in (tmp_path / "bad").iterdir() if p.name.startswith("checkpoint"))
    assert kept == [f"checkpoint-{i}" for i in range(max(1, spoiled - 2), spoiled)]


@pytest.mark.parametrize(
    ("first", "step", "loss", "cause"),
    [
        (None, 1, 2.0, "check that the trained layers are part"),
        (
            None,
            7,
            9.0,
            r"either the training had diverged before the checkpoint .* \(the loss is 9\): .*; or ",
        ),
        (
            2.0,
            7,
            9.5,
            r"probably diverged, for the loss has risen from 2 at step 1 to 9.5: lower the learning",
        ),
        (2.0, 7, 0.5, r"has fallen from 2 at step 1 to 0.5, so nothing may be left to learn"),
    ],
)
def test_why_gradients_vanish(first, step, loss, cause):
    model = nn.Linear(3, 2)
    check = NumberCheck(model)

    def see(value: float, scale: float, step: int) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, scale)
        check.see([(torch.tensor(value), [[step]])], step)

    if first is not None:
        see(first, 1.0, 1)
    with pytest.raises(TrainingStopped, match=f"all gradients are zero at step {step} .*{cause}"):
        see(loss, 0.0, step)
