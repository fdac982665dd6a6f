"""Twenty public notebooks of Unsloth by their calls, on tiny models: which run with their imports changed.

The page docs/guide/unsloth-notebooks.md has the same table.
"""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest

from fewbits.errors import FewbitsError
from tests.front import notebook_calls, notebook_preferences

pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
ROOT = Path(__file__).parents[2]
RUNS = "runs"
# the notebook, the function that has its calls, and what becomes of it
TABLE = {
    "Llama3.1 (8B) Alpaca": ("alpaca", RUNS),
    "Llama3.2 (1B and 3B) Conversational": ("conversational", RUNS),
    "Qwen3 (14B) Reasoning Conversational": ("reasoning", RUNS),
    "Qwen3 (4B) Thinking": ("thinking", RUNS),
    "Qwen3 (4B) Instruct": ("instruct", RUNS),
    "Mistral (7B) Text Completion": ("text_completion", RUNS),
    "Mistral v0.3 (7B) CPT": ("continued_pretraining", RUNS),
    "Zephyr (7B) DPO": ("dpo", RUNS),
    "Llama3 (8B) ORPO": ("orpo", RUNS),
    "Qwen2.5 KTO": ("kto", RUNS),
    "Qwen2.5 (3B) GRPO": ("grpo", RUNS),
    "gpt-oss (20B) Fine-tuning": ("gpt_oss", RUNS),
    "gpt-oss (20B) 500K Context": ("long_context", "scaled already .yarn.; pass at most 8192"),
    "TinyLlama (1.1B) Alpaca": ("rope_scaling", RUNS),
    "Qwen3 MoE": ("mixture_of_experts", RUNS),
    "Qwen2.5 Coder (1.5B) Tool Calling": ("tool_calling", RUNS),
    "Gemma3 (4B) Vision": ("vision", RUNS),
    "Llama3 (8B) Ollama": ("ollama", RUNS),
    "ModernBERT classification": ("classification", RUNS),
    "Qwen3 Embedding (0.6B)": ("embedding", "add_adapter"),
    "Qwen3 (4B) Instruct QAT": ("quantisation_aware", "int4_qat"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Folders of tiny models, and rows of data sets."""
    script = runpy.run_path(str(ROOT / "scripts" / "run_notebooks.py"))
    place = tmp_path_factory.mktemp("models")

    def folder(name: str) -> str:
        return str(script["model_folder"](name, place))

    def rows(name: str) -> Any:
        return datasets.Dataset.from_list(script["rows_of"](name)[:16])

    return folder, rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("notebook", TABLE)
def test_it_does_what_the_table_says(
    notebook: str, tiny: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, outcome = TABLE[notebook]
    call = getattr(notebook_calls, name, None) or getattr(notebook_preferences, name)
    if outcome != RUNS:
        with pytest.raises(FewbitsError, match=outcome):
            call(*tiny)
        return
    trainer = call(*tiny)
    if trainer is None:
        return
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert trainer.state.global_step == 2 and losses and all(map(math.isfinite, losses))
    adapters = [p for n, p in trainer.model.named_parameters() if "lora_B" in n]
    assert not adapters or any(float(p.detach().abs().sum()) > 0 for p in adapters)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_longest_context_that_a_scaled_model_has_trains(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = notebook_calls.long_context(*tiny, length=8192)
    assert trainer.state.global_step == 2
    assert any("unsloth_tiled_mlp" in note for note in trainer.model.fewbits_notes)


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "guide" / "unsloth-notebooks.md").read_text(encoding="utf-8")
    rows = dict(line.strip("| \n").split(" | ", 1) for line in page.splitlines() if line.startswith("| "))
    assert len(TABLE) >= 20
    for notebook, (_, outcome) in TABLE.items():
        assert rows[notebook].startswith("runs" if outcome == RUNS else "refused"), notebook


def test_only_the_imports_differ() -> None:
    files = ("notebook_calls", "notebook_preferences")
    text = "\n".join((ROOT / "tests" / "front" / f"{name}.py").read_text(encoding="utf-8") for name in files)
    ours = {line.strip().split()[1] for line in text.splitlines() if line.strip().startswith("from fewbits")}
    assert ours == {"fewbits", "fewbits.trl", "fewbits.chat_templates", "fewbits.trainer"}
