"""Every code block of the guide is read by what would run it, and all that need no GPU and no network run.

Quick: languages, Python's syntax, YAML, the command line's own parser; and each page from top to bottom in
one process, in a folder with a tiny model and what the page says the reader has. A page that takes more than
a second or two is slow; of two long pages the first blocks run always.
"""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import GUIDE, LANGUAGES, PAGES, Block, blocks_of, fewbits_commands, run_page

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SLOW_PAGES = (
    *("calibration", "coming-from-unsloth", "command-line", "exporting", "fine-tuning", "generation"),
    *("stochastic-computing", "stochastic-search", "trl"),
)
QUICK_BLOCKS = {"command-line": 2, "stochastic-computing": 2}  # so many blocks of a long page run always
MOST_NOT_RUN = 15  # blocks that need a GPU, a network or several machines: rather make one run than add one


def test_every_block_says_its_language() -> None:
    assert not [f"{b}: {b.language!r}" for b in BLOCKS if b.language not in LANGUAGES]


def test_where_is_what_names_files_that_are_there() -> None:
    """Each answer is a place to open: a path from src/fewbits, or of the tests."""
    source = GUIDE.parents[1] / "src" / "fewbits"
    text = (GUIDE / "where-is-what.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:\.\./)?[\w/]+\.(?:py|cu))`", text)
    missing = [path for path in paths if not ((source / path).exists() or (GUIDE.parents[1] / path).exists())]
    assert len(paths) > 20 and not missing


def test_no_table_was_run_together_into_lines() -> None:
    """A tool that fills paragraphs makes one of a table that it does not know as one."""
    found = [page.stem for page in PAGES if "| |---" in page.read_text(encoding="utf-8")]
    assert found == []


def test_few_blocks_are_not_run() -> None:
    left_out = [f"{block}: {block.needs}" for block in BLOCKS if block.needs]
    assert len(left_out) <= MOST_NOT_RUN, left_out


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_blocks_are_well_formed(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            ast.parse(block.text, str(block))
        elif block.language == "yaml":
            settings = yaml.safe_load(block.text)
            assert isinstance(settings, dict), block
            if "output_dir" in settings:
                check_configuration(settings)
        elif block.language == "json":
            json.loads(block.text)


def check_configuration(settings: dict[str, Any]) -> None:
    from fewbits.training.config import TrainConfig

    TrainConfig.from_mapping(settings)


def test_commands_are_those_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Also of blocks that are not run: names, flags and choices exist."""
    from fewbits.cli.parser import build_parser

    parser = build_parser(with_train_flags=True)
    faults = []
    for block in BLOCKS:
        for words in fewbits_commands(block):
            if words[0] in ("build", "bench") or "..." in words:  # other parsers, and what is left out
                continue
            try:
                _, rest = parser.parse_known_args(words)
            except SystemExit:
                rest = [capsys.readouterr().err.strip().splitlines()[-1]]
            faults += [f"{block}: {word}" for word in rest if "=" not in word or word.startswith("-")]
    assert not faults, faults


# What a page takes for granted: files in its folder, and names that the text before a block speaks of.
Setting = Callable[[Path], dict[str, Any]]
_ROWS = [{"prompt": f"Say {n}.", "completion": f"It is {n}, as you said: {n} and {n}."} for n in range(12)]
_CHATS = [
    {
        "messages": [
            {"role": "user", "content": r["prompt"]},
            {"role": "assistant", "content": r["completion"]},
        ]
    }
    for r in _ROWS
]
_PAIRS = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "No."} for r in _ROWS]
_STORY = "Once upon a time there was a small model that read the same story again and again. " * 40


def lines(name: str, rows: list[Any]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with a chat template."""
    from tokenizers import decoders

    from tests.models.tiny_folders import byte_tokenizer, saved

    changes = {"num_hidden_layers": 2, "max_position_embeddings": 2048}
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()  # transformers finds stop strings by it
    return saved(tmp_path_factory.mktemp("guide") / "model", "llama", tokenizer, **changes)


def adapted(folder: Path) -> tuple[Any, Any]:
    from fewbits import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(str(folder), max_seq_length=256)
    return FastLanguageModel.get_peft_model(model, r=4), tokenizer


def with_adapter(folder: Path) -> dict[str, Any]:
    """A run that was trained before: its folder, and the model with its adapter."""
    model, tokenizer = adapted(folder)
    model.save_pretrained("runs/mine")
    tokenizer.save_pretrained("runs/mine")
    return {"model": model, "tokenizer": tokenizer}


def with_trainer(folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = adapted(folder)
    text = "<|im_start|>user\nSay it.<|im_end|>\n<|im_start|>assistant\nIt is said.<|im_end|>\n"
    args = SFTConfig("out", report_to=[], use_cpu=True, max_length=128)
    rows = Dataset.from_list([{"text": text}] * 4)
    return {"trainer": SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=args)}


def with_rows_for_trainer(folder: Path) -> dict[str, Any]:
    from transformers import TrainingArguments

    ids = list(range(40, 72))
    args = TrainingArguments("out", report_to=[], use_cpu=True, max_steps=2)
    return {"path": str(folder), "args": args, "rows": [{"input_ids": ids, "labels": ids}] * 8}


def with_ids(folder: Path) -> dict[str, Any]:
    import torch

    return {"path": str(folder), "input_ids": torch.arange(40, 60)[None]}


def use(folder: Path) -> None:
    """This model in the place of the others."""
    for name in ("models/llama", "models/stories3m"):
        Path(name).unlink()
        Path(name).symlink_to(folder.resolve())


def with_chats(folder: Path) -> dict[str, Any]:
    """One layer: the budget of bits measures the whole model once for each linear and each format."""
    from tests.models.tiny_folders import byte_tokenizer, saved

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    use(saved(Path("narrow"), "llama", byte_tokenizer(), max_position_embeddings=2048, **sizes))
    lines("rows.jsonl", _CHATS * 3)
    return {}


def with_stream_model(folder: Path) -> dict[str, Any]:
    """The sizes that the page's configuration names, and a text that is short: streams are slow on a CPU."""
    from tests.models.tiny_folders import byte_tokenizer, saved

    sizes = {"hidden_size": 192, "num_attention_heads": 6, "num_hidden_layers": 2}
    use(saved(Path("streams"), "llama", byte_tokenizer(), max_position_embeddings=2048, **sizes))
    for name in ("text.txt", "story.txt", "wiki.test.txt"):
        Path(name).write_text(_STORY[:32], encoding="utf-8")
    return with_ids(Path("streams"))


def with_candidates(folder: Path) -> dict[str, Any]:
    """Configurations to compare, and a plain model whose short context makes windows of a short text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fewbits.recipes.stochastic_config import read_config
    from tests.models.tiny_folders import byte_tokenizer, saved

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    use(saved(Path("small"), "llama", byte_tokenizer(), max_position_embeddings=24, **sizes))
    for name, length in (("32", 32), ("fine", 48), ("pow2", 64)):
        options = f"options: {{stoc_len: {length}}}\nattention: {{'*': {{scores: 32, values: 32}}}}"
        Path(f"{name}.yaml").write_text(f"fewbits_stochastic: 1\n{options}\n", encoding="utf-8")
    for name in ("story.txt", "other.txt"):
        Path(name).write_text(_STORY[:100], encoding="utf-8")
    base, late, attention = (read_config(f"{name}.yaml") for name in ("32", "fine", "pow2"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained("small"), AutoTokenizer.from_pretrained("small")
    configs = {"base": base, "late": late, "attention": attention}
    return {**configs, "words": _STORY[:100], "model": model, "tokenizer": tokenizer}


def with_module(folder: Path) -> dict[str, Any]:
    import torch

    import fewbits.te as te

    return {"te": te, "model": te.Linear(64, 64), "x": torch.randn(32, 64)}


SETTINGS: dict[str, Setting] = {
    "calibration": with_chats,
    "coming-from-unsloth": with_trainer,
    "exporting": with_adapter,
    "generation": with_adapter,
    "quantisation-aware-training": with_rows_for_trainer,
    "stochastic-computing": with_stream_model,
    "stochastic-search": with_candidates,
    "transformer-engine": with_module,
}
NEEDS_PACKAGES = {
    "coming-from-unsloth": ("trl",),
    "command-line": ("trl",),
    "exporting": ("gguf", "compressed_tensors"),
    "trl": ("trl",),
}


def runs(block: Block) -> bool:
    return block.language in ("python", "sh") and not block.needs


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if page.stem in SLOW_PAGES else []


@pytest.fixture
def page_names(
    page: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """A folder as the page takes it for granted, as the current one; the names that its blocks begin with."""
    for package in NEEDS_PACKAGES.get(page.stem, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO())  # a chat ends at once
    for name in ("models/llama", "models/stories3m", "models/qwen3", "path/to/model", "model"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).symlink_to(model_folder)
    lines("rows.jsonl", _ROWS)
    lines("chats.jsonl", _CHATS)
    lines("pairs.jsonl", _PAIRS)
    for name in ("text.txt", "story.txt", "other.txt", "wiki.txt", "wiki.test.txt", "tinystories.txt"):
        Path(name).write_text(_STORY, encoding="utf-8")
    Path("question.json").write_text(json.dumps(_CHATS[0]["messages"][:1]), encoding="utf-8")
    names = SETTINGS.get(page.stem, lambda folder: {"path": str(folder)})(model_folder)
    return {"__name__": "__main__", **names}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=marks_of(page))
        for page in PAGES
        if any(map(runs, blocks_of(page)))
    ],
)
def test_page_runs(page: Path, page_names: dict[str, Any]) -> None:
    assert run_page(page, page_names) > 0


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem in QUICK_BLOCKS], ids=lambda p: p.stem)
def test_first_blocks_of_a_long_page_run(page: Path, page_names: dict[str, Any]) -> None:
    assert run_page(page, page_names, QUICK_BLOCKS[page.stem]) == QUICK_BLOCKS[page.stem]
