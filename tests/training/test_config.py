"""The configuration: YAML there and back, overrides, and refusals."""

from __future__ import annotations

import dataclasses
import datetime
import time

import pytest
from peft import LoraConfig
from transformers import TrainingArguments

from fewbits.errors import BadInput
from fewbits.formats import INT8
from fewbits.recipes import LoRA, qlora_nf4
from fewbits.training.config import ALIASES, TrainConfig, help_of
from fewbits.training.config_help import HELP
from fewbits.training.config_values import parse_memory_budget, parse_overrides
from fewbits.training.other_words import CALLED, OTHER_WORDS, unknown_key
from fewbits.training.setup.model_and_trainer import recipe_of_config

SMALL = {"model": "m", "train_data": "d.jsonl"}


def test_yaml_there_and_back(tmp_path):
    config = TrainConfig.from_mapping(
        {
            **SMALL,
            "lr": 1e-4,
            "lora_targets": "q_proj, v_proj",
            "fields": {"prompt": "q"},
            "sample_prompts": ["Hé: a"],
        }
    )
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert TrainConfig.from_yaml(tmp_path / "c.yaml") == config
    assert config.learning_rate == 1e-4 and config.lora_targets == ("q_proj", "v_proj")


def test_overrides_win_and_are_typed(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "model: m\ntrain_data: d\nlearning_rate: 1e-5\npacking: false\nmax_steps: 3\n"
    )
    texts = [
        "lr=1e-4",
        "packing=true",
        "max_steps=none",
        "fields.prompt=question",
        "--batch-size=4",
        "lora_bias=none",
    ]
    config = TrainConfig.from_yaml(tmp_path / "c.yaml", texts)
    assert (config.learning_rate, config.packing, config.max_steps, config.batch_size) == (
        1e-4,
        True,
        None,
        4,
    )
    assert config.fields == {"prompt": "question"} and config.lora_bias == "none"
    assert TrainConfig.from_yaml(tmp_path / "c.yaml").learning_rate == 1e-5  # YAML reads 1e-5 as a text
    assert parse_overrides({"lr": 1}) == {"lr": 1}


def test_every_field_is_documented():
    for item in dataclasses.fields(TrainConfig):
        assert help_of(item.name) and item.metadata["group"], item.name
    assert list(HELP) == [item.name for item in dataclasses.fields(TrainConfig)]


def test_words_of_other_libraries():
    """Each leads to a setting, to one alone, and is none itself; and slips of the keys lead there too."""
    known = [*(item.name for item in dataclasses.fields(TrainConfig)), *ALIASES]
    listed = [word for words in CALLED.values() for word in words.split()]
    assert len(set(listed)) == len(listed)
    assert set(OTHER_WORDS.values()) <= set(known) and not set(OTHER_WORDS) & set(known)
    for word, meant in {
        "rank": "lora_r",
        "alpha": "lora_alpha",
        "bs": "batch_size",
        "epoch": "epochs",
        "use_dora": "lora_dora",
        "warmup_ratio": "warmup",
        "val_set_size": "eval_fraction",
        "target_modules": "lora_targets",
        "save_total_limit": "keep_checkpoints",
        "rank_pattern": "lora_ranks",
        "lora_rnak": "lora_r",
        "grad_cilp": "max_grad_norm",
        "Learning_Rate": "learning_rate",
    }.items():
        assert unknown_key(word, known).endswith(f"did you mean {meant}?"), word


def test_likeness_of_letters_misleads_nobody():
    """A slip of the keys is seen; other settings of transformers and PEFT are not taken for one of ours."""
    known = [*(item.name for item in dataclasses.fields(TrainConfig)), *ALIASES]
    for name in (n for n in known if len(n) > 6 and "-" not in n):
        for i in range(1, len(name) - 1):
            slip = name[:i] + name[i + 1] + name[i] + name[i + 2 :]
            said = unknown_key(slip, known)
            assert slip == name or OTHER_WORDS.get(slip) or said.endswith(f"did you mean {name}?"), said
    fields = {f.name for kind in (TrainingArguments, LoraConfig) for f in dataclasses.fields(kind)}
    for name in fields - set(known) - set(OTHER_WORDS):
        assert "the names are" in unknown_key(name, known), unknown_key(name, known)


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig.from_mapping(SMALL).seed = 1


@pytest.mark.parametrize(
    "values, sentence",
    [
        ({"learning_rat": 1}, "unknown key 'learning_rat'; did you mean learning_rate?"),
        ({"lora_rank": 8}, "unknown key 'lora_rank'; did you mean lora_r?"),
        ({"Per-Device-Eval-Batch-Size": 8}, "did you mean batch_size?"),
        ({"zzzz": 1}, "unknown key 'zzzz'; the names are"),
        ({"epochs": "many"}, "epochs is 'many'; it must be a number"),
        ({"batch_size": 1.5}, "batch_size is 1.5; it must be a whole number"),
        ({"batch_size": 0}, "batch_size is 0; it must be greater than 0"),
        ({"batch_size": None}, "batch_size has no value"),
        ({"packing": "perhaps"}, "packing is 'perhaps'; it must be true or false"),
        ({"scheduler": "sawtooth"}, "scheduler is 'sawtooth'; it must be one of cosine"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0; it must be below 1"),
        ({"weight_decay": -1}, "weight_decay is -1.0; it must not be negative"),
        ({"memory_budget": "plenty"}, "memory_budget is 'plenty'; it must be a number of GiB or one of auto"),
        ({"memory_budget": 0}, "memory_budget is '0'; it must be a number of GiB"),
        ({"memory_budget": "inf"}, "it must be a number of GiB"),
        ({"cuda_graph": "sometimes"}, "cuda_graph is 'sometimes'; it must be one of auto, true, false"),
        ({"model": None}, "model has no value"),
        ({"train_data": ""}, "the configuration has no train_data"),
    ],
)
def test_refusals(values, sentence):
    with pytest.raises(BadInput) as error:
        TrainConfig.from_mapping({**SMALL, **values})
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "text, sentence",
    [
        (None, "no configuration file"),
        ("a: [1\nb: 2", "line 2 is not valid YAML"),
        ("just words", "holds no settings"),
        ("", "holds no settings"),
        (b"model: caf\xe9", "is not UTF-8 text .byte 10."),
        ("model: a\nlora_r: 4\nmodel: b\n", "has 'model' twice, in lines 1 and 3; keep one of them"),
        ("train_data:\n- path: a\n  weight: 1\n  weight: 2\n", "has 'weight' twice, in lines 3 and 4"),
    ],
)
def test_bad_files(tmp_path, text, sentence):
    if text is not None:
        (tmp_path / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadInput, match=sentence):
        TrainConfig.from_yaml(tmp_path / "c.yaml")


def test_an_override_needs_a_value():
    with pytest.raises(BadInput, match="has no value; write it as name=value"):
        parse_overrides(["lr"])


def test_what_may_differ_when_a_run_goes_on():
    one = TrainConfig.from_mapping(SMALL)
    assert one.differences(dataclasses.replace(one, output_dir="x", resume=True, report=False)) == []
    assert one.differences(dataclasses.replace(one, seed=1, learning_rate=1.0)) == ["learning_rate", "seed"]


def test_memory_budgets_and_older_names():
    def budget(**values):
        return parse_memory_budget(TrainConfig.from_mapping({**SMALL, **values}).memory_budget)

    assert budget() == "auto" and budget(memory_budget=24) == 24.0 and budget(memory_budget="7.5") == 7.5
    assert budget(memory_budget="offload") == "offload"
    assert budget(gradient_checkpointing=True) == "recompute"
    assert budget(gradient_checkpointing="false") == "auto"
    assert TrainConfig.from_mapping({**SMALL, "cuda_graph": True}).cuda_graph == "true"
    assert (
        TrainConfig.from_mapping(SMALL).differences(
            TrainConfig.from_mapping({**SMALL, "memory_budget": 3, "cuda_graph": False})
        )
        == []
    )


# A recipe as a mapping, and YAML that is more than it looks

RECIPE = {"name": "qlora_nf4", "linear": {"weight": "int8"}, "lora": {"r": 4}}


def test_a_recipe_as_a_mapping(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "model: m\ntrain_data: d\nrecipe: {name: qlora_nf4, linear: {weight: int8}, lora: {r: 4}}\n"
    )
    config = TrainConfig.from_yaml(tmp_path / "c.yaml")
    recipe, lora = recipe_of_config(config)
    assert recipe.linear.weight == INT8 and lora.r == 4 and config.recipe == RECIPE
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert TrainConfig.from_yaml(tmp_path / "again.yaml") == config
    words = ["recipe={name: qlora_nf4, linear: {weight: int8}, lora: {r: 4}}"]
    assert TrainConfig.from_mapping({**SMALL, **parse_overrides(words)}).recipe == RECIPE
    assert config.differences(TrainConfig.from_mapping({**SMALL, "recipe": "qlora_nf4"})) == [
        "recipe",
        "train_data",
    ]


def test_a_recipe_as_a_value():
    recipe = dataclasses.replace(qlora_nf4(), lora=LoRA(r=3))
    config = TrainConfig(**SMALL, recipe=recipe)
    assert recipe_of_config(config)[0] == recipe and TrainConfig.from_mapping(config.to_dict()) == config


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"name": 3},
        {"name": "qlora_nf4", "linear": 3},
        {"name": "qlora_nf4", "linear": {"weight": 3}},
        {"name": "qlora_nf4", "linear": {"weight": "nf5"}},
        {"name": "qlora_nf4", "linear": {"weights": "nf4"}},
        {"name": "qlora_nf4", "overrides": 5},
        {"name": "qlora_nf4", "overrides": [["a"]]},
        {"name": "qlora_nf4", "overrides": {"a": 3}},
        {"name": "qlora_nf4", "skip": "lm_head"},
        {"name": "qlora_nf4", "lora": {"r": "x"}},
        {"name": "qlora_nf4", "lora": {"targets": [3]}},
        {"name": "qlora_nf4", "lora": [1]},
        {"name": "qlora_nf4", 3: 4},
        {"name": "x", "qat": {"activation": "int8"}},
        {"name": "x", "communication": []},
        datetime.date(2020, 1, 1),
        ["qlora_nf4"],
    ],
    ids=str,
)
def test_a_recipe_that_is_none(recipe):
    with pytest.raises(BadInput) as error:
        recipe_of_config(TrainConfig.from_mapping({**SMALL, "recipe": recipe}))
    assert "\n" not in str(error.value)


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 40)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 40)
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LAUGHS, "stands for more than 10..12 values, repeated anchors counted"),
        (MERGES, "stands for more than 10..12 values, repeated anchors counted"),
        ("model: &a [*a]\n", "an anchor that contains itself"),
        ("model: " + "[" * 20_000, "nested too deeply"),
        ("model: " + "x" * 2_000_000, "at most 1,000,000"),
        ("started: 2020-99-99\n", "has a value that is none"),
        ("? [1, 2]\n: x\n", "not valid YAML|no name"),
        ("3: x\n", "which is no name"),
        ("a: b: c\n", "line 1 is not valid YAML"),
        ("learning_rate: .inf\nmodel: m\n", "learning_rate is inf; it must be a number"),
        ("model: [" + "1, " * 9000 + "1]\n", r"model is \[1, 1.*\.\.\.; it must be a text"),
    ],
)
def test_yaml_that_is_refused_at_once(tmp_path, text, sentence):
    (tmp_path / "c.yaml").write_text(text)
    began = time.process_time()  # work, and not what else the machine does meanwhile
    with pytest.raises(BadInput, match=sentence) as error:
        TrainConfig.from_yaml(tmp_path / "c.yaml")
    assert time.process_time() - began < 5 and len(str(error.value)) < 400


def test_anchors_that_save_a_line_are_welcome(tmp_path):
    (tmp_path / "c.yaml").write_text("model: &m folder\ntrain_data: *m\nsample_prompts: [a, b]\n")
    assert TrainConfig.from_yaml(tmp_path / "c.yaml").train_data == "folder"
