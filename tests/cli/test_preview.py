"""`fewbits preview`: what is coloured is what the loss counts."""

from __future__ import annotations

import json
import re

import pytest

from tests.training.conftest import make_tiny_folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    make_tiny_folder(tmp_path / "m")
    monkeypatch.chdir(tmp_path)

    def write(rows, **settings):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines = {"model": "m", "train_data": "rows.jsonl", "output_dir": "out", **settings}
        (tmp_path / "c.yaml").write_text("".join(f"{k}: {v}\n" for k, v in lines.items()))
        return "c.yaml"

    return write


def test_the_trained_part_is_marked(run, folder, tmp_path):
    rows = [{"prompt": f"say ä{'x' * i}: ", "completion": f"<b>ü{i}"} for i in range(6)]
    shown = run("preview", folder(rows), "--rows", "2", "--html", "p/page.html")
    assert shown.code == 0, shown.err
    assert "say ä:[[ <b>ü0<|im_end|>]]" in shown.out  # the space goes to the response, as tokenizers do
    assert "row 2:" in shown.out and "row 3:" not in shown.out
    html = (tmp_path / "p/page.html").read_text()
    assert '<span class="trained"> &lt;b&gt;ü0&lt;|im_end|&gt;</span>' in html
    assert "http" not in html.replace("http-equiv", "")
    lengths = [len(f"say ä{'x' * i}: <b>ü{i}".encode()) + 1 for i in range(6)]
    assert f"longest row     {max(lengths)} tokens" in shown.out
    counts = [int(n) for n in re.findall(r" to [\d,]+ +#* (\d+)", shown.out)]
    assert sum(counts) == 6
    assert not (tmp_path / "out").exists()


def test_packing_is_recommended_where_it_helps(run, folder):
    rows = [{"text": "a" * n} for n in [5] * 20 + [100]]
    shown = run("preview", folder(rows))
    assert "packing: true would fill" in shown.out
    assert "packing: true would fill" not in run("preview", folder(rows), "packing=true").out


def test_chats_are_written_with_the_template(run, folder):
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]}]
    shown = run("preview", folder(rows))
    assert "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[[answer<|im_end|>]]" in shown.out


def test_pairs_show_both_answers(run, folder):
    pytest.importorskip("trl")
    rows = [{"prompt": "q", "chosen": "good", "rejected": "bad"}] * 3
    shown = run("preview", folder(rows, method="dpo", chat_template="tokenizer"), "--rows", "1")
    assert shown.code == 0, shown.err
    assert "row 1 chosen:" in shown.out and "row 1 rejected:" in shown.out and "row 2" not in shown.out
    assert "assistant\n[[good<|im_end|>\n]]" in shown.out


@pytest.mark.parametrize(
    ("settings", "row", "message"),
    [
        ({}, {"prompt": "a", "completion": " "}, "no token to train on"),
        ({}, {"body": "a"}, "name your columns with fields"),
        ({"max_seq_length": 4096}, {"text": "a"}, "is 32 times the 128 positions"),
        ({"model": "nowhere"}, {"text": "a"}, "no tokenizer that can be loaded"),
        ({"method": "dpo"}, {"text": "a"}, "dpo needs prompt, chosen, rejected"),
    ],
)
def test_what_would_stop_the_run(run, folder, settings, row, message):
    shown = run("preview", folder([row], **settings))
    sentence = shown.err.splitlines()[-1]  # before it: what made the model
    assert shown.code != 0 and message in sentence and sentence.startswith("error: ")


def files(path):
    return sorted(str(p) for p in path.rglob("*"))


@pytest.mark.parametrize("packing", [False, True])
def test_a_dry_run_writes_nothing_and_predicts(run, folder, tmp_path, packing):
    rows = [{"prompt": "a", "completion": f"b{i}"} for i in range(40)]
    config = folder(rows, device="cpu", packing=packing, epochs=2)
    before = files(tmp_path)
    shown = run("train", config, "--dry-run")
    assert shown.code == 0, shown.err
    assert files(tmp_path) == before
    assert re.search(r"memory: [\d.]+ [KM]iB predicted", shown.out) and "no time is predicted" in shown.out
    steps, tokens = re.match(r"([\d,]+) steps?, ([\d,]+) tokens", shown.out).groups()
    assert run("train", config).code == 0
    facts = json.loads((tmp_path / "out/run.json").read_text())
    assert facts["steps"] == int(steps) and facts["tokens"] == int(tokens.replace(",", ""))
    shown = run("train", config, "output_dir=other", "--dry-run", "--basis", "out")
    assert "time: about" in shown.out and "tokens/s of out" in shown.out
    shown = run("train", config, "--dry-run")
    assert shown.code != 0 and "holds another run" in shown.err  # as the run itself would say


def test_a_dry_run_of_a_preference_method(run, folder, tmp_path):
    pytest.importorskip("trl")
    rows = [{"prompt": "q", "chosen": "good", "rejected": "bad"}] * 8
    shown = run("train", folder(rows, method="dpo", device="cpu", batch_size=4), "--dry-run")
    assert shown.code == 0, shown.err
    assert shown.out.startswith("2 steps\n") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report_to=wandb"], "report_to is wandb, which is not installed"),
        (["recipe=nf5"], "nf5"),
        (["lora_targets=q_porj"], "q_porj"),
        (["--basis", "none"], "there is no run folder none"),
        (["batch_size=4", "method=dpo"], "dpo needs prompt, chosen, rejected"),
        (["method=grpo", "rewards=my_rewards:none"], "which cannot be imported"),
    ],
)
def test_a_dry_run_finds_what_would_stop_the_run(run, folder, words, message):
    rows = [{"prompt": "a", "completion": "b"}] * 40
    shown = run("train", folder(rows, device="cpu"), "--dry-run", *words)
    sentence = shown.err.splitlines()[-1]
    assert shown.code != 0 and message in sentence and sentence.startswith("error: "), shown.err


def test_basis_alone_is_wrong_usage(run, folder):
    assert run("train", folder([{"text": "a"}]), "--basis", "x").code == 2
