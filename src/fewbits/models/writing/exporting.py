"""From a model in memory to the files of other engines: ``save_pretrained_gguf`` and its kind.

The weights are merged and decoded one tensor at a time (`fewbits.models.merging.merger.Merger`), written by
`fewbits.export`, read back by the other side's own library and compared, before the folder gets its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fewbits.errors import BadCheckpoint, BadInput, Unsupported
from fewbits.export.gguf_file import (
    GGUFFile,
    PlannedTensor,
    Source,
    architecture_of,
    plan_tensors,
    write_gguf,
)
from fewbits.export.gguf_types import METHODS, import_gguf, method_named
from fewbits.export.gguf_vocabulary import Vocabulary
from fewbits.formats.base import Packed
from fewbits.host.unwrap import unwrap
from fewbits.models.folders.original import files_read
from fewbits.models.folders.records import read_record, refuse_others, replaces_own, write_record
from fewbits.models.folders.whole_folder import check_destination, whole_folder
from fewbits.models.merging.merge import IGNORED_OPTIONS
from fewbits.models.writing.exported_weights import ExportedWeights
from fewbits.models.writing.proof import RECEIPT, ExportReceipt

if TYPE_CHECKING:
    from torch import nn

_WIDE = ("f32", "f16", "bf16")  # decoded weights are at home in these


def save_pretrained_gguf(
    model: nn.Module,
    save_directory: str | Path,
    tokenizer: Any = None,
    quantization_method: str | Sequence[str] = "q8_0",
    *,
    overwrite: bool | None = None,
    calibrate: str | Path | None = None,
    check: bool = True,
    **options: Any,
) -> ExportReceipt | list[ExportReceipt]:
    """Write GGUF for llama.cpp and what is built on it: base and adapter as one file, whole or not at all.

    Args:
        model: a PeftModel over a model of ours (or of transformers), or the model inside it.
        save_directory: the folder to write; never the one that the model was loaded from.
        tokenizer: the model's; None takes the one in the folder that the model was loaded from.
        quantization_method: such as "q8_0", "q4_k_m", "q6_k", "f16"; a list writes a file for each.
        overwrite: None: in the folder of an earlier export its file of the same name is replaced, and all
            else stays; any other folder that is not empty is refused. True: all files that it wrote go, also
            those of other methods; what else lies there stays. False: a folder that is not empty is refused.
        calibrate: a JSON Lines file of "text" or "messages"; by what each linear is given on it, columns
            count more or less where weights are rounded (llama.cpp's importance matrix). None: all alike.
        check: read the file back and compare; without, the receipt says that nothing was proved.
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
    base = unwrap(model)
    read = files_read(base)
    place = replaces_own(save_directory, RECEIPT, overwrite)
    target = check_destination(save_directory, overwrite=place.overwrite, marker=RECEIPT, protected=read)
    weights = ExportedWeights(base, tokenizer)
    architecture_of(base.config.get_text_config())
    work = _Work(weights, weights.vocabulary(), Path(save_directory), check)
    if calibrate is not None:
        work.calibrate(calibrate)
    names = [work.name_of(method) for method in methods]
    told = _told(target) if place.overwrite else {}
    written = place.written
    if written is not None:  # files of other methods stay, as when a script writes one after the other
        written = (written & set(names)) | {RECEIPT}
        refuse_others(target, names, written)
    with whole_folder(
        save_directory,
        overwrite=place.overwrite,
        marker=RECEIPT,
        protected=read,
        replaced=told,
        written=written,
    ) as folder:
        receipts = [work.write(folder, method) for method in methods]
        lines = {} if written is None else {n: said for n, said in told.items() if (target / n).exists()}
        lines.update({r.path.name: str(r).splitlines() for r in receipts})
        write_record(folder, RECEIPT, lines, earlier=lines)
    return receipts[0] if one else receipts


def _told(folder: Path) -> dict[str, list[str]]:
    """What an export in ``folder`` tells of each of its files; nothing where there is none."""
    return {name: said for name, said in read_record(folder / RECEIPT).items() if name.endswith(".gguf")}


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def check_options(method: str, options: dict[str, Any]) -> None:
    """Refuse what an export cannot do, and options that nobody knows."""
    if options.pop("push_to_hub", False):
        way = "push_to_hub_gguf" if method == "save_pretrained_gguf" else "push_to_hub_merged"
        raise Unsupported(f"{method} writes to a folder only; {way}(name, ...) uploads.")
    names = IGNORED_OPTIONS | {"first_conversion", "max_shard_size"}
    unknown = sorted({name for name, value in options.items() if value is not None} - names)
    if unknown:
        raise BadInput(f"{method} knows no option {', '.join(unknown)}; leave it out.")


@dataclass
class _Work:
    """One model on its way into GGUF files."""

    weights: ExportedWeights
    vocabulary: Vocabulary
    published: Path
    check: bool
    importance: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0

    def calibrate(self, rows: str | Path) -> None:
        """Measure which columns of each linear's input are large."""
        moments = self.weights.inputs(rows)
        self.importance = {name: m.mean_square for name, m in moments.items() if bool(m.mean_square.any())}
        self.tokens = max(m.rows for m in moments.values())

    def name_of(self, method: str) -> str:
        """The file's, after the model's."""
        name = Path(str(getattr(self.weights.base.config, "name_or_path", "") or "model")).name
        return f"{_without_method(name)}-{method.upper()}.gguf"

    def write(self, folder: Path, method: str) -> ExportReceipt:
        """One file, read back if that was asked for."""
        weights = self.weights
        planned = plan_tensors(weights.config, weights.shapes, method, head_is_tied=weights.head_is_tied)
        file = folder / self.name_of(method)
        unchanged: list[str] = []
        source = Source(weights.weight, partial(self._packed, unchanged), self.importance)
        write_gguf(file, weights.config, self.vocabulary, planned, source, method=method)
        measured = None
        if self.check:
            back = GGUFFile(file, planned)
            _check_metadata(back, self.vocabulary, weights)
            measured = weights.proved(back.weight)
        linears = list(dict.fromkeys(t.name.removesuffix(".weight") for t in planned))
        packed = [linear for linear in linears if weights.format_of(linear) is not None]
        return ExportReceipt(
            path=self.published / file.name,
            method=f"GGUF {method.upper()}",
            weights_from=weights.weights_from,
            num_bytes=file.stat().st_size,
            num_tensors=dict(Counter(t.kind for t in planned)),
            fallbacks=tuple(
                f"{t.place} is {t.kind} and not {t.wanted}, its rows have {t.shape[-1]} values"
                for t in planned
                if t.wanted is not None
            ),
            measured=measured,
            reader=f"gguf {version('gguf')}",
            kept=len(set(unchanged)),
            rounded_again=() if method in _WIDE else tuple(n for n in packed if n not in unchanged),
            calibrated_on=self.tokens,
            checks=("vocabulary", "special tokens", "chat template", "tied head"),
        )

    def _packed(self, unchanged: list[str], tensor: PlannedTensor) -> Packed | None:
        """A linear's blocks where the model has them in that type; its name goes into ``unchanged``."""
        linear = tensor.name.removesuffix(".weight")
        format = self.weights.format_of(linear) if len(tensor.shape) > 1 else None
        if format is None or format.contract.names.get("gguf") != tensor.kind:
            return None
        unchanged.append(linear)
        return self.weights.packed(linear)


def _without_method(name: str) -> str:
    """The name of a model without what an export adds to it."""
    stem = name.removesuffix(".gguf")
    return next((stem[: -len(m) - 1] for m in METHODS if stem.lower().endswith(f"-{m}")), stem)


def _check_metadata(back: GGUFFile, vocabulary: Vocabulary, weights: ExportedWeights) -> None:
    """Compare the file's metadata with the tokenizer and the model themselves.

    Raises:
        BadCheckpoint: something is not what it should be.
    """
    tokenizer = weights.tokenizer
    tokens = list(back.value("tokenizer.ggml.tokens") or ())
    ids = sorted(tokenizer.get_vocab().values())
    pairs = {
        "the vocabulary": ([tokens[n] for n in ids], tokenizer.convert_ids_to_tokens(ids)),
        "the end-of-text token": (back.value("tokenizer.ggml.eos_token_id"), tokenizer.eos_token_id),
        "the beginning-of-text token": (back.value("tokenizer.ggml.bos_token_id"), tokenizer.bos_token_id),
        "the chat template": (back.value("tokenizer.chat_template"), vocabulary.chat_template),
        "the number of tokens": (len(tokens), weights.shapes["model.embed_tokens.weight"][0]),
        "the output head": (back.has("output.weight"), not weights.head_is_tied),
    }
    for what, (in_file, expected) in pairs.items():
        if in_file != expected:
            raise BadCheckpoint(
                f"{what} reads back from the GGUF file as something else; nothing was written, please report "
                "this."
            )
