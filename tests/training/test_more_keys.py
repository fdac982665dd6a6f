"""Optimizers, learning rates and trained parts by one key each, beside the libraries that they come from."""

from __future__ import annotations

import copy
import json
from importlib.util import find_spec

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM

from fewbits import FastLanguageModel
from fewbits.errors import BadInput, Unsupported
from fewbits.models.adapting.learning_rates import set_embeddings_apart, set_lora_plus
from fewbits.training.optimizer import MuonAdamW
from fewbits.training.run import train
from fewbits.training.step.optimized import OptimizedTrainer
from tests.models.unwritten import unwritten
from tests.training.conftest import make_tiny_folder, write_tiny_data
from tests.training.test_lora_variants import config_of


@pytest.fixture
def folder(tmp_path):
    make_tiny_folder(tmp_path / "m")
    write_tiny_data(tmp_path / "rows.jsonl")
    return tmp_path


def trained(folder, **keys):
    """The adapter's tensors after a run."""
    from safetensors.torch import load_file

    return load_file(train(config_of(folder, **keys)).final / "adapter_model.safetensors")


def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest():
    """State, groups and schedules are those of one optimizer; a copy of its state goes on the same."""

    def parameters():
        generator = torch.Generator().manual_seed(0)
        return [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in ((8, 5), (7,), (3, 9))]

    ours, theirs, third = parameters(), parameters(), parameters()
    both = MuonAdamW(ours, lr=0.01, weight_decay=0.1)
    apart = [
        torch.optim.Muon([theirs[0], theirs[2]], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([theirs[1]], lr=0.01, weight_decay=0.1),
    ]

    def step(params, optimizers, number):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + i))
        for optimizer in optimizers:
            optimizer.step()

    for number in range(3):
        step(ours, [both], number)
        step(theirs, apart, number)
    assert all(map(torch.equal, ours, theirs))
    resumed = MuonAdamW(third, lr=0.5)
    resumed.load_state_dict(copy.deepcopy(both.state_dict()))
    for a, b in zip(third, ours, strict=True):
        a.data.copy_(b.data)
    step(third, [resumed], 3)
    step(ours, [both], 3)
    assert all(map(torch.equal, third, ours))


def test_lora_plus_sorts_as_peft_does(folder):
    model, _ = FastLanguageModel.from_pretrained(folder / "m", dtype=torch.float32)
    model = FastLanguageModel.get_peft_model(model, r=4, bias="all")
    ours = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    set_lora_plus(ours, model, 16.0)
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0)

    def rates(optimizer):
        return {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}

    assert rates(ours) == rates(theirs) and set(rates(ours).values()) == {1e-3, 16e-3}
    model.requires_grad_(False)
    with pytest.raises(BadInput, match="there are no adapters"):
        set_lora_plus(ours, model, 2.0)


def test_each_key_trains_something_else_and_is_reproduced(folder):
    """One step and another: what a key changes is changed, and a second run has the same bits."""
    plain = trained(folder)
    for keys in ({"optimizer": "muon", "lora_plus_ratio": 8}, {"neftune_alpha": 5}):
        found = trained(folder, output_dir=str(folder / next(iter(keys))), **keys)
        assert found.keys() == plain.keys() and any(not torch.equal(t, plain[n]) for n, t in found.items()), (
            keys
        )
    again = trained(folder, output_dir=str(folder / "again"), neftune_alpha=5)
    assert all(torch.equal(t, again[n]) for n, t in found.items())


@pytest.mark.filterwarnings("ignore")
def test_embeddings_have_their_own_rate_and_tokens_their_own_rows(folder):
    keys = {"lora_targets": "q_proj,embed_tokens", "embedding_learning_rate": 1e-9}
    slow = trained(folder, output_dir=str(folder / "slow"), **keys)
    fast = trained(folder, output_dir=str(folder / "fast"), **keys | {"embedding_learning_rate": 0.1})
    name = next(n for n in slow if "lora_embedding_A" in n)
    assert slow[name].abs().max() < 1e-7 < 1e-2 < fast[name].abs().max()
    chosen = set(range(4, 60, 2))
    keys = {"trainable_tokens": ",".join(map(str, chosen)), "merge": True, "learning_rate": 0.1}
    result = train(config_of(folder, output_dir=str(folder / "rows"), **keys))
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).get_input_embeddings().weight
        for path in (folder / "m", result.merged)
    )
    moved = (before - after).abs().amax(1) > 2e-3  # beyond the rounding to 16 bits
    assert set(moved.nonzero().flatten().tolist()) <= chosen and moved.any()
    with pytest.raises(BadInput, match="neither embeddings nor head train"):
        trained(folder, output_dir=str(folder / "none"), embedding_learning_rate=1e-4)


def test_from_the_error_of_packing(folder):
    """The adapter of a run opens in PEFT over the dequantised base as it was merged."""
    from safetensors.torch import load_file

    keys = {"load_in_4bit": True, "lora_init": "loftq", "merge": True, "learning_rate": 1e-9}
    result = train(config_of(folder, **keys))
    weights = load_file(result.final / "adapter_model.safetensors")
    assert any(t.any() for n, t in weights.items() if "lora_B" in n)
    model, _ = FastLanguageModel.from_pretrained(result.final, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(result.merged, dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            merged.eval()(ids).logits, model.eval()(input_ids=ids).logits, atol=2e-2, rtol=2e-2
        )


@pytest.mark.parametrize(
    ("optimizer", "package"),
    [
        pytest.param("adamw_4bit", "torchao", marks=pytest.mark.nightly),  # it compiles its step: two minutes
        ("paged_adamw", "bitsandbytes"),
        pytest.param("paged_adamw_8bit", "bitsandbytes", marks=pytest.mark.slow),
        ("schedule_free", "schedulefree"),
    ],
)
def test_optimizers_of_others_run_or_say_what_they_need(folder, optimizer, package):
    keys = {"optimizer": optimizer, "scheduler": "constant", "save_steps": 1}
    if find_spec(package) is None:
        with pytest.raises(Unsupported, match=f"pip install {package}"):
            trained(folder, **keys)
        return
    whole = trained(folder, **keys)
    assert any(tensor.any() for name, tensor in whole.items() if "lora_B" in name)


def theirs(name):
    """The class of an optimizer in the library that it comes from."""
    if name == "schedule_free":
        from schedulefree import AdamWScheduleFree

        return AdamWScheduleFree
    if name == "adamw_4bit":
        from torchao.optim import AdamW4bit

        return AdamW4bit
    import bitsandbytes

    return {
        "paged_adamw": bitsandbytes.optim.PagedAdamW32bit,
        "paged_adamw_8bit": bitsandbytes.optim.PagedAdamW8bit,
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("paged_adamw", "bitsandbytes"),
        ("paged_adamw_8bit", "bitsandbytes"),
        ("adamw_4bit", "torchao"),
        ("schedule_free", "schedulefree"),
    ],
)
def test_the_steps_are_those_of_the_library(folder, name, package, monkeypatch):
    """A run's gradients, given to the library's own optimizer with the settings that the keys name."""
    pytest.importorskip(package)
    monkeypatch.setattr("torch.compile", lambda function, **options: function)  # torchao's step: minutes
    create, steps = OptimizedTrainer.create_optimizer, []

    def watched(trainer, *args):
        optimizer = create(trainer, *args)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        steps.append((optimizer, [p.detach().clone() for p in params], []))

        def before(optimizer, args, kwargs):
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            steps[-1][2].append(([None if p.grad is None else p.grad.clone() for p in params], rates))

        optimizer.register_step_pre_hook(before)
        return optimizer

    monkeypatch.setattr(OptimizedTrainer, "create_optimizer", watched)
    keys = {"optimizer": name, "scheduler": "constant_with_warmup", "warmup": 2, "weight_decay": 0.1}
    trained(folder, **keys, max_steps=4, learning_rate=1e-2, lora_r=64, eval_fraction=0.0)
    optimizer, first, taken_steps = steps[0]
    assert len(steps) == 1 and len(taken_steps) == 4
    results = [p for group in optimizer.param_groups for p in group["params"]]
    params = [torch.nn.Parameter(tensor.clone()) for tensor in first]
    members, groups = iter(params), []
    for group in optimizer.param_groups:
        groups.append(
            {"params": [next(members) for _ in group["params"]], "weight_decay": group["weight_decay"]}
        )
    settings = {"schedule_free": {"warmup_steps": 2}, "adamw_4bit": {"block_size": 256}}.get(name, {})
    if name == "schedule_free":
        optimizer.train()  # its end puts the average in place, which the steps do not see
    own = theirs(name)(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, **settings)
    getattr(own, "train", lambda: None)()
    for grads, rates in taken_steps:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for group, rate in zip(own.param_groups, rates, strict=True):
            group["lr"] = torch.tensor(rate) if name == "adamw_4bit" else rate
        own.step()
    assert {group["weight_decay"] for group in optimizer.param_groups if group["params"]} == {0.1}
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(results, first, strict=True))
    for a, b in zip(results, params, strict=True):
        # putting the average in place and taking it out again rounds
        close = {"rtol": 1e-5, "atol": 1e-7} if name == "schedule_free" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(a.detach(), b.detach(), **close)


@pytest.mark.skipif(find_spec("schedulefree") is None, reason="needs schedulefree")
def test_schedule_free_ends_with_its_average_and_resumes(folder):
    """What is saved is what the optimizer is judged by, and a run that goes on from it has the same bits."""
    keys = {"optimizer": "schedule_free", "scheduler": "constant", "save_steps": 2}
    whole = trained(folder, max_steps=4, **keys)
    trained(folder, output_dir=str(folder / "half"), max_steps=2, **keys)
    resumed = trained(folder, output_dir=str(folder / "half"), max_steps=4, resume=True, **keys)
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-4, atol=1e-6)


def test_what_a_run_refuses(folder):
    with pytest.raises(BadInput, match="set scheduler to constant"):
        config_of(folder, optimizer="schedule_free")
    wrong = {"lora_plus_ratio": 0, "neftune_alpha": -1, "trainable_tokens": "a", "lora_module_alphas": "x=0"}
    for name, value in wrong.items():
        with pytest.raises(BadInput, match=name):
            config_of(folder, **{name: value})
    assert config_of(folder, loraplus_lr_ratio=4).lora_plus_ratio == 4.0
    assert config_of(folder, **{"lora_module_alphas.q_proj": "32"}).lora_module_alphas == {"q_proj": 32}


@pytest.mark.slow
def test_rows_of_twice_the_length_that_the_model_was_made_for(folder):
    rows = [{"prompt": "ab" * 70, "completion": "cd" * 30} for _ in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = train(config_of(folder, max_seq_length=256, max_steps=2))
    run = json.loads((result.final.parent / "run.json").read_text())
    assert "positions are stretched by 2 (rope scaling, linear) to 256" in run["receipt"]
    assert run["data"]["max_seq_length"] == 256 and run["data"]["train"]["truncated"] == 0
    model, _ = FastLanguageModel.from_pretrained(result.final, load_in_4bit=False, device_map="cpu")
    assert model.config.max_position_embeddings == 256
    assert model.config.rope_parameters["rope_type"] == "linear"


@pytest.mark.parametrize("model_type", ["falcon", "gpt2", "opt"])
def test_embeddings_are_those_that_the_model_names(model_type):
    """Falcon calls its table word_embeddings: no list of names has them all."""
    model = unwritten(model_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    set_embeddings_apart(optimizer, model, 1e-5)
    (apart,) = [group["params"] for group in optimizer.param_groups if group["lr"] == 1e-5]
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    assert {id(p) for p in apart} == {id(p) for p in ends}
