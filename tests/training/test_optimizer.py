"""AdamW8bit: beside torch's AdamW and bitsandbytes' AdamW8bit, and as an optimizer among others."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.training.optimizer import AdamW8bit, MuonAdamW
from tests.formats.make_golden import FOLDER, adamw_change


def trained(make, steps: int = 60, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[float]]:
    """A small network that learns a fixed function."""
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(dtype)
    x = torch.randn(256, 64, generator=generator)
    y = torch.sin(x @ torch.randn(64, 64, generator=generator) / 4)
    optimizer, losses = make(model.parameters()), []
    for _ in range(steps):
        loss = (model(x.to(dtype)).float() - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def test_learns_as_torchs_adamw_does() -> None:
    _, theirs = trained(lambda ps: torch.optim.AdamW(ps, lr=3e-3))
    _, ours = trained(lambda ps: AdamW8bit(ps, lr=3e-3))
    assert ours[-1] < 0.5 * ours[0]
    assert abs(ours[-1] - theirs[-1]) < 0.03 * theirs[-1]


def test_small_tensors_are_exactly_torchs() -> None:
    theirs, _ = trained(lambda ps: torch.optim.AdamW(ps, lr=3e-3), steps=5)
    ours, _ = trained(lambda ps: AdamW8bit(ps, lr=3e-3, min_8bit_size=2**20), steps=5)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_stochastic_rounding_learns_where_bfloat16_stands_still() -> None:
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    still = nn.Parameter(weight.detach().clone())
    moving = AdamW8bit([weight], lr=1e-4, weight_decay=0.0, stochastic_rounding=True)
    nearest = AdamW8bit([still], lr=1e-4, weight_decay=0.0)
    for _ in range(20):
        weight.grad, still.grad = torch.ones_like(weight), torch.ones_like(still)
        moving.step()
        nearest.step()
    assert still.eq(1).all()
    assert abs(weight.float().mean().item() - (1 - 20e-4)) < 3e-4


def test_state_is_eight_bits_and_comes_back_whole() -> None:
    model = nn.Linear(128, 64, dtype=torch.bfloat16)
    optimizer = AdamW8bit(model.parameters(), lr=1e-2, stochastic_rounding=True, seed=5)

    def step(model: nn.Module, optimizer: AdamW8bit, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()

    for seed in range(3):
        step(model, optimizer, seed)
    state = optimizer.state[model.weight]
    assert state["m"].dtype == state["v"].dtype == torch.uint8 and state["m_scales"].shape == (32,)
    assert optimizer.state[model.bias]["m"].dtype == torch.float32
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twin = copy.deepcopy(model)
    other = AdamW8bit(twin.parameters(), lr=1e-2, stochastic_rounding=True, seed=5)
    other.load_state_dict(torch.load(file, weights_only=True))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        for name, value in optimizer.state[p].items():
            loaded = other.state[q][name]
            assert not isinstance(value, Tensor) or (
                torch.equal(value, loaded) and value.dtype == loaded.dtype
            )
    for seed in range(3, 5):
        step(model, optimizer, seed)
        step(twin, other, seed)
    assert torch.equal(model.weight, twin.weight) and torch.equal(model.bias, twin.bias)


@pytest.mark.parametrize("kind", [AdamW8bit, MuonAdamW])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("steps", [0, 2])
def test_copies_and_pickles_go_on_alike(kind, way, steps: int) -> None:
    """Of what is not in torch's own optimizers a copy had nothing, and its next step failed."""
    settings = {"stochastic_rounding": True, "seed": 5} if kind is AdamW8bit else {"momentum": 0.8}
    model = nn.Linear(128, 64, dtype=torch.bfloat16)
    pair = model, kind(model.parameters(), lr=1e-2, **settings)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)
        optimizer.step()

    for seed in range(steps):
        step(*pair, seed)
    twin = way(pair)
    for seed in range(2, 4):
        step(*pair, seed)
        step(*twin, seed)
    assert torch.equal(pair[0].weight, twin[0].weight) and torch.equal(pair[0].bias, twin[0].bias)


def test_groups_schedules_and_closures() -> None:
    a, b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    optimizer = AdamW8bit([{"params": [a], "weight_decay": 0.5}, {"params": [b], "lr": 0.0}], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)

    def closure() -> Tensor:
        loss = (a * 0 + b).sum()
        optimizer.zero_grad()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 8.0
    schedule.step()
    torch.testing.assert_close(a.detach(), torch.full((8,), 1 - 0.1 * 0.5))
    assert b.eq(1).all() and optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    c = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [c]})
    optimizer.step()
    assert c not in optimizer.state and c.eq(1).all()


def test_a_bad_step_of_a_gradient_scaler_changes_nothing() -> None:
    weight = nn.Parameter(torch.ones(80, 80))
    optimizer = AdamW8bit([weight], lr=0.1)
    weight.grad = torch.full_like(weight, torch.inf)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert weight.eq(1).all() and optimizer.state[weight]["m_scales"].eq(0).all()
    del optimizer.found_inf
    weight.grad = torch.full_like(weight, 8.0)
    optimizer.grad_scale = torch.tensor(8.0)
    optimizer.step()
    assert optimizer.state[weight]["m_scales"][0].item() == pytest.approx(0.1)


def test_refusals() -> None:
    with pytest.raises(BadInput, match="out of range"):
        AdamW8bit([nn.Parameter(torch.ones(3))], lr=-1.0)
    weight = nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.ones(3, 4).to_sparse()
    with pytest.raises(Unsupported, match="dense floating-point"):
        AdamW8bit([weight]).step()


each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def distance(found: Tensor, need: Tensor) -> float:
    return float((found - need).norm() / need.norm())


@each_device
def test_close_to_what_bitsandbytes_gave(device: str) -> None:
    """The same maps and blocks; theirs decays after the update and gives tiny values of m their sign."""
    golden = load_file(FOLDER / "bitsandbytes_adamw.safetensors")
    assert distance(adamw_change(AdamW8bit, device), golden["change"]) < 0.01  # measured on a CPU: 0.0012


@each_device
def test_close_to_live_bitsandbytes(device: str) -> None:
    peers_own = pytest.importorskip("bitsandbytes.optim").AdamW8bit
    live, exact = (adamw_change(kind, device) for kind in (peers_own, torch.optim.AdamW))
    if distance(live, exact) > 0.03:
        pytest.skip(
            f"bitsandbytes' AdamW8bit is {distance(live, exact):.3f} off AdamW itself on this machine"
        )
    assert distance(adamw_change(AdamW8bit, device), live) < 0.01


@pytest.mark.gpu
def test_cuda_equals_the_definition_on_a_cpu() -> None:
    start, made = torch.randn(256, 300).bfloat16(), []
    for device in ("cpu", "cuda"):
        weight = nn.Parameter(start.to(device, copy=True))
        optimizer = AdamW8bit([weight], lr=1e-2, stochastic_rounding=True, seed=9)
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            weight.grad = torch.randn(256, 300, generator=generator).bfloat16().to(device)
            optimizer.step()
        made.append(weight.detach().cpu())
    assert torch.equal(*made)


def test_a_run_with_it_resumes_to_the_same_bits(tiny_folder, tiny_data, tmp_path) -> None:
    from fewbits.training.config import TrainConfig
    from fewbits.training.run import train

    def run(name: str, **options) -> Tensor:
        config = TrainConfig(
            model=str(tiny_folder), train_data=str(tiny_data), output_dir=str(tmp_path / name), device="cpu",
            load_in_4bit=False, lora_r=0, optimizer="adamw_8bit", learning_rate=5e-3, report=False, samples=0,
            batch_size=4, save_steps=3, keep_checkpoints=9, epochs=1.0, **options,
        )  # fmt: skip
        train(config, resume=bool((tmp_path / name).exists()))
        return load_file(tmp_path / name / "final" / "model.safetensors")["model.embed_tokens.weight"]

    whole = run("whole")
    newest = max((tmp_path / "whole" / "checkpoints").iterdir(), key=lambda p: int(p.name.rpartition("-")[2]))
    state = torch.load(newest / "optimizer.pt", weights_only=True)["state"]
    assert {s["m"].dtype for s in state.values()} == {torch.uint8, torch.float32}
    for folder in (tmp_path / "whole" / "final", *(tmp_path / "whole" / "checkpoints").iterdir()):
        if folder.name != "checkpoint-3":
            shutil.rmtree(folder)
    record = tmp_path / "whole" / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "status": "running"}))
    assert torch.equal(run("whole"), whole)


@pytest.mark.gpu
def test_cuda_captured_steps_equal_others() -> None:
    """A graph of one step, replayed under a falling learning rate, with a step that is skipped."""
    torch.manual_seed(0)
    start, gradients = torch.randn(64, 300).bfloat16(), torch.randn(6, 64, 300).bfloat16().cuda()
    rates = [1e-2, 8e-3, 6e-3, 4e-3, 2e-3, 1e-3]
    eager = nn.Parameter(start.cuda())
    optimizer = AdamW8bit([eager], stochastic_rounding=True, seed=3)
    for grad, rate in zip(gradients, rates, strict=True):
        eager.grad, optimizer.param_groups[0]["lr"] = grad.clone(), rate
        optimizer.step()
    captured = nn.Parameter(start.cuda())
    lr, found_inf = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
    other = AdamW8bit([captured], stochastic_rounding=True, seed=3, capturable=True)
    other.param_groups[0]["lr"], other.found_inf = lr, found_inf
    captured.grad = gradients[0].clone()
    lr.fill_(rates[0])
    other.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.step()
    for i, rate in list(enumerate(rates))[1:]:
        captured.grad.copy_(gradients[i])
        lr.fill_(rate)
        found_inf.fill_(1.0)
        graph.replay()
        found_inf.fill_(0.0)
        graph.replay()
    torch.testing.assert_close(captured, eager, rtol=2.0**-7, atol=0)
    assert (captured != eager).float().mean() < 1e-3  # a float32 learning rate: a last bit may differ
    state = other.state_dict()["state"][0]
    assert float(state["step"]) == 6.0
