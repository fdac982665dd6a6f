"""``save_pretrained_merged(..., save_method="gptq:int4_g128")`` and its kind: folders for other engines.

Each linear is merged, written by a codec (`fewbits.export.methods`) and read back by that engine's own
library; embedding, norms and head stay in the model's dtype. Memory holds one weight and the tensors of one
shard, and no 16-bit copy is made.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fewbits.errors import BadCheckpoint, BadInput, Unsupported
from fewbits.export.codec import Codec, Linear, Model, run_as_one
from fewbits.export.methods import codec_for, engine_and_method
from fewbits.formats.base import Packed
from fewbits.host.transposed import is_conv1d
from fewbits.host.unwrap import unwrap
from fewbits.models.folders.checkpoint import INDEX, WEIGHTS
from fewbits.models.folders.original import files_read
from fewbits.models.folders.records import replaces_own, write_record
from fewbits.models.folders.whole_folder import check_destination, whole_folder
from fewbits.models.merging.merge import save_pretrained_merged as save_merged
from fewbits.models.merging.merger import MergeReceipt
from fewbits.models.writing.exported_weights import ExportedWeights
from fewbits.models.writing.exporting import check_options
from fewbits.models.writing.input_moments import InputMoments
from fewbits.models.writing.proof import RECEIPT, ExportReceipt

_SHARD_BYTES = 1_000_000_000


def save_pretrained_merged(
    model: nn.Module,
    save_directory: str | Path,
    tokenizer: Any = None,
    save_method: str = "merged_16bit",
    **options: Any,
) -> MergeReceipt | ExportReceipt | None:
    """Save base and adapter as one model; see `fewbits.models.merging.merge.save_pretrained_merged`.

    Args:
        model: a PeftModel over a model of ours (or of transformers), or the model inside it.
        save_directory: the folder to write; never the one that the model was loaded from.
        tokenizer: saved beside the weights.
        save_method: one of that function, or an engine and a format: "compressed_tensors:w4a16",
            "gptq:int4_g128", "gptq_v2:...", "awq", "bitsandbytes:nf4", "torchao:int8" (the guide on exporting
            lists them). Linears that are packed so already keep their codes.
        options: of that function; for an engine also ``calibrate``, a JSON Lines file of "text" or "messages"
            that the schemes "fp8" and "nvfp4" take the scales of their activations from, and whole numbers in
            groups the columns whose error counts most; and ``check``: False leaves out reading back, and the
            receipt says so.

    Returns:
        What was done; None for "lora".

    Raises:
        BadInput, Unsupported, BadCheckpoint: as that function does; the package is missing.
    """
    chosen = engine_and_method(save_method)
    if chosen is None:
        for name in ("calibrate", "check"):
            if options.pop(name, None) is not None:
                raise BadInput(f"save_method={save_method!r} knows no option {name}; leave it out.")
        return save_merged(model, save_directory, tokenizer, save_method, **options)
    codec = codec_for(*chosen)  # refuses before anything is read
    place = replaces_own(save_directory, RECEIPT, options.pop("overwrite", None))
    check = bool(options.pop("check", True))
    rows = options.pop("calibrate", None)
    check_options("save_pretrained_merged", options)
    if codec.wants_inputs and rows is None:
        raise BadInput(
            f"{codec.label} keeps scales of activations that are measured on text; give rows of it: "
            "--calibrate rows.jsonl, in Python calibrate=."
        )
    if rows is not None and not (codec.wants_inputs or codec.takes_inputs):
        raise BadInput(
            f"{codec.label} takes its scales from the weights alone, and calibration text changes nothing "
            "there; leave out --calibrate (calibrate=)."
        )
    base = unwrap(model)
    read = files_read(base)
    check_destination(save_directory, overwrite=place.overwrite, protected=read)
    work = _Work(ExportedWeights(base, tokenizer), *chosen)
    if rows is not None:
        work.calibrate(rows)
    with whole_folder(
        save_directory,
        overwrite=place.overwrite,
        protected=read,
        replaced=[RECEIPT],
        written=place.written,
    ) as folder:
        receipt = work.write(folder, Path(save_directory), check=check)
        write_record(folder, RECEIPT, {"written": str(receipt).splitlines()})
    return receipt


@dataclass
class _Work:
    """One model on its way into one engine's folder."""

    weights: ExportedWeights
    engine: str
    method: str
    codec: Codec = field(init=False)
    shapes: dict[str, tuple[int, int]] = field(init=False)
    inputs: Mapping[str, InputMoments] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    rounded_again: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shapes = _linears(self.weights)
        formats = {f for name in self.shapes if (f := self.weights.format_of(name)) is not None}
        packed = {name: p for name in self.shapes if (p := self.weights.stored(name)) is not None}
        model = Model(self.shapes, self.weights.base.dtype, formats, packed)
        self.codec = codec_for(self.engine, self.method, model)

    def calibrate(self, rows: str | Path) -> None:
        """Measure what each linear is given on a text."""
        self.inputs = self.weights.inputs(rows)

    def write(self, folder: Path, published: Path, *, check: bool) -> ExportReceipt:
        """All files of the folder, read back if ``check``."""
        # In the model's own dtype: transformers decodes in the dtype of the scales, whatever it loads into.
        files: dict[str, Path] = {}
        for number, tensors in enumerate(self._shards()):
            file = folder / f"{number}.partial"
            save_file(tensors, file, metadata=self.codec.metadata(tensors))
            files.update(dict.fromkeys(tensors, file))
        files = _name_shards(folder, files)
        _write_config(self.weights, folder, self.codec.config())
        measured = None
        if check:
            measured = self.weights.proved(lambda name: self._read(files, name))
            _check_companions(self.weights, folder)
        linears = len(self.shapes)
        return ExportReceipt(
            path=published,
            method=self.codec.label,
            weights_from=self.weights.weights_from,
            num_bytes=sum(file.stat().st_size for file in set(files.values())),
            num_tensors={self.codec.kind: linears, "plain": len(self.weights.shapes) - linears},
            fallbacks=(),
            measured=measured,
            reader=self.codec.reader,
            kept=len(self.kept),
            rounded_again=tuple(self.rounded_again),
            calibrated_on=max((moments.rows for moments in self.inputs.values()), default=0),
            checks=("vocabulary", "special tokens", "chat template", "tied head"),
        )

    def _shards(self) -> Iterator[dict[str, Tensor]]:
        pending: dict[str, Tensor] = {}
        for name in self.weights.shapes:
            stem = name.removesuffix(".weight")
            if stem in self.shapes and name.endswith(".weight"):
                linear = self._linear(stem)
                parts = self.codec.write(linear)
                if linear.packed is not None:
                    (self.kept if self.codec.keeps(linear) else self.rounded_again).append(stem)
                pending.update({f"{stem}.{part}": t.contiguous() for part, t in parts.items()})
            else:
                pending[name] = self._plain(name)
            if sum(t.nbytes for t in pending.values()) > _SHARD_BYTES:
                yield pending
                pending = {}
        if pending:
            yield pending

    def _plain(self, name: str) -> Tensor:
        weight = self.weights.weight(name)
        if not bool(weight.isfinite().all()):
            raise BadCheckpoint(
                f"{name} holds a NaN or an infinity, so nothing was written; use an earlier checkpoint of"
                " the model."
            )
        return weight.to(self.weights.base.dtype).contiguous()

    def _linear(self, name: str) -> Linear:
        others = [n for n in run_as_one(name) if n in self.shapes] if self.codec.shares_scale else []
        alike: list[Packed] = []
        largest = 0.0
        for other in others:
            packed = self.weights.packed(other) if other != name else None
            alike += [] if packed is None else [packed]
            largest = max(largest, float(self.weights.weight(f"{other}.weight").abs().max()))
        moments = self.inputs.get(name)
        return Linear(
            name,
            self.weights.weight(f"{name}.weight"),
            self.weights.packed(name),
            absmax=largest,
            alike=tuple(alike) if len(alike) == max(len(others) - 1, 0) else None,
            input_absmax=None if moments is None else moments.absmax,
            importance=None if moments is None else moments.mean_square,
        )

    def _read(self, files: Mapping[str, Path], name: str) -> Tensor:
        """A weight, float32, as the other library decodes it from the files."""

        def tensor(stored: str) -> Tensor:
            with safe_open(files[stored], framework="pt") as stream:
                values: Tensor = stream.get_tensor(stored)
            return values

        stem = name.removesuffix(".weight")
        if stem not in self.shapes or not name.endswith(".weight"):
            return tensor(name).float()
        parts = {part: tensor(f"{stem}.{part}") for part in self.codec.parts if f"{stem}.{part}" in files}
        return self.codec.read(stem, parts)


def _linears(weights: ExportedWeights) -> dict[str, tuple[int, int]]:
    """The shapes (N, K) of the linears that are packed: all but the head."""
    named = dict(weights.skeleton().named_modules())
    conv1d = next((name for name, module in named.items() if is_conv1d(module)), None)
    if conv1d is not None:
        raise Unsupported(
            f"{conv1d} is a Conv1D, as GPT-2 has them, and these engines pack linears alone; write"
            " merged_16bit or merged_4bit."
        )
    stacked = next((name for name, shape in weights.shapes.items() if len(shape) == 3), None)
    if stacked is not None:
        raise Unsupported(
            f"{stacked} holds the weights of all experts in one tensor, and linears alone are written in "
            "these engines' layouts; write 16bit (in Python merged_16bit), and quantise it with their tools."
        )
    return {
        name: (module.out_features, module.in_features)
        for name, module in named.items()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }


def _name_shards(folder: Path, files: dict[str, Path]) -> dict[str, Path]:
    """Give the files their names in the end, and write their index if there are several."""
    shards = sorted(set(files.values()), key=lambda file: int(file.stem))
    count = len(shards)
    names = (
        [WEIGHTS]
        if count == 1
        else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    )
    places = {shard: folder / name for shard, name in zip(shards, names, strict=True)}
    for shard, place in places.items():
        shard.replace(place)
    if count > 1:
        total = sum(place.stat().st_size for place in places.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {n: places[f].name for n, f in files.items()},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return {name: places[file] for name, file in files.items()}


def _write_config(weights: ExportedWeights, folder: Path, described: dict[str, Any]) -> None:
    config = copy.deepcopy(weights.base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = weights.base.dtype
    config.architectures = [type(weights.base).__name__]
    config.tie_word_embeddings = weights.head_is_tied
    config.save_pretrained(folder)
    file = folder / "config.json"
    text = {**json.loads(file.read_text(encoding="utf-8")), "quantization_config": described}
    file.write_text(json.dumps(text, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if getattr(weights.base, "generation_config", None) is not None:
        weights.base.generation_config.save_pretrained(folder)
    weights.tokenizer.save_pretrained(folder)


def _check_companions(weights: ExportedWeights, folder: Path) -> None:
    """Compare tokenizer and configuration, opened again, with the model's.

    Raises:
        BadCheckpoint: something is not what it should be.
    """
    from transformers import AutoConfig, AutoTokenizer

    there = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    here, config = weights.tokenizer, AutoConfig.from_pretrained(str(folder), local_files_only=True)
    stops = getattr(getattr(weights.base, "generation_config", None), "eos_token_id", None)
    file = folder / "generation_config.json"
    stops_in_file = (
        json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    )
    pairs = {
        "the vocabulary": (there.get_vocab(), here.get_vocab()),
        "the end-of-text token": (there.eos_token_id, here.eos_token_id),
        "the tokens that end a text": (stops_in_file, stops),
        "the beginning-of-text token": (there.bos_token_id, here.bos_token_id),
        "the chat template": (there.chat_template, here.chat_template),
        "the tokens of a text": (there("One day.").input_ids, here("One day.").input_ids),
        "the output head": (bool(config.tie_word_embeddings), weights.head_is_tied),
    }
    for what, (written, expected) in pairs.items():
        if written != expected:
            raise BadCheckpoint(
                f"{what} reads back from the folder as something else; nothing was written, please report "
                "this."
            )
