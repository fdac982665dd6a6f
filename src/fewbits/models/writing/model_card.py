"""The model card of what goes to the hub: how it was made, on what, how it learnt, how to open it.

A card names data and models, and never a path of this machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PATH = re.compile(r"(?<![\w.:/<])(?:~|/[\w.+-]+)(?:/[\w.+-]+)+/?|\b[A-Za-z]:\\[^\s,;]+")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True)
class Card:
    """What a card says; what is empty is left out.

    Attributes:
        kind: "adapter", "merged", "packed", "plain" or "gguf".
        base_model: the model that was trained: its name on the hub, or a folder, of which the name is told.
        recipe: which format where, as plain data or a name.
        data: the training data's files or names.
        settings: of the run, by name.
        curve: the lines of metrics.jsonl.
        receipt: what was packed and what was left, in lines.
        versions: of the packages that trained it.
        tags: more tags than "fewbits" and the kind.
        datasets: names of data sets on the hub.
    """

    kind: str
    base_model: str = ""
    recipe: Any = None
    data: Sequence[str] = ()
    settings: Mapping[str, Any] | None = None
    curve: Sequence[Mapping[str, Any]] = ()
    receipt: str = ""
    versions: Mapping[str, str] | None = None
    tags: Sequence[str] = ()
    datasets: Sequence[str] = ()

    def text(self, repo_id: str) -> str:
        """The card in Markdown, with its head for the hub."""
        from huggingface_hub import ModelCardData

        on_hub = self.base_model if is_hub_name(self.base_model) else None
        named = [*self.datasets, *(name for name in self.data if is_hub_name(name))]
        head = ModelCardData(
            base_model=on_hub,
            library_name="peft"
            if self.kind == "adapter"
            else "gguf"
            if self.kind == "gguf"
            else "transformers",
            datasets=sorted(set(named)) or None,
            tags=["fewbits", *([] if self.kind == "plain" else [self.kind]), *self.tags],
            pipeline_tag="text-generation",
        )
        parts = [
            f"---\n{head.to_yaml()}\n---\n",
            f"# {repo_id.rpartition('/')[2]}\n",
            f"{_SENTENCES[self.kind]}{self._of_base()} Made with fewbits.\n",
            *self._opening(repo_id),
            *self._training(),
            *(
                []
                if not self.receipt
                else ["## What is packed\n", f"```\n{without_paths(self.receipt)}\n```\n"]
            ),
        ]
        return "\n".join(parts)

    def _of_base(self) -> str:
        return f" Its base is {named_only(self.base_model)}." if self.base_model else ""

    def _opening(self, repo_id: str) -> list[str]:
        if self.kind == "gguf":
            return ["## Open it\n", f"```sh\nllama-cli -hf {repo_id}\n```\n"]
        lines = ["from fewbits import FastLanguageModel", ""]
        lines += [f'model, tokenizer = FastLanguageModel.from_pretrained("{repo_id}")']
        return ["## Open it\n", "```python", *lines, "```\n"]

    def _training(self) -> list[str]:
        rows: list[tuple[str, str]] = []
        if self.data:
            rows.append(("data", ", ".join(named_only(name) for name in self.data)))
        if self.recipe is not None:
            rows.append(("recipe", without_paths(_told(self.recipe))))
        rows += [(name, without_paths(_told(value))) for name, value in (self.settings or {}).items()]
        if self.versions:
            rows.append(("versions", ", ".join(f"{k} {v}" for k, v in self.versions.items())))
        parts = []
        if rows:
            parts += ["## How it was made\n", "| | |\n|---|---|"]
            parts += [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows]
            parts.append("")
        return parts + self._curve()

    def _curve(self) -> list[str]:
        told = ("loss", "eval_loss")
        lines = [line for line in self.curve if any(name in line for name in told)]
        if not lines:
            return []
        places = sorted({round(i * (len(lines) - 1) / 9) for i in range(10)})
        rows = ["## How it learnt\n", "| step | loss | evaluation loss |\n|---:|---:|---:|"]
        for line in (lines[place] for place in places):
            shown = ["" if name not in line else f"{line[name]:.4f}" for name in told]
            rows.append(f"| {line.get('step', '')} | {shown[0]} | {shown[1]} |")
        return [*rows, ""]


_SENTENCES = {
    "adapter": "A LoRA adapter.",
    "merged": "A model in 16 bits, an adapter merged into it.",
    "packed": "A model whose linears are stored in few bits.",
    "plain": "A model.",
    "gguf": "A model for llama.cpp and what is built on it.",
}


def is_hub_name(name: str) -> bool:
    """Whether a name is one of the hub's, and no folder or file here."""
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


def named_only(name: str) -> str:
    """A hub's name as it is; of a path its last part."""
    return name if is_hub_name(name) else Path(name.rstrip("/")).name or name


def without_paths(text: str) -> str:
    """A text whose absolute paths are cut to their last parts."""
    return _PATH.sub(lambda match: re.split(r"[/\\]", match.group().rstrip("/"))[-1], text)


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_told(v)}" for k, v in value.items() if v not in (None, {}, [], ()))
    return ", ".join(map(_told, value)) if isinstance(value, (list, tuple)) else str(value)


__all__ = ["Card", "is_hub_name", "named_only", "without_paths"]
