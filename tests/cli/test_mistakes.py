"""Fifty mistakes that people make: each ends with one sentence that tells the way out.

Exit code 2: the command line itself is wrong; 1: what it names is. Never a traceback, never a run folder.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tests.training.conftest import byte_tokenizer, make_tiny_folder

PROMPTS = [{"prompt": "a", "completion": "b"}] * 4
CHATS = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}] * 4
TRAIN = ["train", "c.yaml"]

# what people type, and words of the sentence that they get
MISTAKES = {
    "a misspelt key": ([*TRAIN, "learnin_rate=1e-4"], 1, "did you mean learning_rate?"),
    "a misspelt flag": ([*TRAIN, "--learnin-rate", "1"], 2, "unrecognized arguments: --learnin-rate"),
    "a flag of others": ([*TRAIN, "--lora-rank", "8"], 2, "arguments: --lora-rank 8 (here --lora-r); see"),
    "a misspelt command": (["trian", "c.yaml"], 2, "invalid choice: 'trian'"),
    "a misspelt recipe": ([*TRAIN, "recipe=qlora_nf5"], 1, "qlora_nf4"),
    "a misspelt method": ([*TRAIN, "method=dop"], 1, "method is 'dop'; it must be one of sft, dpo"),
    "a misspelt target": ([*TRAIN, "lora_targets=q_porj"], 1, "q_porj"),
    "a misspelt template": ([*TRAIN, "chat_template=chatlm"], 1, "chatlm"),
    "a word for a number": ([*TRAIN, "batch_size=big"], 1, "batch_size is 'big'; it must be a whole number"),
    "a batch of nothing": ([*TRAIN, "batch_size=0"], 1, "batch_size is 0; it must be greater than 0"),
    "a share above one": ([*TRAIN, "eval_fraction=1.5"], 1, "eval_fraction is 1.5; it must be below 1"),
    "no such configuration": (["train", "d.yaml"], 1, "there is no configuration file d.yaml"),
    "data for a configuration": (["train", "rows.jsonl"], 1, "rows.jsonl"),
    "YAML that is none": (["train", "broken.yaml"], 1, "broken.yaml"),
    "no such data": ([*TRAIN, "train_data=rosw.jsonl"], 1, "there is no data file rosw.jsonl"),
    "data of an unknown kind": ([*TRAIN, "train_data=rows.xlsx"], 1, "its name must end with one of .jsonl"),
    "empty data": ([*TRAIN, "train_data=empty.jsonl"], 1, "empty.jsonl is empty"),
    "half a line of JSON": ([*TRAIN, "train_data=half.jsonl"], 1, "half.jsonl, line 2 is not valid JSON"),
    "wrong columns": ([*TRAIN, "train_data=odd.jsonl"], 1, "name your columns with fields"),
    "rows of another method": ([*TRAIN, "method=dpo"], 1, "dpo needs prompt, chosen, rejected"),
    "all labels masked": ([*TRAIN, "train_data=mute.jsonl"], 1, "no token to train on"),
    "prompts that fill all": ([*TRAIN, "train_data=long.jsonl"], 1, "check format, columns and length"),
    "longer than the model": ([*TRAIN, "max_seq_length=4096"], 1, "is 32 times the 128 positions"),
    "rows that are refused": ([*TRAIN, "train_data=long.jsonl", "long_rows=refuse"], 1, "raise it, or set"),
    "a data set offline": ([*TRAIN, "train_data=org/set"], 1, "HF_HUB_OFFLINE is set"),
    "a model offline": ([*TRAIN, "model=org/model"], 1, "org/model"),
    "no such model": ([*TRAIN, "model=./nowhere"], 1, "nowhere"),
    "a folder without a model": ([*TRAIN, "model=hollow"], 1, "hollow"),
    "chats for a base model": ([*TRAIN, "model=base", "train_data=chats.jsonl"], 1, "has no chat template"),
    "a reporter not installed": ([*TRAIN, "report_to=wandb"], 1, "not installed; pip install wandb"),
    "a missing extra": ([*TRAIN, "method=dpo", "train_data=pairs.jsonl"], 1, "pip install 'fewbits[train]'"),
    "no reward function": ([*TRAIN, "method=grpo"], 1, "needs reward functions; name them"),
    "a reward that is not there": ([*TRAIN, "method=grpo", "rewards=mine:best"], 1, "cannot be imported"),
    "a GPU that is not there": ([*TRAIN, "device=cuda"], 1, "torch sees no GPU here"),
    "the folder of another run": ([*TRAIN, "output_dir=taken"], 1, "holds another run"),
    "too few rows to hold out": ([*TRAIN, "train_data=one.jsonl", "eval_fraction=0.5"], 1, "too few"),
    "too little memory": (["plan", "m", "--gpu", "gtx480"], 1, "there is no GPU 'gtx480'"),
    "chatting with a run not ended": (["generate", "--model", "taken", "--chat"], 1, "has no model yet"),
    "an engine that is none": (
        ["export", "m", "out3", "--to", "mlx"],
        1,
        "there is no engine 'mlx' to export to",
    ),
    "an engine without a format": (["export", "m", "out3", "--to", "gguf"], 1, "--to gguf names no format"),
    "an adapter's rank alone": (
        ["quantize", "m", "out4", "--format", "int4", "--calibrate", "rows.jsonl", "--recover-rank", "4"],
        1,
        "--recover-rank says how to recover; give --recover MINUTES too",
    ),
    "merging what is no adapter": (["merge", "m", "out2"], 1, "it is not an adapter"),
    "a word of another trainer": ([*TRAIN, "max_length=64"], 1, "max_length"),
    "a learning rate in words": ([*TRAIN, "learning_rate=2e-4x"], 1, "learning_rate is '2e-4x'"),
    "images for a text run": (
        [*TRAIN, "train_data=seen.jsonl"],
        1,
        "the model reads text alone; take one that sees",
    ),
    "images within messages": ([*TRAIN, "train_data=parts.jsonl"], 1, "a part of type image"),
    "tokens of no template": ([*TRAIN, "template_tokens=add"], 1, "no chat_template says which"),
    "a checkpoint for a model": (["generate", "--model", "half", "--prompt", "a"], 1, "half"),
    "a model for an adapter": (["generate", "--model", "m", "--adapter", "m", "--prompt", "a"], 1, "adapter"),
    "pushing what is no name": (["push", "m", "my model"], 1, "write it as owner/name"),
    "pushing offline": (["push", "m", "me/model"], 1, "while HF_HUB_OFFLINE is set"),
    "an evaluation of no rows": ([*TRAIN, "eval_data=empty.jsonl"], 1, "empty.jsonl is empty"),
    "a beta for sft": ([*TRAIN, "beta=0.1"], 1, "and this run has method sft"),
    "evaluating on nothing": (["eval", "--model", "m"], 2, "--text --rows --tasks is required"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, a configuration, and all that is wrong."""
    folder = tmp_path_factory.mktemp("mistakes")
    make_tiny_folder(folder / "m")
    shutil.copytree(folder / "m", folder / "base")
    (folder / "base" / "chat_template.jinja").unlink(missing_ok=True)
    byte_tokenizer(chat=False).save_pretrained(folder / "base")
    (folder / "hollow").mkdir()
    (folder / "half").mkdir()
    (folder / "half" / "trainer_state.json").write_text("{}")
    (folder / "taken").mkdir()
    (folder / "taken" / "run.json").write_text('{"status": "stopped"}')
    rows = {
        "rows": PROMPTS,
        "chats": CHATS,
        "empty": [],
        "odd": [{"body": "a"}],
        "one": PROMPTS[:1],
        "mute": [{"prompt": "a", "completion": " "}],
        "long": [{"prompt": "a" * 500, "completion": "b"}],
        "seen": [{"messages": CHATS[0]["messages"], "images": [{"path": "a.png"}]}] * 4,
        "parts": [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}] * 4,
        "pairs": [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8,
    }
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (folder / "half.jsonl").write_text(json.dumps(PROMPTS[0]) + '\n{"prompt": "a", "comp')
    (folder / "rows.xlsx").write_text("a")
    (folder / "broken.yaml").write_text("model: [m\n")
    (folder / "c.yaml").write_text("model: m\ntrain_data: rows.jsonl\noutput_dir: out\n")
    return folder


def pretend(mistake, monkeypatch):
    """What is to be so on this machine."""
    if mistake == "a data set offline":
        import datasets

        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    if mistake in ("a model offline", "pushing offline"):
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if mistake == "a missing extra":
        monkeypatch.setitem(sys.modules, "trl", None)


def test_there_are_thirty():
    assert len(MISTAKES) >= 30 and len(_IN_PYTHON) >= 30


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.filterwarnings("ignore")
def test_one_sentence_tells_the_way_out(run, place, monkeypatch, mistake):
    argv, code, words = MISTAKES[mistake]
    monkeypatch.chdir(place)
    pretend(mistake, monkeypatch)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    shown = run(*argv)
    told = [line for line in shown.err.splitlines() if line.strip()]
    assert shown.code == code, shown.err
    assert words in told[-1] and told[-1].startswith("error: "), shown.err
    assert "Traceback" not in shown.err and len([line for line in told if line.startswith("error")]) == 1
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    assert not (place / "out").exists()


# of these a command line alone knows: flags, the YAML file, other commands
_IN_PYTHON = {
    name: (dict(word.split("=", 1) for word in argv[2:]), words)
    for name, (argv, code, words) in MISTAKES.items()
    if argv[:2] == TRAIN and code == 1 and all("=" in word for word in argv[2:])
}


@pytest.mark.parametrize("mistake", _IN_PYTHON)
@pytest.mark.filterwarnings("ignore")
def test_python_says_the_same_as_the_command_line(place, monkeypatch, mistake):
    from fewbits import TrainConfig, train
    from fewbits.errors import FewbitsError

    settings, words = _IN_PYTHON[mistake]
    monkeypatch.chdir(place)
    pretend(mistake, monkeypatch)
    values = {key: yaml.safe_load(value) for key, value in settings.items()}
    whole = {"model": "m", "train_data": "rows.jsonl", "output_dir": "out", **values}
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    with pytest.raises(FewbitsError) as said:
        train(TrainConfig(**whole))
    assert words in str(said.value) and "\n" not in str(said.value), str(said.value)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    assert not (place / "out").exists()


def test_python_takes_values_as_a_file_does_and_the_other_names():
    from fewbits import TrainConfig

    words = {"report_to": "tensorboard", "lr": "3e-4", "batch_size": 4.0, "rewards": "a:b", "method": "grpo"}
    config = TrainConfig(model="m", train_data="d.jsonl", **words)
    assert config.report_to == ("tensorboard",) and config.rewards == ("a:b",)
    assert config.learning_rate == 3e-4 and config.batch_size == 4 and isinstance(config.batch_size, int)
    mix = [Path("a.jsonl"), {"path": Path("b.jsonl"), "weight": 2}]
    assert TrainConfig(model=Path("m"), train_data=mix).train_data == [
        "a.jsonl",
        {"path": "b.jsonl", "weight": 2},
    ]
    assert dataclasses.replace(config, batch_size=2).batch_size == 2
    assert "batch_size" in inspect.signature(TrainConfig).parameters
