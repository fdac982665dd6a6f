"""`fewbits bench train`: the definition is the model's, the check finds what is wrong, the command runs."""

from __future__ import annotations

import csv
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fewbits.bench.run import main
from fewbits.bench.train import builders, parity, results, schedule
from fewbits.bench.train.builders import Job
from fewbits.bench.train.command import without_options
from fewbits.bench.train.configurations import CONFIGURATIONS, choose, configuration
from fewbits.bench.train.kernels import summed, table_of_kernels
from fewbits.bench.train.longest import Line, bisect, find, line_through
from fewbits.bench.train.reference import Decoder, rope_of, token_losses
from fewbits.bench.train.schedule import Outcome, Task, waves
from fewbits.bench.train.shapes import SHAPES, Shape, batch_of, batches, flops_per_token, shape_of
from fewbits.decoder.loss import float8_head_of
from fewbits.errors import BadInput, Unsupported
from fewbits.host.unwrap import unwrap

TINY = shape_of("tiny")
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL_SHAPES = {
    "llama": Shape(name="small", fields={**SHAPES["tiny"], **SMALL, "vocab_size": 128}),
    "qwen3": Shape(
        name="small",
        fields={**SHAPES["qwen3-0.6b"], **SMALL, "vocab_size": 128, "head_dim": 32, "num_hidden_layers": 2},
    ),
}


@pytest.mark.parametrize("family", SMALL_SHAPES)
def test_the_definition_is_the_models(family: str) -> None:
    config = SMALL_SHAPES[family].config()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    ids = torch.randint(0, 128, (2, 17))
    model(input_ids=ids, labels=ids).loss.backward()
    decoder = parity._decoder(model, {})
    losses, gradients = parity._run(decoder, ids, None)
    assert losses.mean().item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-5)
    assert set(gradients) == {n.removeprefix("model.") for n, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name.removeprefix("model.")], p.grad, rtol=2e-4, atol=1e-6)


def built(name: str, family: str = "llama") -> tuple[Job, builders.Built]:
    job = Job(
        configuration=configuration(name),
        shape=SMALL_SHAPES[family],
        batch=(2, 24),
        device="cpu",
        checkpoint="",
    )
    return job, builders.build(job)


def check(job: Job, model, step=None):
    def forward_backward(ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    ids = batches(job.shape.config().vocab_size, job.batch, 1, torch.device("cpu"))[0]
    return parity.check(model, ids, step or forward_backward, rounding=job.configuration.rounding, layers=1)


@pytest.mark.parametrize("name", ["ours:nf4", "ours:full-bf16", "hf:bf16", "bnb:nf4"])
def test_right_models_pass_and_stay_as_they_were(name: str) -> None:
    job, made = built(name, "qwen3")
    before = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    found = check(job, made.model)
    assert found.failures == () and found.layers == 1 and 0 < found.gradient_error < found.gradient_tolerance
    for n, p in made.model.named_parameters():
        assert torch.equal(p, before[n]) and p.grad is None
    assert len(unwrap(made.model).model.layers) == made.model.config.num_hidden_layers == 2


def test_scales_of_earlier_steps_are_checked_on_a_later_step() -> None:
    job, made = built("ours:nf4-fp8")
    passed: list[int] = []

    def step(ids):
        passed.append(int(ids[0, 0]))
        return wrong_loss(made.model, ids) - 0.05

    data = batches(128, (2, 24), 3, torch.device("cpu"))
    found = parity.check(made.model, data[0], step, rounding=job.configuration.rounding, history=data[1:])
    assert job.configuration.delayed and found.failures == ()
    assert passed == [int(ids[0, 0]) for ids in (*data[1:], data[0])]


@pytest.mark.parametrize("name", ["ours:nf4-fp8-head", "ours:full-fp8-head"])
def test_a_head_in_fp8_is_checked_by_its_own_arithmetic(name: str) -> None:
    """What the decoder alone may be off by is less; a scale twice what it must be does not pass."""
    job, made = built(name)
    right = check(job, made.model)
    assert right.failures == () and "head too" in job.configuration.format
    ids = batches(128, (2, 24), 1, torch.device("cpu"))[0]
    plain = parity.check(
        made.model, ids, lambda ids: wrong_loss(made.model, ids) - 0.05, rounding="fp8_row", layers=1
    )
    assert plain.loss_tolerance < right.loss_tolerance
    head = float8_head_of(made.model)
    made_right = head.operands
    head.operands = lambda: made_right()._replace(scale=made_right().scale * 2)
    assert check(job, made.model).failures


def wrong_loss(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach() + 0.05


def no_gradient(model, ids):
    loss = wrong_loss(model, ids) - 0.05
    next(p for n, p in model.named_parameters() if "v_proj.lora_A" in n).grad = None
    return loss


def scaled_gradient(model, ids):
    loss = wrong_loss(model, ids) - 0.05
    next(p for n, p in model.named_parameters() if "gate_proj.lora_B" in n).grad *= 1.1
    return loss


def nan_gradient(model, ids):
    loss = wrong_loss(model, ids) - 0.05
    next(p for n, p in model.named_parameters() if "q_proj.lora_B" in n).grad[0, 0] = math.nan
    return loss


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        (wrong_loss, "loss"),
        (no_gradient, "v_proj.lora_A"),
        (scaled_gradient, "gate_proj"),
        (nan_gradient, "q_proj"),
    ],
)
def test_a_wrong_step_fails(fault, word: str) -> None:
    job, made = built("hf:bf16")
    found = check(job, made.model, lambda ids: fault(made.model, ids))
    assert found.failures and word in found.failures[0]


def test_fp8_may_be_off_by_more_than_bf16_and_not_by_anything() -> None:
    model = built("hf:bf16")[1].model
    ids = batches(128, (2, 24), 1, torch.device("cpu"))[0]

    def step(ids):
        return wrong_loss(model, ids) - 0.05

    bf16 = parity.check(model, ids, step, rounding="bf16")
    tolerances = [
        parity.check(model, ids, step, rounding=r).gradient_tolerance for r in ("fp8_row", "fp8_tensor")
    ]
    assert bf16.gradient_tolerance < min(tolerances) and max(tolerances) < 1


def test_rope_without_a_definition_is_refused() -> None:
    config = SMALL_SHAPES["llama"].config()
    config.model_type = "gemma2"
    with pytest.raises(Unsupported, match="gemma2"):
        rope_of(config, torch.device("cpu"))


def test_padding_gets_no_gradient() -> None:
    config = SMALL_SHAPES["llama"].config()
    model = AutoModelForCausalLM.from_config(config)
    decoder = parity._decoder(model, {})
    assert isinstance(decoder, Decoder)
    ids = torch.tensor([[5, 3, 7]])
    token_losses(decoder, ids).sum().backward()
    gradient = decoder.tensors["embed_tokens.weight"].grad
    assert gradient[5].any() and not gradient[3].any()


def test_names() -> None:
    assert [c.name for c in choose("ours:nf4@24,ours:nf4", "none", on_cpu=False)] == [
        "ours:nf4@24",
        "ours:nf4",
    ]
    assert configuration("ours:nf4@24").budget == 24 and configuration("ours:nf4@offload").budget == "offload"
    assert {c.side for c in choose(None, "all", on_cpu=True)} == {"ours", "hf", "bnb"}
    assert not any(c.trains_all for c in choose(None, "all", on_cpu=False))
    for wrong in ("ours:nf5", "bnb:nf4@24", "ours:nf4@much"):
        with pytest.raises(BadInput):
            configuration(wrong)
    with pytest.raises(BadInput, match="jax"):
        choose(None, "jax", on_cpu=True)
    for wrong in ("4", "4x", "0x8", "ax8"):
        with pytest.raises(BadInput):
            batch_of(wrong)
    assert all(c.side in (*builders._BUILDERS,) for c in CONFIGURATIONS.values())


def test_shape_from_a_config_json(tmp_path: Path) -> None:
    path = tmp_path / "mine" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**SHAPES["tiny"], "architectures": ["LlamaForCausalLM"], "dtype": "float16"}))
    shape = shape_of(str(path))
    assert shape.name == "mine" and shape.config().hidden_size == 128 and "dtype" not in shape.fields
    with pytest.raises(BadInput, match="no shape"):
        shape_of("llama-9")


def test_flops_of_the_8b_shape() -> None:
    config = shape_of("llama-3.1-8b").config()
    assert flops_per_token(config, 2048, full=False) == pytest.approx(
        4 * 7.50e9 + 3.5 * 32 * 2 * 2048 * 4096, rel=0.01
    )
    assert flops_per_token(config, 1, full=True) == pytest.approx(6 * 7.50e9, rel=0.01)


def test_everyone_sees_the_same_tokens() -> None:
    one, two = (batches(512, (2, 8), 3, torch.device("cpu")) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not any(torch.equal(a, b) for a, b in pairwise(one))


def task(name: str, gib: float = 1.0) -> Task:
    return Task(configuration=configuration(name), shape=TINY, batch=(2, 64), peak_gib=gib, facts={})


def test_waves_keep_to_memory_and_order() -> None:
    tasks = [task("ours:nf4", g) for g in (30, 30, 60, 90, 200)]
    assert list(waves(tasks, 8, 100)) == [[0, 1], [2], [3], [4]]
    assert list(waves(tasks, 1, 100)) == [[0], [1], [2], [3], [4]]
    assert list(waves([], 1, 100)) == []


@pytest.mark.parametrize("limit", [1, 7, 30, 64, 100])
def test_bisect_finds_the_longest(limit: int) -> None:
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= limit * 4

    assert bisect(fits, 30 * 4, 4, most=40) == limit * 4
    assert len(tried) == len(set(tried))


def test_bisect_where_nothing_fits() -> None:
    assert bisect(lambda tokens: False, 64, 8, most=40) == 0


def test_line() -> None:
    line = line_through([(1, 5.0), (2, 8.0), (3, 9.0)])
    assert line(1) == 5 and line(3) == 9 and line(5) == 13


class FakeTrial:
    """32 layers of 100 bytes a token, 9 a token beside them, and 1000 bytes of weights."""

    layers = 32

    def cut(self) -> None:
        self.layers = 1

    def peak(self, tokens: int, layers: int | str) -> int:
        assert layers == ("all" if self.layers == 32 else 1)
        return 1000 + (9 + 100 * self.layers) * tokens

    def fits(self, tokens: int, rest: Line) -> bool:
        return self.peak(tokens, 1) + rest(tokens) <= 1_000_000


def test_the_longest_sequence_counts_the_layers_that_are_cut() -> None:
    found = find(FakeTrial(), 4, 1_000_000)
    assert found["tokens"] == (1_000_000 - 1000) // 3209 // 4 * 4 and found["bytes_per_token"] == 3209


def outcome(name: str, ms: float | None, *, failures: tuple[str, ...] = (), gib: float = 4.0) -> Outcome:
    made = Outcome(task(name))
    made.said["parity"] = {
        "failures": list(failures),
        "loss_error": 1e-3,
        "gradient_error": 0.01,
        "gradient_tolerance": 0.02,
    }
    if ms is not None:
        made.said["timed"] = {
            "times_ms": [ms, ms + 1, ms + 2],
            "tokens_per_second": 1e3 / ms,
            "peak_gib": gib,
            "model_tflops": 1,
            "losses": [6.2],
            "packages": {"torch": "1"},
        }
    return made


def test_rows_and_failures(tmp_path: Path) -> None:
    wrong = outcome("hf:bf16", 5, failures=("its loss is 1 and exact is 2",))
    dead = Outcome(task("bnb:nf4"), error="RuntimeError: no")
    outcomes = [outcome("ours:nf4", 9), outcome("unsloth:nf4", 19, gib=8), wrong, dead]
    rows = results.rows_of(outcomes)
    assert {row.variant for row in rows} == {"ours:nf4", "unsloth:nf4"}
    times = {row.variant: row for row in rows if row.metric == "time"}
    assert times["ours:nf4"].value == 10 and times["unsloth:nf4"].ratio == 2.0
    assert "FAILS THE PARITY CHECK" in str(results.failure(wrong)) and results.failure(dead) == dead.error
    assert results.failure(outcomes[0]) is None
    full = results.rows_of(
        [outcome("ours:nf4", 9), outcome("hf:full-bf16", 19), outcome("ours:full-bf16", 39)]
    )
    assert [row.ratio for row in full if row.metric == "time"] == [1.0, 0.5, 1.0]
    results.plot(outcomes, tmp_path / "train.svg")
    assert (
        "unsloth:nf4" in (tmp_path / "train.svg").read_text()
        and "hf:bf16" not in (tmp_path / "train.svg").read_text()
    )


def test_kernels_are_added_up_by_what_they_do(tmp_path: Path) -> None:
    kernels = [
        ("nvjet_sm90_tst_256x128", 3.0, 2.0),
        ("_gated_bwd_kernel", 1.0, 1.0),
        ("nvjet_other", 1.0, 0.5),
    ]
    kernels += [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 1.0, 4.0),
        ("_cross_entropy_kernel", 1.0, 1.5),
    ]
    found = summed(kernels)
    assert found["total_ms"] == 9 and found["top"][0][2] == 4.0
    assert found["kinds"] == {"attention": 4.0, "products": 2.5, "head and loss": 1.5, "activation": 1.0}
    one = outcome("ours:nf4", 9)
    assert table_of_kernels([one]) is None
    one.said["kernels"] = found
    assert table_of_kernels([one, outcome("bnb:nf4", 10)]).row_count == 12


def test_command_without_places() -> None:
    argv = ["--shape", "tiny", "--out", "x", "--record=y", "--peers", "hf"]
    assert without_options(argv, ("--record", "--out")) == ["--shape", "tiny", "--peers", "hf"]


@pytest.mark.slow  # three processes that import everything
def test_command_runs_on_a_cpu(tmp_path: Path, capfd) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out"
    code = main(
        ["train", "--shape", "tiny", "--device", "cpu", "--batch", "2x16", "--configs", "ours:nf4",
         "--peers", "bnb", "--steps", "2", "--warm-up", "1", "--layers", "1", "--together", "2",
         "--profile", "--out", str(out),
         "--record", str(rows), "--commit", "abc"]
    )  # fmt: skip
    printed = capfd.readouterr().out
    assert code == 0, printed
    written = list(csv.DictReader(rows.open(newline="")))
    assert {row["variant"] for row in written} == {"ours:nf4", "bnb:nf4"}
    assert (
        written[0]["op"] == "train_tiny"
        and written[0]["part"] == "step 2x16"
        and "peft" in written[0]["packages"]
    )
    assert "--record" not in written[0]["command"] and (out / "train.svg").is_file()
    table = " ".join((out / "table.txt").read_text().split())  # a narrow table breaks its title
    assert "tokens/s" in table and "milliseconds a step, by what the kernels do" in table
    for line in map(json.loads, (out / "results.jsonl").read_text().splitlines()):
        kernels = line["said"]["kernels"]
        assert kernels["total_ms"] == pytest.approx(sum(kernels["kinds"].values()), abs=0.1)
        assert any("mm" in name and launches > 0 for name, launches, _ in kernels["top"])


@pytest.mark.slow  # a process that imports everything
def test_a_process_that_dies_says_why(tmp_path: Path) -> None:
    broken = Shape(name="broken", fields={"model_type": "llama", "hidden_size": 0})
    facts = {
        "device": "cpu",
        "checkpoint": "",
        "warm_up": 1,
        "steps": 1,
        "layers": 1,
        "lengths": None,
        "profiled": False,
    }
    dying = Task(configuration=configuration("hf:bf16"), shape=broken, batch=(1, 8), peak_gib=1, facts=facts)
    (found,) = schedule.run(
        [dying], tmp_path, together=1, memory_gib=10, limits=(60, 60), heard=lambda outcome, line: None
    )
    assert found.error is not None and "exit code 1" in found.error and results.failure(found) == found.error


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("what", ["train", "kernels"])
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_without_a_gpu_one_sentence_says_so(what: str, device: str) -> None:
    with pytest.raises(Unsupported, match="no GPU is here" if device == "auto" else "0 CUDA devices"):
        main([what, "--device", device])


def test_unknown_words_are_refused() -> None:
    for argv in (["--shape", "huge"], ["--batch", "4"], ["--also", "tiny 2x2"], ["--steps", "0"]):
        with pytest.raises(BadInput):
            main(["train", "--device", "cpu", *argv])
