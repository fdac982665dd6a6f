"""`FastLanguageModel`: load, adapt, train, save, in the words of Unsloth's scripts.

Every argument that such a script may pass is honoured, or noted in ``model.fewbits_notes`` because it
chooses nothing here, or refused in one sentence; none is dropped in silence. transformers and peft are
imported when a method is called.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fewbits.decoder.fuse import fuse, fused_layers, fusion_of
from fewbits.decoder.keep import keep_for
from fewbits.errors import BadCheckpoint, BadInput, SpecMismatch, Unsupported
from fewbits.export.compressed import import_compressed_tensors
from fewbits.host.attention import decoder_of
from fewbits.host.conversion import conversion_of
from fewbits.host.packed_rows import RowsApart, keep_rows_apart
from fewbits.host.record import add_notes, notes_of, put_part
from fewbits.models.adapting.adapters import get_peft_model, load_adapter
from fewbits.models.adapting.checkpointed_layers import checkpoint_layers, chosen, recompute_as
from fewbits.models.adapting.files import fit_vocabulary, model_around
from fewbits.models.adapting.quantization_error import recipe_in
from fewbits.models.adapting.words import fast_generate, load_lora, save_lora, unload_lora
from fewbits.models.chat.named_templates import stop_at_turns
from fewbits.models.folders.checkpoint import (
    ADAPTER_CONFIG,
    Checkpoint,
    inspect_folder,
    is_adapter_folder,
    read_json,
)
from fewbits.models.folders.folder_manifest import check_folder
from fewbits.models.folders.reading import Reading
from fewbits.models.generation.careful_generate import generate
from fewbits.models.generation.live.generate_batch import generate_batch
from fewbits.models.generation.loop import decoding_of
from fewbits.models.loading.described import Described, describe, options_of, quant_method_of
from fewbits.models.loading.early_work import Early, work_beside
from fewbits.models.loading.foreign import FOREIGN, holds
from fewbits.models.loading.gguf_model import GGUF_ENDING, load_gguf
from fewbits.models.loading.loaded_tokenizer import adapters_own, fitted, read_tokenizer, set_length
from fewbits.models.loading.loading_interpreter import collector_paused, quick_turns
from fewbits.models.loading.longer_positions import length_with
from fewbits.models.loading.options import (
    PEFT_CHOOSES_NOTHING,
    PEFT_FIELDS,
    Loading,
    note_or_refuse,
    sort_options,
    whole_embeddings,
)
from fewbits.models.loading.placing import device_map_of, dtype_of
from fewbits.models.packing.packed import check_device, refuse_to_pack, train_all
from fewbits.models.plan.from_batches import plan_from_batches
from fewbits.models.writing.engine_folder import save_pretrained_merged
from fewbits.models.writing.exporting import save_pretrained_gguf
from fewbits.models.writing.hub import push_to_hub, push_to_hub_gguf, push_to_hub_merged
from fewbits.recipes import Recipe

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("fewbits")


class FastLanguageModel:
    """Loads models and adds LoRA adapters, with the names of Unsloth's class; all methods are static."""

    @staticmethod
    @collector_paused()
    @quick_turns()
    def from_pretrained(
        model_name: str | Path,
        max_seq_length: int | None = None,
        dtype: torch.dtype | str | None = None,
        load_in_4bit: bool = True,
        load_in_8bit: bool = False,
        full_finetuning: bool = False,
        recipe: str | Recipe | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Load a model and its tokenizer, quantised to 4 bits unless you choose otherwise.

        ``print(fewbits.explain(model))`` afterwards says what was quantised, and what was not and why.

        Args:
            model_name: a model's folder or its name on the Hugging Face Hub, the folder of a PEFT adapter
                (its base model is then loaded too), or a GGUF file. The model may be quantised already, by
                fewbits or another library (docs/guide/importing.md).
            max_seq_length: longest sequence in tokens; None: as the model was trained for; more: stretched.
            dtype: of everything not quantised; None: bfloat16 or float16 on a GPU, the checkpoint's on a CPU.
            load_in_4bit: store the weights in 4-bit NF4; the same as recipe="qlora_nf4".
            load_in_8bit: store the weights in INT8; the same as recipe="int8". load_in_4bit is then ignored.
            full_finetuning: do not quantise, and make all weights trainable; a recipe that packs is refused.
            recipe: in place of the three above: a name (``fewbits recipes``), a `fewbits.Recipe`, a mapping.
            options: token, revision, device_map, trust_remote_code, local_files_only, attn_implementation,
                use_gradient_checkpointing, resize_model_vocab, allow_pickle (it can run code), base_model
                (of an adapter, if it has moved), is_trainable (an adapter is trained further), and Unsloth's
                other arguments; ``model.fewbits_notes`` says which of these have no effect.

        Returns:
            The model (a PeftModel if model_name is an adapter) and the tokenizer.

        Raises:
            BadInput, BadCheckpoint, SpecMismatch, Unsupported: with one sentence that says what to do.
        """
        loading = sort_options(options, max_seq_length)
        if str(model_name).endswith(GGUF_ENDING):
            with Reading(str(model_name)):
                model, tokenizer = load_gguf(Path(model_name), dtype, loading)
            return _finished(model, tokenizer, max_seq_length, full_finetuning, loading), tokenizer
        path = _local_folder(model_name)
        if path is not None and is_adapter_folder(path):
            with Reading(path):
                base = base_of(path, loading.base_model)
                own = read_json(path / ADAPTER_CONFIG)
                length, begun_over = length_with(own, max_seq_length, str(path)), recipe_in(own)
            chosen_recipe = recipe if begun_over is None else begun_over
            choices = (length, dtype, load_in_4bit, load_in_8bit, full_finetuning, chosen_recipe)
            rest = {k: v for k, v in options.items() if k not in ("base_model", "is_trainable")}
            model, tokenizer = FastLanguageModel.from_pretrained(base, *choices, **rest)
            with Reading(path):
                add_notes(model, fit_vocabulary(model, path))
                if begun_over is not None:
                    add_notes(model, [f"{path} began as the error of packing: its own recipe packs the base"])
                peft_model = load_adapter(model, path, is_trainable=loading.is_trainable)
            if loading.is_trainable:
                _made_fast(peft_model, model, loading)
            with Reading(path, tokenizer=True):
                tokenizer = adapters_own(path, tokenizer)
            stop_at_turns(model, tokenizer)
            model.fewbits_tokenizer = tokenizer
            return with_methods(peft_model, model), tokenizer
        chosen = _choose_recipe(recipe, load_in_4bit, load_in_8bit, full_finetuning, loading)
        where = str(path or model_name)
        with Reading(where):
            checkpoint = None
            if path is not None:
                checkpoint = inspect_folder(
                    path, allow_pickle=loading.allow_pickle, remote_code=loading.trust_remote_code
                )
            with work_beside(chosen, checkpoint, loading.device_map, dtype) as early:
                described = describe(where, checkpoint, loading)
                reading = early.threads.submit(read_tokenizer, where, loading)  # imports are done
                model = _load_model(where, checkpoint, described, chosen, dtype, loading, early)
                with Reading(where, tokenizer=True):
                    tokenizer = fitted(reading.result(), where, model, loading)
        return _finished(model, tokenizer, max_seq_length, full_finetuning, loading), tokenizer

    @staticmethod
    def get_peft_model(
        model: nn.Module,
        r: int = 16,
        target_modules: str | list[str] | tuple[str, ...] = "all-linear",
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        use_rslora: bool = False,
        **options: Any,
    ) -> Any:
        """Add LoRA adapters to a model, and on a GPU its fused layers.

        Args:
            model: what from_pretrained returned.
            r: rank of the adapters.
            target_modules: names of the linear layers that get one, "all-linear", or a regular expression
                over their full names.
            lora_alpha: an adapter's output is scaled by lora_alpha / r (with use_rslora by / sqrt(r)).
            lora_dropout: dropout of an adapter's input while training; above 0 layers are not fused.
            bias: which biases train: "none", "all" or "lora_only".
            use_rslora: rank-stabilised scaling.
            options: random_state (3407), use_gradient_checkpointing (True, False, "unsloth"; "auto" or a
                number of GiB find a plan from the first batch), modules_to_save, layers_to_transform,
                exclude_modules, init_lora_weights, adapt_embeddings (True: an embedding among the targets
                gets an adapter, as in PEFT; else it is trained in full, as in Unsloth), and Unsloth's other
                arguments.

        Returns:
            A peft.PeftModel in training mode. Where the base has dropout of its own (GPT-2, OPT), which that
            mode switches on, the mode stays as it was, so that new adapters change no output by themselves;
            a trainer switches it on, as for_training does, and ``fewbits_notes`` says so.
        """
        training = model.training
        notes: list[str] = []
        checkpointing = options.pop("use_gradient_checkpointing", "unsloth")
        seed = options.pop("random_state", 3407)
        adapt_embeddings = options.pop("adapt_embeddings", False)
        fields = {k: options.pop(k) for k in list(options) if k in PEFT_FIELDS}
        fields = {k: v for k, v in fields.items() if v is not None}
        note_or_refuse(options, notes, "get_peft_model", PEFT_CHOOSES_NOTHING)
        targets = target_modules
        if not adapt_embeddings:
            targets = whole_embeddings(model, target_modules, fields, notes)
        peft_model = get_peft_model(
            model,
            r=r,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            target_modules=targets,
            bias=bias,
            use_rslora=use_rslora,
            seed=seed,
            **fields,
        )
        notes.extend(_fused_on_gpu(peft_model))
        dropout = _dropout_of(model)
        if dropout and not training:
            notes.append(
                f"the base has dropout ({dropout}), which stays off until a trainer, or "
                "FastLanguageModel.for_training(model), switches it on"
            )
        add_notes(model, notes)
        FastLanguageModel.for_training(with_methods(peft_model, model), checkpointing)
        return peft_model.train(training or not dropout)

    @staticmethod
    def for_inference(model: Any) -> Any:
        """Make a model ready to generate: evaluation mode, KV cache on, no gradient checkpointing.

        On a GPU its layers are fused, as get_peft_model does it for training: prompts are read through them.
        """
        checkpoint_layers(model, False)
        model.config.use_cache = True
        said = notes_of(model)
        add_notes(model, [note for note in _fused_on_gpu(model) if note not in said])
        _keep_caches(model, True)
        return model.eval()

    @staticmethod
    def for_training(model: Any, use_gradient_checkpointing: bool | float | str | None = None) -> Any:
        """Make a model ready to train: training mode, gradient checkpointing as given here or before.

        Fused layers recompute by themselves (`fewbits.decoder.keep.keep_for` says what); others through
        transformers, as a whole, for True and "unsloth". The choice wins over a trainer's default.
        """
        choice = use_gradient_checkpointing
        if choice is None:
            choice = chosen(model)
        recompute_as(model, True if choice is None else choice)
        plan_from_batches(model, True if choice is None else choice)
        _keep_caches(model, False)
        if not fused_layers(model):
            model.config.use_cache = keep_for(True if choice is None else choice).mlp
        return model.train()


def _finished(
    model: Any, tokenizer: Any, max_seq_length: int | None, full_finetuning: bool, loading: Loading
) -> Any:
    """A loaded model with its length, notes and methods."""
    set_length(model, tokenizer, max_seq_length)
    if loading.resize_model_vocab:
        model.resize_token_embeddings(loading.resize_model_vocab)
    if full_finetuning:
        train_all(model, str(model.config.name_or_path or "it"))
    add_notes(model, loading.notes)
    model.fewbits_tokenizer = tokenizer
    conversion = conversion_of(model)
    if conversion is not None:
        conversion.receipt.notes.extend(loading.notes)
    else:
        with suppress(Unsupported, SpecMismatch):  # a model whose layers nobody can name stays as it is
            put_part(model, RowsApart(keep_rows_apart(decoder_of(model))))
    for note in loading.notes:
        logger.warning(note)
    if full_finetuning:
        _made_fast(model, model, loading)
    return with_methods(model)


def _made_fast(model: nn.Module, inner: Any, loading: Loading) -> None:
    """Fuse what is loaded to be trained, on a GPU; it recomputes as from_pretrained was told."""
    add_notes(inner, _fused_on_gpu(model))
    choice = loading.use_gradient_checkpointing
    if choice is not None or fusion_of(model) is not None:
        recompute_as(model, "unsloth" if choice is None else choice)
        plan_from_batches(model, "unsloth" if choice is None else choice)


def _dropout_of(model: Any) -> str:
    """The settings in a model's configuration by which it drops values in training; "" without any."""
    settings = model.config.get_text_config().to_dict()
    heads = ("summary_", "classifier_")  # of models for other tasks
    dropped = {k: v for k, v in settings.items() if "drop" in k and not k.startswith(heads)}
    return ", ".join(f"{k} {v}" for k, v in dropped.items() if isinstance(v, float) and v > 0)


def _is_on_gpu(model: nn.Module) -> bool:
    return all(p.device.type == "cuda" for p in model.parameters())


def _keep_caches(model: nn.Module, keep: bool) -> None:
    """Whether fused layers in evaluation mode fill the KV cache that a loop of one's own goes on with.

    A model that trains lets go of its prompts' graphs and decoded weights, and of their memory.
    """
    fusion = fusion_of(model)
    if fusion is not None:
        fusion.is_for_inference(keep)
    if not keep:
        decoding_of(model).make_room()


def _fused_on_gpu(model: nn.Module) -> list[str]:
    """Fuse a model on a GPU whose family is known; the receipt's lines, or why not."""
    if fusion_of(model) is not None or not _is_on_gpu(model):
        return []
    try:
        return str(fuse(model, delayed_scaling=True)).splitlines()
    except (Unsupported, SpecMismatch) as error:
        return [f"the decoder is not fused: {error}"]


def _local_folder(model_name: str | Path) -> Path | None:
    """The folder that ``model_name`` means, or None for what can only be a hub id.

    Raises:
        BadInput: it reads like a path, and there is nothing.
    """
    path = Path(model_name).expanduser()
    if str(model_name) and path.is_dir():
        return path
    text = str(model_name)
    if text and path.exists():
        raise BadInput(f"{text} is a file; give the folder that holds config.json and the weights.")
    looks_like_path = (
        isinstance(model_name, Path) or text.startswith((".", "/", "~", "\\")) or text.count("/") > 1
    )
    if looks_like_path or text.endswith("/") or "\\" in text or not text:
        raise BadInput(f"there is no model folder {text!r}; check the path.")
    return None


def base_of(adapter: Path, base_model: str | Path | None = None) -> str:
    """The folder or hub id of an adapter's base model, ``base_model`` if that is given.

    Raises:
        BadInput: the adapter does not say, or its base is gone.
    """
    check_folder(adapter)
    base = base_model or read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base:
        raise BadInput(f"{adapter / ADAPTER_CONFIG} does not say what its base model is; pass base_model=...")
    if str(base).endswith(GGUF_ENDING) and Path(base).expanduser().is_file():
        return str(base)
    try:
        folder = _local_folder(base)
    except BadInput as error:
        if base_model:  # what is wrong with it says more than that the adapter's own base is another
            raise
        if (moved := model_around(adapter)) is not None:
            logger.warning("%s: its model is not in %s any more; the one around it is taken", adapter, base)
            return str(moved)
        raise BadInput(
            f"the adapter {adapter} was made on {base!r}, which is not there any more; pass base_model=..."
        ) from error
    if folder is not None and is_adapter_folder(folder) and not (folder / "config.json").is_file():
        raise BadInput(
            f"the adapter {adapter} names another adapter, {base!r}, as its base; pass base_model=..."
        )
    return str(folder or base)


def _choose_recipe(
    recipe: Any, load_in_4bit: bool, load_in_8bit: bool, full_finetuning: bool, loading: Loading
) -> Any:
    in_16bit = loading.hf.pop("load_in_16bit", False)
    if recipe is not None:
        return refuse_to_pack(recipe) if full_finetuning else recipe
    if full_finetuning or in_16bit:
        return None
    if load_in_8bit:
        return "int8"
    return "qlora_nf4" if load_in_4bit else None


def _load_model(
    where: str,
    checkpoint: Checkpoint | None,
    described: Described,
    recipe: Any,
    dtype: Any,
    loading: Loading,
    early: Early,
) -> Any:
    from fewbits.models.loading.streamed_loading import loader_for
    from fewbits.models.packing.model_shapes import auto_class_of

    config = described.config
    device_map = device_map_of(loading.device_map)
    settings = _quantization_settings(config, checkpoint, recipe, where, loading)
    if hasattr(settings.get("quantization_config"), "recipe"):
        check_device(settings["quantization_config"].recipe, next(iter((device_map or {"": "cpu"}).values())))
    loader = loader_for(auto_class_of(config), described.kind, device_map, early, described.look)
    model, info = loader.from_pretrained(
        where,
        config=config,
        dtype=dtype_of(dtype, device_map),
        device_map=device_map,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that the first one can be named in one sentence, below
        **settings,
        **options_of(checkpoint, loading),
    )
    _check_loaded(where, model, info)
    return model


def _quantization_settings(
    config: Any, checkpoint: Checkpoint | None, recipe: Any, where: str, loading: Loading
) -> dict[str, Any]:
    """What from_pretrained is told about quantisation; edits ``config`` for other libraries' ones."""
    from fewbits.models.loading.hf_quantizer import FewbitsConfig

    written = getattr(config, "quantization_config", None)
    settings: dict[str, Any] = {"use_safetensors": None if loading.allow_pickle else True}
    if written is None:
        if recipe is not None:
            settings["quantization_config"] = FewbitsConfig(recipe, allow_pickle=loading.allow_pickle)
        return settings
    method = quant_method_of(config)
    as_dict = written if isinstance(written, dict) else written.to_dict()
    if method == "fewbits":
        loading.notes.append(
            f"{where} is packed already, by the recipe {written['recipe']['name']!r}; it is used as it is."
        )
    elif method == "compressed-tensors" and not holds(as_dict):
        import_compressed_tensors()
        from transformers import CompressedTensorsConfig

        settings["quantization_config"] = CompressedTensorsConfig(dequantize=True)
        loading.notes.append(
            f"{where} is packed by compressed-tensors in a way that has no format here; it is decoded to "
            "plain weights, no recipe packs it."
        )
    elif method in FOREIGN:
        bits = "8" if as_dict.get("load_in_8bit") else "4"
        form = f"bitsandbytes {bits}-bit" if method == "bitsandbytes" else str(method)
        recipe = Recipe(name=f"bitsandbytes_{bits}bit" if method == "bitsandbytes" else str(method))
        config.quantization_config = FewbitsConfig(recipe, source=method, settings=as_dict).to_dict()
        loading.notes.append(f"{where} is in {form} form already; its codes and scales are used as they are.")
    else:
        raise Unsupported(
            f"{where} is quantised with {method!r}, which fewbits does not read; use the original model."
        )
    return settings


def _check_loaded(where: str, model: nn.Module, info: Mapping[str, Any]) -> None:
    """Nothing may be left at random values."""
    mismatched = sorted(info["mismatched_keys"], key=str)
    if mismatched:
        name, shape, expected = mismatched[0]
        raise BadCheckpoint(
            f"{where}: {name} has shape {tuple(shape)}, but config.json makes it {tuple(expected)}; the two "
            "files belong to different models."
        )
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    missing = sorted(set(info["missing_keys"]) - tied)
    if missing:
        raise BadCheckpoint(
            f"{where} lacks {missing[0]} ({len(missing)} tensors in all); copy or download it again."
        )


def with_merges(model: Any) -> Any:
    """Bind the savers of base and adapter as one model, also of one that writes no text."""
    model.save_pretrained_merged = partial(save_pretrained_merged, model)
    model.push_to_hub_merged = partial(push_to_hub_merged, model)
    return model


def with_methods(model: Any, inner: Any = None) -> Any:
    """Bind the savers of whole models, Unsloth's words and the careful ``generate`` to these instances.

    As partials: a bound method of another name than the function's cannot be read back by pickle.
    """
    for target in (model, inner):
        if target is not None:
            with_merges(target)
            target.save_pretrained_gguf = partial(save_pretrained_gguf, target)
            target.push_to_hub_gguf = partial(push_to_hub_gguf, target)
            target.fast_generate = partial(fast_generate, target)
            target.load_lora, target.save_lora = partial(load_lora, target), partial(save_lora, target)
            target.unload_lora = partial(unload_lora, target)
    base = model if inner is None else inner
    model.push_to_hub = partial(push_to_hub, model)
    base.generate, base.generate_batch = partial(generate, base), partial(generate_batch, base)
    return model
