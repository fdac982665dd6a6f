"""From the command line's options to a model and its tokenizer."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.console import Console

from fewbits.errors import BadInput

FINAL = "final"  # where a training run leaves its model or adapter


def resolve(path: str) -> str:
    """The folder that holds the model: for a training run, its ``final`` folder.

    Raises:
        BadInput: a training run that has not ended.
    """
    folder = Path(path)
    if not (folder / "run.json").is_file() or (folder / "config.json").is_file():
        return path
    from fewbits.training.run_folder.killed import note_if_killed

    note_if_killed(folder)
    if not (folder / FINAL).is_dir():
        raise BadInput(_without_model(folder))
    return str(folder / FINAL)


def _without_model(folder: Path) -> str:
    """Why a training run has no model."""
    from fewbits.training.run_folder.killed import KILLED
    from fewbits.training.run_folder.layout import RunFolder
    from fewbits.training.run_folder.lock import holder_of

    holder = holder_of(folder)
    if holder is not None and holder.is_alive:
        return f"the training run {folder} has no model yet, it is being trained by {holder.owner}; wait."
    was = (
        "was killed and has no model"
        if RunFolder(folder).read().get("status") == KILLED
        else "has no model yet"
    )
    return f"the training run {folder} {was}; end it with fewbits train --resume, then try again."


def load(args: Namespace) -> tuple[Any, Any]:
    """The model and tokenizer that the options of `fewbits.cli.parser._model_options` name."""
    import torch

    from fewbits.formats.kv_cache import get_kv_cache
    from fewbits.host.record import notes_of
    from fewbits.models.adapting.adapters import load_adapter
    from fewbits.models.fast import FastLanguageModel
    from fewbits.models.packing.cache_choice import choose_cache

    if getattr(args, "cache", None) is not None:
        get_kv_cache(args.cache)  # a wrong name is told before a model is loaded
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    model, tokenizer = FastLanguageModel.from_pretrained(
        resolve(args.model),
        dtype=dtype,
        load_in_4bit=False,
        recipe=args.recipe,
        device_map=_device(args.device),
    )
    if args.adapter is not None:
        model = load_adapter(model, resolve(args.adapter))
    if getattr(args, "cache", None) is not None:
        choose_cache(model, args.cache)
    for note in notes_of(model) if args.recipe is not None else ():
        Console(stderr=True).print(note, style="dim", highlight=False, markup=False)
    return FastLanguageModel.for_inference(model), tokenizer


def add_adapter(model: Any, path: str, name: str) -> Any:
    """One more adapter of this name, which rows can choose; the one that was active stays so, or none is."""
    import peft

    from fewbits.models.adapting.adapters import load_adapter
    from fewbits.models.fast import FastLanguageModel

    active = list(model.active_adapters) if isinstance(model, peft.PeftModel) else None
    model = load_adapter(model, resolve(path), adapter_name=name)
    model.base_model.set_adapter(active or [])
    return FastLanguageModel.for_inference(model)


def guessing_of(args: Namespace, model: Any) -> Any:
    """Who guesses tokens ahead, as --lookup and --draft say; None: nobody."""
    from fewbits.inference.generate import Guessing
    from fewbits.models.fast import FastLanguageModel

    if args.draft is None:
        return Guessing(lookup=args.lookup) if args.lookup else None
    draft, tokenizer = FastLanguageModel.from_pretrained(
        resolve(args.draft), dtype=model.dtype, load_in_4bit=False, device_map=str(model.device)
    )
    return Guessing(draft=FastLanguageModel.for_inference(draft), draft_tokenizer=tokenizer)


def merge_adapter(adapter: str, destination: str, *, base: str | None = None, overwrite: bool = False) -> str:
    """Fold an adapter into its base model, from the original weights; returns what was done, in one line.

    Raises:
        BadInput: the folder is no adapter, or the destination is taken, the base or the adapter.
    """
    from fewbits.models.fast import FastLanguageModel, base_of
    from fewbits.models.folders.checkpoint import is_adapter_folder
    from fewbits.models.folders.whole_folder import check_destination

    folder = resolve(adapter)
    if not is_adapter_folder(Path(folder)):
        raise BadInput(
            f"{folder} has no adapter_config.json, so it is not an adapter; give the folder of one."
        )
    check_destination(destination, overwrite=overwrite, protected=(folder, base_of(Path(folder), base)))
    options: dict[str, Any] = {} if base is None else {"base_model": base}
    model, tokenizer = FastLanguageModel.from_pretrained(
        folder, load_in_4bit=False, device_map="cpu", **options
    )
    return str(model.save_pretrained_merged(destination, tokenizer, overwrite=overwrite))


def export_model(source: str, destination: str, to: str, *, base: str | None = None, **options: Any) -> str:
    """Write a model, an adapter merged into it, for another engine; returns the receipt's lines.

    Args:
        source: folder of a model, an adapter or a training run, or a GGUF file.
        destination: the folder to write.
        to: the engine and the format, such as "gguf:q4_k_m", "compressed_tensors:w4a16", "gptq:int4_g128" or
            "16bit".
        base: an adapter's base model, where it is not the one that the adapter names.
        options: of the model's own method: ``overwrite``, ``calibrate``, ``check``.

    Raises:
        BadInput: an unknown engine or format, an option that it has not, or a destination that is taken.
    """
    from fewbits.models.fast import FastLanguageModel

    kind, method = _destination_format(to)
    if kind == "16bit":
        other_options = [options.pop("calibrate", None) is not None, not options.pop("check", True)]
        if any(other_options):
            raise BadInput(f"--to {to} rounds nothing: leave out --calibrate and --no-check.")
    named: dict[str, Any] = {} if base is None else {"base_model": base}
    model, tokenizer = FastLanguageModel.from_pretrained(
        resolve(source), load_in_4bit=False, device_map="cpu", **named
    )
    if kind == "gguf":
        result = model.save_pretrained_gguf(destination, tokenizer, method, **options)
        return "\n".join(map(str, result)) if isinstance(result, list) else str(result)
    if kind == "16bit":
        return str(model.save_pretrained_merged(destination, tokenizer, dtype=method, **options))
    return str(model.save_pretrained_merged(destination, tokenizer, save_method=method, **options))


def _destination_format(to: str) -> tuple[str, Any]:
    """The kind of files that ``--to`` means, and the method in the words of what writes them."""
    import torch

    from fewbits.export.gguf_types import method_named
    from fewbits.export.methods import ENGINES, codec_for, engine_and_method

    plain = {"16bit": None, "bf16": torch.bfloat16, "f16": torch.float16}
    if to in plain:
        return "16bit", plain[to]
    kind, _, methods = to.partition(":")
    if kind == "gguf" and methods:
        formats = [method_named(method) for method in methods.split(",")]
        return kind, formats[0] if len(formats) == 1 else formats
    if kind not in ("gguf", *ENGINES):
        raise BadInput(
            f"there is no engine {kind!r} to export to; write gguf:METHOD for llama.cpp, such as "
            "gguf:q4_k_m, 16bit, or "
            f"ENGINE:FORMAT with one of {', '.join(ENGINES)}, such as compressed_tensors:w4a16 (vLLM,"
            " SGLang)."
        )
    chosen = engine_and_method(to)
    if chosen is None or (chosen[0] == "compressed_tensors" and not chosen[1]):
        raise BadInput(
            f"--to {to} names no format; write gguf:METHOD, ENGINE:FORMAT or 16bit, such as gguf:q4_k_m, "
            f"compressed_tensors:w4a16 or awq; the engines are {', '.join(ENGINES)}."
        )
    codec_for(*chosen)  # refuses before a model is loaded
    return "engine", to


def _device(name: str | None) -> str:
    """Where the model goes.

    Raises:
        BadInput: torch knows no such device, or sees none here.
    """
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"there is no device {name!r}; use cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(
            f"there is no {name} here: torch sees {torch.cuda.device_count()} GPUs; use --device cpu."
        )
    return name
