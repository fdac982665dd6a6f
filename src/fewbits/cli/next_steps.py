"""What to do with a run that has ended: command lines that work as they stand."""

from __future__ import annotations

import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def next_steps(config: Any, final: Path) -> list[str]:
    """Commands for the model or adapter that a run has left in ``final``.

    Args:
        config: the run's `TrainConfig`.
        final: the folder of the model or adapter.
    """
    run = shlex.quote(config.output_dir)
    if config.method == "reward":  # its score is no language model
        return [f"fewbits report {run}"]
    how = "--chat" if _has_template(final) else f"--prompt {shlex.quote('Once upon a time')}"
    steps = [f"fewbits generate --model {run} {how}"]
    data = config.eval_data or config.train_data
    if config.method == "sft" and isinstance(data, str) and Path(data).is_file():
        steps.append(f"fewbits eval --model {run} --rows {shlex.quote(data)} --answers 10 --show")
    if (final / "adapter_config.json").is_file():
        steps.append(f"fewbits merge {run} {shlex.quote(config.output_dir.rstrip('/') + '-merged')}")
    if find_spec("gguf") is not None:
        target = shlex.quote(f"{config.output_dir.rstrip('/')}-gguf")
        steps.append(f"fewbits export {run} {target} --to gguf:q8_0")
    return steps


def _has_template(final: Path) -> bool:
    if (final / "chat_template.jinja").is_file():
        return True
    try:
        facts = json.loads((final / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and bool(facts.get("chat_template"))
