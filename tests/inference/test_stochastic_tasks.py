"""Tasks under streams: figures with a receipt, never without one."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import Unsupported
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.harness import run_tasks
from fewbits.inference.stochastic.evaluation import EvalSetting
from fewbits.inference.stochastic.tasks import tasks_under
from fewbits.models.loading.in_memory import apply_stochastic
from fewbits.recipes.stochastic_config import AttentionSetting, StochasticConfig
from tests.models.tiny import tiny, tokens

CONFIG = StochasticConfig(
    options=STOCHASTIC.with_length(32), attention=(("*", AttentionSetting(scores=32, values=32)),)
)


@torch.no_grad()
def passes(model, tokenizer, tasks, count=2):
    for _ in range(count):
        logits = model(tokens(1, 5)).logits
    return {task: {"acc": float(logits.mean())} for task in tasks}


def test_a_figure_comes_with_what_ran():
    model = tiny("llama")
    plain = tasks_under(model, None, ["one"], EvalSetting("as it is"), passes)
    assert plain.receipt is None
    ours = tasks_under(model, None, ["one"], EvalSetting("32", CONFIG), passes, count=3)
    assert ours.figures["one"] != plain.figures["one"]
    assert ours.receipt == "14 linears and 2 attentions ran in streams or INT8 codes, in each of 3 passes"
    assert tasks_under(model, None, ["one"], EvalSetting("as it is"), passes).figures == plain.figures
    apply_stochastic(model, CONFIG, fuse_norms=False)  # a folder that was saved so, for one
    again = tasks_under(model, None, ["one"], EvalSetting("as it is"), passes)
    assert again.figures == ours.figures and "in each of 2 passes" in again.receipt


def test_figures_of_another_model_are_refused():
    model, other = tiny("llama"), tiny("llama")
    setting = EvalSetting("32 cycles", CONFIG)
    with pytest.raises(Unsupported, match="the tasks never called this model"):
        tasks_under(model, None, ["one"], setting, lambda *_: passes(other, None, ["one"]))

    def attention_elsewhere(model, tokenizer, tasks):
        model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
        return passes(model, tokenizer, tasks)

    with pytest.raises(Unsupported, match=r"layers\.1.* computed elsewhere"):
        tasks_under(model, None, ["one"], setting, attention_elsewhere)


def test_a_task_of_ones_own(tmp_path, shared):
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'fewbits[eval]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "rows.jsonl").write_text(
        '{"q": "Once upon a", "a": " time"}\n{"q": "The cat", "a": " sat"}\n'
    )
    (tmp_path / "own.yaml").write_text(
        "task: own_stories\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        "test_split: test\noutput_type: loglikelihood\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]\n"
    )
    folder = shared / "data/models/stories260k"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    options = {"folder": str(tmp_path), "batch_size": 2}
    ours = tasks_under(model, tokenizer, ["own_stories"], EvalSetting("32", CONFIG), run_tasks, **options)
    assert "35 linears and 5 attentions" in ours.receipt
    assert ours.figures["own_stories"]["perplexity,none"] > 1
