"""Adapter folders: read, compared with the model before it is changed, and again once they are loaded.

A tensor that is missing, left over or of another shape is named and refused; the model is then as before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from fewbits.errors import BadCheckpoint, FewbitsError, SpecMismatch
from fewbits.host.transposed import as_linear, is_conv1d
from fewbits.models.folders.folder_manifest import check_folder
from fewbits.models.merging.branches import base_name
from fewbits.models.packing.expert_targets import expert_paths
from fewbits.models.packing.packed import put

logger = logging.getLogger("fewbits")
CONFIG = "adapter_config.json"
RECOVERED = "recovery_adapter"  # a folder inside its model's, with which it is moved
_WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"


def read_adapter(path: str | Path) -> dict[str, Any]:
    """The tensors of an adapter folder, on the CPU.

    Raises:
        BadCheckpoint: there is none, it is damaged, or it is a pickle.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise BadCheckpoint(f"{folder} has no {CONFIG}; give the folder that save_pretrained wrote.")
    check_folder(folder)
    if not (folder / _WEIGHTS).is_file():
        if (folder / _PICKLE).is_file():
            raise BadCheckpoint(
                f"{folder / _PICKLE} is a pickle, which can run code; convert it to {_WEIGHTS} first."
            )
        raise BadCheckpoint(f"{folder} has no {_WEIGHTS}; give the folder that save_pretrained wrote.")
    try:
        return _once(load_file(folder / _WEIGHTS))
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(
            f"{folder / _WEIGHTS} is truncated or corrupt ({error}); copy or save it again."
        ) from error


def _once(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Without the second names under which PEFT saves trained copies of an embedding that was resized."""
    second = re.compile(r"\.(modules_to_save|original_module)(?=\.)")
    return {k: t for k, t in weights.items() if not second.search(k) or second.sub("", k) not in weights}


def fit_vocabulary(model: Any, path: str | Path) -> list[str]:
    """Give a base model as many rows of embedding and head as the adapter in ``path`` was trained with.

    In place, where the adapter holds one of another size; tokens were added before it was trained. Where it
    holds one of two that are not tied, the added rows of the other begin as those of transformers do.

    Returns:
        What was done, and what is not in the file, in words.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    embedding, head = ("".join(n for n, m in model.named_modules() if m is end) for end in ends)
    weights = {key: tensor for key, tensor in read_adapter(path).items() if tensor.dim()}
    held = {
        base_name(key).replace(".modules_to_save.", "."): (key, tensor.shape[0])
        for key, tensor in weights.items()
    }
    both = [f"{name}.weight" for name in (embedding, head) if name]
    rows = next((held[name][1] for name in both if name in held), None)
    rows_here = ends[0].weight.shape[0]
    if rows is None or rows == rows_here:
        return []
    absent = [name for name in both if name not in held]
    (stored, _), *_ = (held[name] for name in both if name in held)
    is_tied = ends[1] is not None and ends[1].weight is ends[0].weight
    lost = [] if is_tied and ".modules_to_save." not in stored else absent
    model.resize_token_embeddings(rows, mean_resizing=bool(lost))
    said = [f"the embedding has {rows:,} rows and not {rows_here:,}, as it had when the adapter was trained"]
    if lost and rows > rows_here:
        said.append(
            f"{path} holds no rows of {lost[0].removesuffix('.weight')} for the {rows - rows_here:,} added"
            " tokens; they are the mean of the others, as transformers begins them"
        )
        logger.warning(said[-1])
    return said


def model_around(adapter: Path) -> Path | None:
    """The folder of a recovered model whose adapter lies inside; None for any other adapter."""
    folder = adapter.absolute().parent
    return folder if adapter.name == RECOVERED and (folder / "config.json").is_file() else None


def linears_of(model: nn.Module) -> dict[str, nn.Module]:
    """Linears by the full name that the base model gives them, adapters and wrappers left out."""
    linears: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if ".lora_" in name or not (isinstance(module, nn.Linear) or is_conv1d(module)):
            continue
        linears[name.removeprefix("base_model.model.").removesuffix(".base_layer")] = module
    return linears


def embeddings_of(model: nn.Module) -> set[str]:
    """The full names of embeddings in the base model."""
    return {base_name(name) for name, module in model.named_modules() if isinstance(module, nn.Embedding)}


def listed(names: Iterable[str]) -> str:
    """The last parts of full names, for a message."""
    return ", ".join(sorted({name.rpartition(".")[2] for name in names})) or "no linears"


def check_fit(model: nn.Module, weights: Mapping[str, Any], path: str | Path) -> None:
    """Each tensor must find a module of its size, before anything is changed.

    Raises:
        SpecMismatch: one does not.
    """
    linears, experts = linears_of(model), expert_paths(model)
    shapes = {base_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for key, tensor in weights.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])(\..+)?\.weight", key)
        if match is not None and match.group(1).removesuffix(".base_layer") in experts:
            continue  # 3-D parameters, whose places PEFT encodes by nesting
        if match is not None:
            sides = _sides(linears, shapes, match.group(1))
            _check_pair(linears, sides, match.group(1), match.group(2), tensor, path)
            continue
        name = base_name(key)
        have, want = tuple(tensor.shape), shapes.get(name)
        if want is not None and have != want:
            raise SpecMismatch(
                f"the adapter in {path} holds {name!r} of shape {have}, and this model's is {want} (another "
                "vocabulary?); load its own base model."
            )


def _sides(
    linears: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], name: str
) -> tuple[int, ...] | None:
    """Outputs and inputs of a linear, or of a parameter that is used as one (a router's), or None."""
    if name in linears:
        linear = as_linear(linears[name])
        return linear.out_features, linear.in_features
    shape = shapes.get(f"{name}.weight", ())
    return shape if len(shape) == 2 else None


def _check_pair(
    linears: Mapping[str, Any],
    sides: tuple[int, ...] | None,
    name: str,
    which: str,
    tensor: Any,
    path: str | Path,
) -> None:
    if sides is None:
        raise SpecMismatch(
            f"the adapter in {path} adapts {name!r}, which this model does not have; "
            f"it has {listed(linears)}."
        )
    axis, side = (1, "in") if which == "A" else (0, "out")
    have, want = tensor.shape[axis], sides[axis]
    if have != want:
        raise SpecMismatch(
            f"the adapter in {path} was made for {have} {side}puts of {name!r}, which has {want}; "
            "load its own base model."
        )


@contextmanager
def named_errors(path: str | Path) -> Iterator[None]:
    """What PEFT and torch raise of an adapter in ``path`` that does not fit becomes one sentence.

    Raises:
        SpecMismatch: in its place.
    """
    try:
        yield
    except (RuntimeError, KeyError, ValueError) as error:
        if isinstance(error, FewbitsError):
            raise
        raise SpecMismatch(
            f"the adapter in {path} does not fit its {CONFIG} or this model: {_reason(error)}; save it again."
        ) from error


@contextmanager
def restored_on_error(model: nn.Module) -> Iterator[None]:
    """Give a model back its modules, and what of them trains, if putting an adapter on it fails."""
    modules = dict(model.named_modules())
    frozen = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    had_config = "peft_config" in model.__dict__
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            for name, module in modules.items():
                if name and model.get_submodule(name) is not module:
                    put(model, name, module)
            for parameter, requires_grad in frozen:
                parameter.requires_grad_(requires_grad)
            if not had_config:
                model.__dict__.pop("peft_config", None)


def _reason(error: BaseException) -> str:
    """What torch or PEFT says, in one line: of a mismatch its first tensor, of a lack its name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, KeyError):
        return f"it lacks {lines[0]}"
    return next((line for line in lines if "mismatch for" in line), lines[0] if lines else "").rstrip(".")


def check_loaded(model: nn.Module, weights: Mapping[str, Any], adapter_name: str, path: str | Path) -> None:
    """Every tensor of the adapter must have come from its file, and each of the file have gone somewhere.

    Args:
        model: the PeftModel; the tensors are put into it once more, which tells both.
        weights: of the file.
        adapter_name: the adapter's name in the model.
        path: the adapter's folder, for messages.

    Raises:
        SpecMismatch: one is missing or left over.
    """
    import peft

    result = peft.set_peft_model_state_dict(model, dict(weights), adapter_name=adapter_name)
    unread = [key for key in result.missing_keys if f".{adapter_name}." in f"{key}."]
    second = {key for key in unread if _is_shared(model, key, result.missing_keys)}
    missing = [key for key in unread if key not in second]
    # of a tied head PEFT writes the trained rows once more, and gives them no place when it reads
    left_over = [key for key in result.unexpected_keys if f"{key}.{adapter_name}" not in second]
    for odd, how in ((missing, "lacks"), (left_over, "holds")):
        if odd:
            end = "save it again, or copy it whole" if how == "lacks" else "load what it was saved from"
            raise SpecMismatch(
                f"the adapter in {path} {how} {_plain(odd[0], adapter_name)!r}"
                f"{' (and ' + str(len(odd) - 1) + ' more)' if len(odd) > 1 else ''}, which its {CONFIG} "
                f"{'asks for' if how == 'lacks' else 'gives no place'}; {end}."
            )


def _is_shared(model: nn.Module, key: str, missing: Iterable[str]) -> bool:
    """True for the second name of a tensor that was loaded under its first (tied copies)."""
    state = model.state_dict(keep_vars=True)
    absent = set(missing)
    return any(state[key] is tensor for name, tensor in state.items() if name not in absent)


def _plain(key: str, adapter_name: str) -> str:
    return key.removeprefix("base_model.model.").replace(f".{adapter_name}", "")
