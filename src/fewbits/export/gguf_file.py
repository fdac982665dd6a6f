"""GGUF files: what llama.cpp reads, written tensor by tensor through the ``gguf`` package and read back.

Names come from the package's table, the metadata from the model's configuration. llama.cpp's architecture
"llama" turns neighbouring values of a head where transformers turns the two halves, so the rows of its query
and key projections change places; Qwen's do not.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.export.gguf_types import METHODS, Sizes, encode, import_gguf, type_of
from fewbits.export.gguf_vocabulary import Vocabulary
from fewbits.families.registry import family_of, known_families, model_type_of, written_spec
from fewbits.families.shapes import head_dim
from fewbits.formats.base import Packed

_TURNED = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the file.

    Attributes:
        name: in transformers.
        place: in GGUF.
        shape: rows first.
        kind: its GGUF type.
        wanted: the type that the mix gives it, where its rows do not allow that one; else None.
        turned_heads: heads whose halves are interleaved; 0 for none.
        rows: of each expert's weight, that stand here: gate and up are one tensor in transformers. None: all.
    """

    name: str
    place: str
    shape: tuple[int, ...]
    kind: str
    wanted: str | None
    turned_heads: int
    rows: tuple[int, int] | None = None

    def cut(self, weight: Tensor) -> Tensor:
        """The rows that stand here of (..., N, K); of codes (..., N, bytes of a row) as well."""
        return weight if self.rows is None else weight[..., slice(*self.rows), :].contiguous()


def architecture_of(config: Any) -> str:
    """GGUF's name of the architecture.

    Raises:
        Unsupported: a family, or a feature of one, that is not written.
    """
    kind, spec = model_type_of(config), written_spec(config)
    if spec is None or spec.gguf is None:
        writable = [name for name in known_families() if getattr(family_of(name), "gguf", None)]
        raise Unsupported(
            f"models of the family {kind!r} are not written to GGUF yet; {', '.join(writable)} are."
        )
    if getattr(config, "use_sliding_window", False):
        raise Unsupported(
            f"this {kind} model has layers with a sliding window, which the GGUF architecture "
            f"{spec.gguf!r} has not; set use_sliding_window=False if its texts are shorter."
        )
    if getattr(config, "hidden_act", "silu") != "silu":
        raise Unsupported(
            f"this model's MLP computes {config.hidden_act!r}, and llama.cpp computes silu there; it has no "
            "GGUF form."
        )
    if spec.experts is not None:
        _check_experts(config, spec.gguf)
    return spec.gguf


def _check_experts(config: Any, arch: str) -> None:
    """Refuse mixtures that llama.cpp would compute otherwise."""
    dense = list(getattr(config, "mlp_only_layers", None) or ())
    if dense or getattr(config, "decoder_sparse_step", 1) != 1:
        raise Unsupported(
            f"some layers of this model have no experts, and all layers of GGUF's architecture {arch!r} do;"
            " export with --to 16bit instead."
        )
    sums_to_one = getattr(config, "norm_topk_prob", True)
    if sums_to_one != (arch != "olmoe"):
        raise Unsupported(
            f"norm_topk_prob is {sums_to_one} in this model, and llama.cpp computes {arch!r} with"
            f" {not sums_to_one}; export with --to 16bit instead."
        )
    if arch == "olmoe" and config.num_key_value_heads != config.num_attention_heads:
        raise Unsupported(
            "this OLMoE has fewer heads of keys than of queries, and llama.cpp reads as many of both; export"
            " with --to 16bit instead."
        )
    for name in ("clip_qkv", "sliding_window"):
        if getattr(config, name, None) is not None:
            raise Unsupported(
                f"{name} is {getattr(config, name)} in this model, which GGUF's architecture {arch!r} has"
                " not; export with --to 16bit instead."
            )


def plan_tensors(
    config: Any, shapes: Mapping[str, tuple[int, ...]], method: str, *, head_is_tied: bool
) -> list[PlannedTensor]:
    """Name, type and row order of every tensor.

    Args:
        config: the model's text configuration.
        shapes: every tensor's shape, by transformers' names.
        method: a key of `METHODS`.
        head_is_tied: the embedding is the output head too; then the latter is not written.

    Raises:
        Unsupported: GGUF's architecture has no place for a tensor.
    """
    gguf = import_gguf()
    arch = architecture_of(config)
    number = next(n for n, text in gguf.MODEL_ARCH_NAMES.items() if text == arch)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    count = _expert_count(config)
    sizes = Sizes(config.num_hidden_layers, heads["q"] // heads["k"], head_is_tied, count)
    planned = []
    for name, shape in shapes.items():
        if head_is_tied and name == "lm_head.weight":
            continue
        if count and len(shape) == 3:
            planned += [
                PlannedTensor(name, place, part, *type_of(place, part, method, sizes), 0, rows)
                for place, part, rows in _places_of_experts(name, shape)
            ]
            continue
        place = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if place is None:
            raise Unsupported(
                f"GGUF's architecture {arch!r} has no place for the tensor {name}; export with --to 16bit"
                " instead."
            )
        kind, better = type_of(place, shape, method, sizes)
        is_interleaved = arch == "llama" and name.endswith(_TURNED)
        planned.append(
            PlannedTensor(
                name, place, shape, kind, better, heads[name.split(".")[-2][0]] if is_interleaved else 0
            )
        )
    return planned


def _expert_count(config: Any) -> int:
    """How many experts a layer has; 0 for dense ones."""
    spec = written_spec(config)
    return 0 if spec is None or spec.experts is None else int(getattr(config, spec.experts.count))


def _places_of_experts(
    name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, int] | None]]:
    """Place, shape and rows of each tensor that GGUF makes of one of all experts (E, N, K)."""
    layer, leaf = name.split(".layers.")[1].split(".")[0], name.rpartition(".")[2]
    if leaf == "down_proj":
        yield f"blk.{layer}.ffn_down_exps.weight", shape, None
        return
    half = shape[1] // 2
    for kind, first in (("gate", 0), ("up", half)):
        yield f"blk.{layer}.ffn_{kind}_exps.weight", (shape[0], half, shape[2]), (first, first + half)


@dataclass(frozen=True)
class Source:
    """Where the tensors of a file come from, by their names in transformers.

    Attributes:
        weight: gives one, floating point.
        packed: gives a planned tensor that the model has in that type's blocks already, or None.
        importance: (K,) of a linear's inputs, by its name; empty without calibration.
    """

    weight: Callable[[str], Tensor]
    packed: Callable[[PlannedTensor], Packed | None] = lambda tensor: None
    importance: Mapping[str, Tensor] = field(default_factory=dict)

    def bytes_of(self, tensor: PlannedTensor) -> Any:
        """The tensor as the file holds it, a numpy array; what is packed in its type is not rounded again."""
        packed = self.packed(tensor)
        if packed is not None:
            codes = tensor.cut(packed.codes).cpu()
            return (interleave_halves(codes, tensor.turned_heads) if tensor.turned_heads else codes).numpy()
        columns = self.importance.get(tensor.name.removesuffix(".weight"))
        return encode(_for_file(tensor, self.weight(tensor.name)), tensor.kind, columns)


def write_gguf(
    file: Path,
    config: Any,
    vocabulary: Vocabulary,
    planned: Iterable[PlannedTensor],
    source: Source,
    *,
    method: str,
) -> None:
    """Write one file; the memory is that of one tensor.

    Args:
        file: to write.
        config: the model's text configuration.
        vocabulary: of its tokenizer.
        planned: the tensors, in the file's order.
        source: of the tensors.
        method: a key of `METHODS`, for the metadata.

    Raises:
        BadCheckpoint: a tensor is not finite, or of another shape than planned.
        Unsupported: a way of stretching positions that is not written.
    """
    gguf = import_gguf()
    planned = list(planned)
    writer = gguf.GGUFWriter(file, architecture_of(config))
    _describe(writer, config, method)
    _describe_vocabulary(writer, vocabulary)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for tensor in planned:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        count = math.prod(tensor.shape)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        # The writer takes shapes in values for every dtype but uint8, whose shapes are in bytes.
        dtype, nbytes = np.dtype(np.float32), count // block * size
        writer.add_tensor_info(tensor.place, tensor.shape, dtype, nbytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for tensor in planned:
            _write_tensor(writer, source.bytes_of(tensor))
    finally:
        writer.close()


def _write_tensor(writer: Any, values: Any) -> None:
    try:
        writer.write_tensor_data(values)
    except OSError as error:
        if error.errno is not None:
            raise
        # What numpy says when the disk takes only a part of an array.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def _for_file(tensor: PlannedTensor, weight: Tensor) -> Tensor:
    weight = tensor.cut(weight)
    if tuple(weight.shape) != tensor.shape:
        raise BadCheckpoint(
            f"{tensor.name} has shape {tuple(weight.shape)}, but the configuration makes it {tensor.shape}; "
            "nothing was written."
        )
    weight = weight.float()
    if not bool(weight.isfinite().all()):
        raise BadCheckpoint(f"{tensor.name} holds a NaN or an infinity; nothing was written.")
    return interleave_halves(weight, tensor.turned_heads) if tensor.turned_heads else weight


def interleave_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head (h D, ...) from "first half, second half" to "pair by pair"."""
    pairs = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def separate_halves(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `interleave_halves`."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _describe(writer: Any, config: Any, method: str) -> None:
    gguf = import_gguf()
    name = Path(str(getattr(config, "name_or_path", "") or "model")).name
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    if count := _expert_count(config):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        width = getattr(config, "moe_intermediate_size", None)
        if width is not None:
            writer.add_expert_feed_forward_length(width)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim(config))
    rope = rope_of(config)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    _describe_stretching(writer, rope)
    writer.add_vocab_size(config.vocab_size)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType[METHODS[method][1]])


def rope_of(config: Any) -> dict[str, Any]:
    """The rotary embedding's parameters; ``rope_theta`` and ``rope_type`` are always there."""
    fields = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return {"rope_theta": getattr(config, "rope_theta", 10000.0), "rope_type": "default", **fields}


def _describe_stretching(writer: Any, rope: Mapping[str, Any]) -> None:
    gguf = import_gguf()
    kind = rope["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        if "original_max_position_embeddings" not in rope:
            raise Unsupported(
                "this model's yarn positions lack original_max_position_embeddings; add it to config.json."
            )
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind not in ("default", "llama3"):  # llama3's are a tensor, see rope_factors
        raise Unsupported(
            f"the rope scaling {kind!r} of this model cannot be written to GGUF yet; export with --to"
            " 16bit and use"
            " llama.cpp's converter."
        )


def rope_factors(config: Any) -> Any:
    """Llama 3.1's divisor of each frequency, float32 (D / 2,); None for other models."""
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return None
    dim, low, high = head_dim(config), rope["low_freq_factor"], rope["high_freq_factor"]
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float().numpy()


def _describe_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.scores is not None:
        writer.add_token_scores(list(vocabulary.scores))
    if vocabulary.merges is not None:
        writer.add_token_merges(list(vocabulary.merges))
    for name, number in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(vocabulary.adds["bos"])
    writer.add_add_eos_token(vocabulary.adds["eos"])
    if "space_prefix" in vocabulary.adds:
        writer.add_add_space_prefix(vocabulary.adds["space_prefix"])
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


class GGUFFile:
    """A file read back: tensors by transformers' names, metadata by GGUF's.

    Args:
        file: to read.
        planned: what was written in it.
    """

    def __init__(self, file: Path, planned: Iterable[PlannedTensor]) -> None:
        self.reader = import_gguf().GGUFReader(file)
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self._planned: dict[str, list[PlannedTensor]] = {}
        for tensor in planned:
            self._planned.setdefault(tensor.name, []).append(tensor)

    def weight(self, name: str) -> Tensor:
        """The tensor with this name in transformers, in that shape, float32.

        Raises:
            BadCheckpoint: the file lacks it.
        """
        parts = [self._part(plan) for plan in self._planned[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)

    def _part(self, plan: PlannedTensor) -> Tensor:
        tensor = self._tensors.get(plan.place)
        if tensor is None:
            raise BadCheckpoint(f"the GGUF file lacks {plan.place} when it is read back.")
        values = import_gguf().quants.dequantize(tensor.data, tensor.tensor_type)
        weight = torch.from_numpy(values.reshape(plan.shape).copy())
        return separate_halves(weight, plan.turned_heads) if plan.turned_heads else weight

    def value(self, key: str) -> Any:
        """A metadata value, None if it is not there."""
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def has(self, place: str) -> bool:
        """True if the file holds a tensor of this GGUF name."""
        return place in self._tensors
