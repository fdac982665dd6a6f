"""From a model in memory to the files of other engines: ``save_pretrained_gguf`` and its kind.

The weights are merged and decoded one tensor at a time (`fewbits.models.merge.Merger`), written by
`fewbits.export`, read back by the other side's own library and compared, before the folder gets its name.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint, BadInput, Unsupported
from fewbits.export.gguf_file import GGUFFile, architecture_of, plan_tensors, write_gguf
from fewbits.export.gguf_types import import_gguf, method_named
from fewbits.export.gguf_vocabulary import Vocabulary, vocabulary_of
from fewbits.models.export_proof import ExportReceipt, measure
from fewbits.models.merge import IGNORED_OPTIONS, Merger
from fewbits.models.original import source_folder
from fewbits.models.streamed_logits import skeleton
from fewbits.models.whole_folder import check_destination, whole_folder

RECEIPT = "export.json"


def save_pretrained_gguf(
    model: Any,
    save_directory: str | Path,
    tokenizer: Any = None,
    quantization_method: str | Sequence[str] = "q8_0",
    *,
    overwrite: bool = False,
    **options: Any,
) -> ExportReceipt | list[ExportReceipt]:
    """Write GGUF for llama.cpp and what is built on it: base and adapter as one file, whole or not at all.

    Args:
        model: a PeftModel over a model of ours (or of transformers), or the model inside it.
        save_directory: the folder to write; never the one that the model was loaded from.
        tokenizer: the model's; None takes the one in the folder that the model was loaded from.
        quantization_method: such as "q8_0", "q4_k_m", "q6_k", "f16"; a list writes a file for each.
        overwrite: replace an earlier export in the folder with all files that it wrote, also those of other
            methods; what else lies there stays. False refuses a folder that is not empty.
        options: names that Unsloth's method takes; ``push_to_hub`` is refused, the rest choose nothing here.

    Returns:
        The receipt; a list of them for a list of methods.

    Raises:
        BadInput, Unsupported: a folder that is taken or was read; an unknown method; a family, a tokenizer or
            an adapter without a GGUF form; the package gguf is missing.
        BadCheckpoint: what was written does not read back as it should; nothing was written.
    """
    check_options("save_pretrained_gguf", options)
    one = isinstance(quantization_method, str)
    methods = [method_named(m) for m in _as_list(quantization_method)]
    import_gguf()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    source = source_folder(base)
    read = [] if source is None else [source]
    check_destination(save_directory, overwrite=overwrite, marker=RECEIPT, protected=read)
    weights = ExportedWeights(base, tokenizer)
    architecture_of(base.config.get_text_config())
    vocabulary = weights.vocabulary()
    receipts = []
    earlier = _files_of_earlier(Path(save_directory)) if overwrite else []
    with whole_folder(
        save_directory, overwrite=overwrite, marker=RECEIPT, protected=read, replaced=earlier
    ) as folder:
        for method in methods:
            receipts.append(_write_one(weights, vocabulary, folder, Path(save_directory), method))
        lines = {r.path.name: str(r).splitlines() for r in receipts}
        (folder / RECEIPT).write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")
    return receipts[0] if one else receipts


def _files_of_earlier(folder: Path) -> list[str]:
    """The files that an export in ``folder`` names in its receipt; none where there is none."""
    try:
        lines = json.loads((folder.expanduser() / RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    return [name for name in lines if name.endswith(".gguf")] if isinstance(lines, dict) else []


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def check_options(method: str, options: dict[str, Any]) -> None:
    """Refuse what an export cannot do, and options that nobody knows."""
    if options.pop("push_to_hub", False):
        raise Unsupported(f"{method} writes to a folder only; upload that folder with `hf upload`.")
    known = IGNORED_OPTIONS | {"first_conversion", "max_shard_size"}
    unknown = sorted({name for name, value in options.items() if value is not None} - known)
    if unknown:
        raise BadInput(f"{method} knows no option {', '.join(unknown)}; leave it out.")


class ExportedWeights:
    """A model's merged weights, by name and one at a time, with what else an export needs of it.

    Args:
        base: the model without PEFT around it.
        tokenizer: its tokenizer, or None for the one beside its weights.

    Raises:
        BadInput: there is no tokenizer.
        BadCheckpoint: a tensor of the model is nowhere.
    """

    def __init__(self, base: Any, tokenizer: Any) -> None:
        self.base, self.config = base, base.config.get_text_config()
        self.tokenizer = _tokenizer(base) if tokenizer is None else tokenizer
        self.merger = Merger(base, torch.float32)
        self.head_is_tied = self.merger.head_is_tied
        shapes = {n: tuple(t.shape) for n, t in self.skeleton().state_dict().items()}
        found = dict(self.merger.weights())
        tied = {"lm_head.weight"} if self.head_is_tied else set()
        absent = sorted(set(shapes) - set(found) - tied)
        if absent:
            raise BadCheckpoint(
                f"the model's {absent[0]} is nowhere; load it again from its original folder."
            )
        self._found = found
        self.shapes: Mapping[str, tuple[int, ...]] = {n: shapes[n] for n in shapes if n not in tied}

    def skeleton(self) -> Any:
        """The plain model without weights, on the meta device."""
        return skeleton(self.base, head_is_tied=self.head_is_tied)

    def weight(self, name: str) -> Tensor:
        """One merged weight, float32, on the CPU."""
        return self._found[name]()

    @property
    def from_memory(self) -> bool:
        """True if the weights are those that the model computes with, not the ones it was packed from."""
        return self.merger.original is None or not self.merger.packed

    def vocabulary(self) -> Vocabulary:
        """The tokenizer in GGUF's terms."""
        stops = getattr(getattr(self.base, "generation_config", None), "eos_token_id", None)
        numbers = stops if isinstance(stops, list) else [] if stops is None else [stops]
        return vocabulary_of(self.tokenizer, self.shapes["model.embed_tokens.weight"][0], numbers)

    def proved(self, written: Callable[[str], Tensor]) -> Any:
        """`measure` over all of it."""
        return measure(
            self.base,
            self.tokenizer,
            self.weight,
            written,
            head_is_tied=self.head_is_tied,
            from_memory=self.from_memory,
        )


def _tokenizer(base: Any) -> Any:
    from transformers import AutoTokenizer

    folder = source_folder(base)
    if folder is None or not any(folder.glob("tokenizer*")):
        raise BadInput("an export needs the tokenizer, and there is none beside the model; pass tokenizer=.")
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def _write_one(
    weights: ExportedWeights, vocabulary: Vocabulary, folder: Path, published: Path, method: str
) -> ExportReceipt:
    planned = plan_tensors(weights.config, weights.shapes, method, head_is_tied=weights.head_is_tied)
    name = Path(str(getattr(weights.base.config, "name_or_path", "") or "model")).name
    file = folder / f"{name}-{method.upper()}.gguf"
    write_gguf(file, weights.config, vocabulary, planned, weights.weight, method=method)
    back = GGUFFile(file, planned)
    _check_metadata(back, vocabulary, weights)
    measured = weights.proved(back.weight)
    fallbacks = tuple(
        f"{t.place} is {t.kind} and not {t.wanted}, its rows have {t.shape[-1]} values"
        for t in planned
        if t.wanted is not None
    )
    return ExportReceipt(
        path=published / file.name,
        method=f"GGUF {method.upper()}",
        weights_from=weights.merger.weights_from,
        num_bytes=file.stat().st_size,
        num_tensors=dict(Counter(t.kind for t in planned)),
        fallbacks=fallbacks,
        worst=measured.worst,
        logits_error=measured.logits_error,
        tolerance=measured.tolerance,
        kl=measured.kl,
        top1=measured.top1,
        checks=("vocabulary", "special tokens", "chat template", "tied head"),
    )


def _check_metadata(back: GGUFFile, vocabulary: Vocabulary, weights: ExportedWeights) -> None:
    """Compare the file's metadata with the tokenizer and the model themselves.

    Raises:
        BadCheckpoint: something is not what it should be.
    """
    tokenizer = weights.tokenizer
    tokens = list(back.value("tokenizer.ggml.tokens") or ())
    known = sorted(tokenizer.get_vocab().values())
    pairs = {
        "the vocabulary": ([tokens[n] for n in known], tokenizer.convert_ids_to_tokens(known)),
        "the end-of-text token": (back.value("tokenizer.ggml.eos_token_id"), tokenizer.eos_token_id),
        "the beginning-of-text token": (back.value("tokenizer.ggml.bos_token_id"), tokenizer.bos_token_id),
        "the chat template": (back.value("tokenizer.chat_template"), vocabulary.chat_template),
        "the number of tokens": (len(tokens), weights.shapes["model.embed_tokens.weight"][0]),
        "the output head": (back.has("output.weight"), not weights.head_is_tied),
    }
    for what, (found, wanted) in pairs.items():
        if found != wanted:
            raise BadCheckpoint(
                f"{what} reads back from the GGUF file as something else; nothing was written, please report "
                "this."
            )
