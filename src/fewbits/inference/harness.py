"""Tasks of lm-evaluation-harness on any model of ours, through its own library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fewbits.errors import BadInput, Unsupported

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


def run_tasks(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    folder: str | None = None,
) -> dict[str, dict[str, float]]:
    """Run tasks by their names there.

    Args:
        model: a causal language model of transformers, packed or not; it is not loaded again.
        tokenizer: its own.
        tasks: names, as in "hellaswag".
        limit: only so many documents of each.
        batch_size: documents per forward pass.
        folder: with tasks of your own, a YAML file each as the library describes them.

    Returns:
        By task its figures, as the library names them.

    Raises:
        Unsupported: the library is not installed.
        BadInput: it knows no such task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise Unsupported(
            "tasks need lm-eval, which is not installed: pip install 'fewbits[eval]'."
        ) from error
    manager = TaskManager(include_path=folder)
    all_tasks = set(manager.all_tasks)
    unknown = [name for name in tasks if name not in all_tasks]
    if unknown or not tasks:
        raise BadInput(
            f"lm-eval has no task {', '.join(unknown) or '(none named)'}; its own command line lists them."
        )
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    outcome = simple_evaluate(model=wrapped, tasks=list(tasks), limit=limit, task_manager=manager)
    return {
        name: {k: float(v) for k, v in figures.items() if isinstance(v, (int, float))}
        for name, figures in outcome["results"].items()
    }
