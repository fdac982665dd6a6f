"""Data of several places: weights, splits, columns of their own, the hub; nothing held out is trained on."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from fewbits.errors import BadInput
from fewbits.training.config import TrainConfig
from fewbits.training.data.examples import RowEncoder
from fewbits.training.data.mix import load_run_data, read_run_samples
from fewbits.training.data.rows import BadRows
from fewbits.training.data.sources import Source, check_sources, read_source, sources_of
from fewbits.training.preferences.rows import preference_rows
from tests.training.conftest import byte_tokenizer

datasets = pytest.importorskip("datasets")


@pytest.fixture
def write(tmp_path):
    def call(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return call


def loaded(train, **settings):
    config = TrainConfig.from_mapping({"model": "m", "train_data": train, **settings})
    encoder = RowEncoder(byte_tokenizer(), config, 64)
    return encoder, load_run_data(encoder)


def texts(data):
    tokenizer = byte_tokenizer()
    return [tokenizer.decode(e.input_ids, skip_special_tokens=True) for e in data.examples]


def test_weights_repeat_and_thin_out(write):
    a = write("a.jsonl", [{"text": f"a{i}"} for i in range(10)])
    b = write("b.jsonl", [{"text": f"b{i}"} for i in range(10)])
    mix = [{"path": a, "weight": 2.5}, {"path": b, "weight": 0.3}]
    _, data = loaded(mix)
    counts = Counter(texts(data.train))
    assert sum(n for text, n in counts.items() if text[0] == "a") == 25
    assert {n for text, n in counts.items() if text[0] == "a"} == {2, 3}
    assert sum(n for text, n in counts.items() if text[0] == "b") == 3
    assert data.train.report.rows == 20 and data.train.report.examples == 28
    assert data.train.report.tokens == sum(map(len, data.train.examples))
    again = loaded(mix)[1]
    assert again.train.fingerprint() == data.train.fingerprint()
    assert loaded(mix, seed=7)[1].train.fingerprint() != data.train.fingerprint()
    assert len({e.row for e in data.train.examples if e.row > 10}) == 3  # numbered on from the first place


def test_nothing_held_out_is_repeated_in_training(write):
    a = write("a.jsonl", [{"text": f"a{i}"} for i in range(40)])
    b = write("b.jsonl", [{"text": f"b{i}"} for i in range(40)])
    _, data = loaded([{"path": a, "weight": 3}, b], eval_fraction=0.25)
    held = set(texts(data.eval))
    assert len(held) == 20 and {text[0] for text in held} == {"a", "b"}
    assert not held & set(texts(data.train))


def test_each_place_has_its_columns_and_format(write):
    a = write("a.jsonl", [{"q": "1+1", "a": "2"}] * 3)
    b = write("b.jsonl", [{"text": "plain"}] * 3)
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    c = write("c.jsonl", [{"messages": chat}] * 3)
    mix = [{"path": a, "fields": {"prompt": "q", "completion": "a"}}, b, {"path": c, "format": "chat"}]
    encoder, data = loaded(mix, eval_fraction=0.34)
    assert [report.format for report in data.reports] == ["completion"] * 2 + ["text"] * 2 + ["chat"] * 2
    rows = sorted({e.row for e in data.eval.examples})
    samples = read_run_samples(encoder, data, rows)
    assert {"prompt": "1+1", "expected": "2"} in samples
    assert any("<|im_start|>user" in sample["prompt"] for sample in samples)


def test_the_command_line_and_yaml_say_the_same(write, tmp_path):
    a = write("a.jsonl", [{"text": "a"}])
    (tmp_path / "c.yaml").write_text(f"model: m\ntrain_data:\n- {a}\n- {{path: {a}, weight: 2}}\n")
    config = TrainConfig.from_yaml(tmp_path / "c.yaml")
    assert config == TrainConfig.from_mapping(
        {"model": "m", "train_data": f"[{a}, {{path: {a}, weight: 2}}]"}
    )
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert TrainConfig.from_yaml(tmp_path / "again.yaml") == config
    assert [source.weight for source in sources_of(config.train_data)] == [1.0, 2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "no train_data"),
        ([{"weight": 2}], "write a path, or a mapping with a path"),
        ([{"path": "a.jsonl", "wieght": 2}], "has an entry with the key 'wieght'; the keys are path"),
        ([{"path": "a.jsonl", "weight": 0}], "with the weight 0"),
        ([{"path": "a.jsonl", "weight": "much"}], "with the weight 'much'"),
        ([3], "train_data is"),
        (["a.jsonl"], "there is no data file a.jsonl; check the path"),
        ("no where", "there is no data file no where"),
    ],
)
def test_places_that_are_none(value, message):
    with pytest.raises(BadInput, match=r"^[^\n]*$") as told:
        check_sources(TrainConfig.from_mapping({"model": "m", "train_data": value}))
    assert message in str(told.value)


class Hub:
    """Stands in for the hub: what was asked for, and what comes back."""

    def __init__(self, monkeypatch):
        self.asked = []
        rows = datasets.Dataset.from_list([{"text": f"t{i}"} for i in range(4)])
        self.sets = datasets.DatasetDict({"train": rows, "validation": rows.select([0])})
        monkeypatch.setattr(datasets, "load_dataset", self.load)

    def load(self, path, name=None, *, split=None, streaming=False):
        self.asked.append((path, name, split, streaming))
        if path != "org/set":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub")
        return self.sets if split is None else self.sets[split]


def test_a_data_set_of_the_hub(monkeypatch):
    hub = Hub(monkeypatch)
    _, data = loaded("org/set", eval_data="org/set")
    assert texts(data.train) == ["t0", "t1", "t2", "t3"] and texts(data.eval) == ["t0"]
    rows = read_source(Source(path="org/set", name="plain", split="validation"), BadRows(), stream=True)
    assert [row.values for row in rows] == [{"text": "t0"}]
    assert hub.asked[-1] == ("org/set", "plain", "validation", True)
    with pytest.raises(BadInput, match="has the splits train, validation; name one"):
        list(read_source(Source(path="org/set"), BadRows(), splits=("dev",)))


def test_the_hub_has_none(monkeypatch):
    Hub(monkeypatch)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(
        BadInput, match=r"no data set of that name could be had .*doesn't exist.*check the path"
    ):
        loaded("org/other")


def test_offline_is_said(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        BadInput, match=r"the hub is not asked .*HF_HUB_OFFLINE is set; check the path, or unset"
    ):
        loaded("nobody/has-this-set")


def test_preference_rows_are_mixed_too(write):
    a = write("a.jsonl", [{"q": "x", "chosen": "b", "rejected": "c"}] * 2)
    b = write("b.jsonl", [{"prompt": str(i), "chosen": "b", "rejected": "c"} for i in range(10)])
    mix = [{"path": a, "fields": {"prompt": "q"}, "weight": 3}, {"path": b, "weight": 0.2}]
    config = TrainConfig.from_mapping({"model": "m", "method": "dpo", "train_data": mix})
    rows = preference_rows(config, config.train_data)
    assert [row["prompt"] for row in rows[:6]] == ["x"] * 6 and len(rows) == 8


def test_tokens_on_the_disk_are_the_same(write, tmp_path):
    a = write("a.jsonl", [{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(30)])
    b = write("b.jsonl", [{"text": f"b{i}"} for i in range(30)])
    mix = [{"path": a, "weight": 1.5}, b]
    _, memory = loaded(mix, eval_fraction=0.2)
    _, disk = loaded(mix, eval_fraction=0.2, data_on_disk=str(tmp_path / "new" / "folder"))
    assert disk.train.fingerprint() == memory.train.fingerprint()
    assert disk.eval.fingerprint() == memory.eval.fingerprint()
    assert [e.row for e in disk.train.examples] == [e.row for e in memory.train.examples]
    assert disk.train.report == memory.train.report
    assert not list((tmp_path / "new" / "folder").iterdir())  # nothing is left behind


def test_tokens_on_the_disk_are_not_in_memory(write, tmp_path):
    import tracemalloc

    a = write("a.jsonl", [{"text": "x" * 60}] * 400)

    def held(**settings):
        tracemalloc.start()
        kept = loaded(a, **settings)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(kept[1].train.examples) == 400
        return size

    held()  # what the first call imports
    assert held(data_on_disk=str(tmp_path / "t")) < 0.5 * held()


def test_a_folder_that_cannot_be_written(write, tmp_path):
    a = write("a.jsonl", [{"text": "x"}])
    with pytest.raises(BadInput, match="where nothing can be written"):
        loaded(a, data_on_disk=a)
