"""`fewbits compare` and `fewbits eval` on rows and tasks."""

from __future__ import annotations

import io
import json
import math
import sys
from types import ModuleType

import pytest
import torch

from tests.models.loading import save_tiny
from tests.training.conftest import make_tiny_folder, write_tiny_data

TEXT = "the quick brown fox jumps over the lazy dog. " * 6


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "a")
    save_tiny(folder / "b", seed=1)
    (folder / "text.txt").write_text(TEXT)
    return folder


def test_figures_are_those_of_their_definitions(run, models):
    shown = run(
        "compare", models / "a", models / "b", "--text", models / "text.txt", "--window", "32", "--json"
    )
    assert shown.code == 0, shown.err
    a, b = json.loads(shown.out)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "a")
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    p_model, q_model = (AutoModelForCausalLM.from_pretrained(models / n, dtype=torch.float32) for n in "ab")
    divergence, same, nll, count = 0.0, 0, 0.0, 0
    for at in range(0, len(ids), 31):
        window = torch.tensor([[tokenizer.bos_token_id, *ids[at : at + 31]]])
        with torch.no_grad():
            p, q = (m(window).logits[0, :-1].double().log_softmax(-1) for m in (p_model, q_model))
        divergence += float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum"))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        nll -= float(q.gather(1, window[0, 1:, None]).sum())
        count += window.shape[1] - 1
    assert a["kl"] is None and b["tokens"] == count
    assert b["kl"] == pytest.approx(divergence / count, rel=1e-4)
    assert b["top1"] == pytest.approx(same / count)
    assert b["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-4)
    assert b["num_bytes"] >= 4 * sum(p.numel() for p in q_model.parameters())


def test_a_model_is_nearer_to_itself_packed(run, models, tmp_path):
    plot = tmp_path / "plot.svg"
    a = str(models / "a")
    shown = run(
        "compare", a, f"{a}@int8", f"{a}@qlora_nf4", models / "b", a, "--text", models / "text.txt", "--json",
        "--plot", plot,
    )  # fmt: skip
    assert shown.code == 0, shown.err
    first, int8, nf4, other, again = json.loads(shown.out)
    assert again["kl"] == 0 and again["top1"] == 1
    assert 0 < int8["kl"] < nf4["kl"] < other["kl"]
    assert nf4["num_bytes"] < int8["num_bytes"] < first["num_bytes"]
    assert "<svg" in plot.read_text()
    assert "reference" in run("compare", a, a, "--text", models / "text.txt").out


def test_other_vocabularies_have_no_divergence(run, models, tmp_path):
    make_tiny_folder(tmp_path / "bytes")
    shown = run("compare", models / "a", tmp_path / "bytes", "--text", models / "text.txt", "--json")
    assert shown.code == 0, shown.err
    assert json.loads(shown.out)[1]["kl"] is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{a}", "--text", "{t}"], "only one model is given"),
        (["{a}", "{a}", "--text", "{t}", "--plot", "x.pdf"], "written as .svg or .png"),
        (["{a}", "{a}@qlora", "--text", "{t}"], "qlora"),
        (["{a}", "nowhere", "--text", "{t}"], "nowhere"),
        (["{a}", "{a}", "--text", "{t}", "--batch-size", "0"], "must be at least 1"),
        (["{a}", "{a}", "--text", "{t}", "--max-tokens", "-3"], "max_tokens is -3; it must be at least 1"),
    ],
)
def test_bad_comparisons(run, models, argv, message):
    places = {"a": models / "a", "t": models / "text.txt"}
    shown = run("compare", *(word.format(**places) for word in argv))
    assert shown.code != 0 and message in shown.err and "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--answers", "3"], "--answers goes with --rows"),
        (["--show"], "--show goes with --rows"),
        (["--limit", "3"], "--limit goes with --tasks"),
    ],
)
def test_a_flag_of_another_measurement_is_refused(run, models, flags, message):
    shown = run("eval", "--model", models / "a", "--text", models / "text.txt", *flags)
    assert shown.code == 2 and message in shown.err


def test_the_same_text_however_it_was_written(run, models, tmp_path, monkeypatch):
    """A byte order mark was a token in front of the text: another perplexity, without a word."""
    text = "\n".join(TEXT.split(". "))
    told = []
    for number, data in enumerate(
        (text.encode(), b"\xef\xbb\xbf" + text.encode(), text.replace("\n", "\r\n").encode())
    ):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(data)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        for name in (path, "-"):
            shown = run("eval", "--model", models / "a", "--text", name, "--json")
            told.append({k: v for k, v in json.loads(shown.out).items() if k not in ("text", "seconds")})
    assert told == [told[0]] * 6
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    shown = run("eval", "--model", models / "a", "--text", "-")
    assert shown.code == 1 and "standard input is not UTF-8 text (byte 3)" in shown.err


@pytest.mark.slow
def test_rows_are_written_as_the_run_wrote_them(run, tmp_path, monkeypatch):
    make_tiny_folder(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    rows = [{"instruction": f"say {i}", "output": "ab"} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "model=m",
        "train_data=rows.jsonl",
        "output_dir=run",
        "device=cpu",
        "lora_r=0",
        "load_in_4bit=false",
    ]
    flags += [
        "prompt_template=question",
        "epochs=24",
        "learning_rate=0.01",
        "eval_fraction=0.25",
        "keep_best=false",
    ]
    assert run("train", *flags).code == 0
    shown = run("eval", "--model", "run", "--rows", "rows.jsonl", "--answers", "5", "--json")
    assert shown.code == 0, shown.err
    found = json.loads(shown.out)
    assert found["rows"] == 24 and found["answered"] == 5
    assert found["answers"][0]["prompt"].startswith("Question: say")  # the run's template, not Alpaca's
    assert found["exact_match"] == sum(a["answer"] == "ab" for a in found["answers"]) / 5
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    last = [line["eval_loss"] for line in metrics if "eval_loss" in line][-1]
    assert found["loss"] == pytest.approx(last, abs=0.2)
    assert found["loss"] < 1
    shown = run("eval", "--model", "run", "--rows", "rows.jsonl", "--answers", "1", "--show")
    assert "expected  ab" in shown.out


def test_the_loss_of_rows_is_that_of_transformers(run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tiny_folder(tmp_path / "m")
    write_tiny_data(tmp_path / "rows.jsonl")
    shown = run(
        "eval", "--model", tmp_path / "m", "--rows", tmp_path / "rows.jsonl", "--json", "--batch-size", "3"
    )
    found = json.loads(shown.out)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "m"),
        AutoTokenizer.from_pretrained(tmp_path / "m"),
    )
    total, count = 0.0, 0
    for line in (tmp_path / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"].rstrip())["input_ids"]
        ids = torch.tensor(
            [[*prompt, *tokenizer(" " + row["completion"])["input_ids"], tokenizer.eos_token_id]]
        )
        labels = ids.clone()
        labels[0, : len(prompt)] = -100
        with torch.no_grad():
            trained = ids.shape[1] - len(prompt)
            total += float(model(ids, labels=labels).loss) * trained
        count += trained
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(total / count, rel=1e-4)


def test_tasks_go_to_lm_eval(run, models, monkeypatch):
    """A stand-in has the names of lm-eval 0.4.13 that are used, with the arguments that they get."""
    seen = {}

    class HFLM:
        def __init__(self, pretrained, tokenizer, batch_size):
            seen["model"] = pretrained

    class TaskManager:
        all_tasks = ("easy",)

        def __init__(self, include_path):
            seen["manager"] = self

    def simple_evaluate(model, tasks, limit, task_manager):
        assert task_manager is seen["manager"]
        seen["call"] = tasks, limit
        return {"results": {"easy": {"acc,none": 0.5, "alias": "easy"}}}

    parts = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": HFLM},
        "lm_eval.tasks": {"TaskManager": TaskManager},
    }
    for name, names in parts.items():
        module = ModuleType(name)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, module)
    flags = ["eval", "--model", models / "a", "--recipe", "int8", "--limit", "3", "--json", "--tasks"]
    shown = run(*flags, "easy")
    assert json.loads(shown.out)["tasks"] == {"easy": {"acc,none": 0.5}}
    assert seen["call"] == (["easy"], 3) and type(seen["model"]).__name__ == "LlamaForCausalLM"
    assert "lm-eval has no task hard" in run(*flags, "hard").err


def test_without_lm_eval(run, models, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    shown = run("eval", "--model", models / "a", "--tasks", "easy")
    assert shown.code != 0 and "pip install 'fewbits[eval]'" in shown.err
