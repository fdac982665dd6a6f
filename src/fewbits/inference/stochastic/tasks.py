"""Tasks of lm-evaluation-harness on a model in streams, with the receipt that every product ran so.

An evaluation whose attention or experts went another way gives figures that look stochastic and are not, and
the harness calls the model in ways of its own. So every figure here comes with what was counted
(`fewbits.inference.stochastic.receipt`); a product that ran elsewhere is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fewbits.errors import Unsupported
from fewbits.inference.evaluate import evaluating
from fewbits.inference.harness import run_tasks
from fewbits.inference.stochastic.evaluation import EvalSetting, under_setting
from fewbits.inference.stochastic.receipt import products_counted

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TaskFigures:
    """What tasks gave under one setting.

    Attributes:
        setting: its name.
        figures: by task, as the library names them.
        receipt: what ran in streams or INT8 codes, and in how many passes; None: the setting has none.
    """

    setting: str
    figures: Mapping[str, Mapping[str, float]]
    receipt: str | None


def tasks_under(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    setting: EvalSetting,
    run: Callable[..., dict[str, dict[str, float]]] = run_tasks,
    **options: Any,
) -> TaskFigures:
    """Run tasks under one setting.

    Args:
        model: in its original form, and so again afterwards; or under a stochastic configuration already,
            if the setting says "as it is".
        tokenizer: its own.
        tasks: names, as in "hellaswag".
        setting: how the model runs.
        run: what runs them; called as ``run(model, tokenizer, tasks, **options)``.
        **options: of `fewbits.inference.harness.run_tasks`.

    Raises:
        Unsupported: a product that was to be stochastic was computed elsewhere, the model was never called
            while it was stochastic, or the library is not installed.
        BadInput: the library knows no such task.
    """
    with under_setting(model, setting), evaluating(model):
        with products_counted(model) as counted:
            figures = run(model, tokenizer, tasks, **options)
        if not counted.linears and not counted.attentions:
            return TaskFigures(setting.name, figures, None)
        if not max(counted.passes.values(), default=0):
            raise Unsupported(
                f"the tasks never called this model, so their figures say nothing of {setting.name}; run "
                "them in this process, on this very model."
            )
        return TaskFigures(setting.name, figures, counted.sentence())
