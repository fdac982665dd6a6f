"""``fewbits push``: what a run left, or an export, to the hub, with a card that says how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fewbits.cli.models import resolve
from fewbits.errors import BadInput

_OF_RUN = ("method", "steps")


def push(source: str, repo_id: str, **options: Any) -> str:
    """Upload a folder; see `fewbits.models.writing.hub`.

    Args:
        source: a training run, of which the final model or adapter goes up, or the folder of a model, an
            adapter or an export.
        repo_id: "owner/name" on the hub.
        options: of `fewbits.models.writing.hub.Upload`.

    Returns:
        The commit's address.

    Raises:
        BadInput, Unsupported: what `Upload.check` refuses; a folder that holds none of these.
    """
    from fewbits.models.writing.hub import push_folder, upload_of

    upload = upload_of(repo_id, {name: value for name, value in options.items() if value is not None})
    folder = Path(resolve(source))
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}; give a training run, a model, an adapter or an export.")
    return push_folder(folder, card_of_folder(folder), upload)


def card_of_folder(folder: Path) -> Any:
    """The card of a folder, and of the run that it is in.

    Raises:
        BadInput: it is no model, adapter or export.
    """
    from fewbits.models.writing.model_card import Card

    kind = _kind_of(folder)
    run = _json(folder.parent / "run.json")
    if not run:
        base = _json(folder / "adapter_config.json").get("base_model_name_or_path") or ""
        return Card(kind=kind, base_model=str(base))
    data = run.get("data", {}).get("train", {}).get("path", "")
    recipe = run.get("recipe") or {}
    lora = run.get("lora") or {}
    settings = {name: run[name] for name in _OF_RUN if run.get(name) is not None}
    settings |= {f"lora {name}": lora[name] for name in ("r", "alpha", "targets") if lora.get(name)}
    return Card(
        kind="merged" if folder.name == "merged" and kind == "plain" else kind,
        base_model=str(run.get("model", "")),
        recipe=recipe.get("name") if isinstance(recipe, dict) else recipe,
        data=[str(place) for place in _places(data)],
        settings=settings,
        curve=_curve(folder.parent / "metrics.jsonl"),
        receipt=str(run.get("receipt") or "") if kind in ("adapter", "packed") else "",
        versions=run.get("versions"),
    )


def _kind_of(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return "adapter"
    if any(folder.glob("*.gguf")):
        return "gguf"
    if not (folder / "config.json").is_file():
        raise BadInput(
            f"{folder} holds no model, adapter or export; give a training run, or a folder that"
            " contains config.json, adapter_config.json or a GGUF file."
        )
    return "packed" if "quantization_config" in _json(folder / "config.json") else "plain"


def _places(data: Any) -> list[Any]:
    """The names of a run's data, which may be one, or a list of names and mappings."""
    several = data if isinstance(data, list) else [data]
    return [place.get("path", "") if isinstance(place, dict) else place for place in several if place]


def _curve(path: Path) -> list[dict[str, Any]]:
    from fewbits.training.setup.callbacks import read_metrics

    return read_metrics(path)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


__all__ = ["card_of_folder", "push"]
