"""A plain checkpoint becomes a packed one whose codes were chosen on a text, layer by layer.

The text runs through the model one decoder layer at a time. A layer's linears are rounded by the second
moments of their inputs, then the layer runs again as it now is, so that the next one sees what it will see.
What is done is kept beside the destination after every layer: the same call goes on where it stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.formats import get_format
from fewbits.formats.base import Format, Packed
from fewbits.host.spec import layer_names, spec_for
from fewbits.host.transposed import as_linear, is_transposed
from fewbits.inference.export import LayerError, QuantizeResult, for_storage
from fewbits.inference.rounding.activations import distance, first_inputs, output_of
from fewbits.inference.rounding.awq import folds_of
from fewbits.inference.rounding.budget import Budget, Step, allocate, measure_losses
from fewbits.inference.rounding.experts import (
    ExpertLinears,
    check_format,
    expert_folds,
    experts_to_round,
    join,
    sentence,
    split_layer,
    stacked_weight,
)
from fewbits.inference.rounding.grids import Grids
from fewbits.inference.rounding.kept_work import LOSSES, KeptWork, fingerprint
from fewbits.inference.rounding.layer_rounding import Flow, RoundedLayer, round_layer
from fewbits.inference.rounding.methods import Method, read_method
from fewbits.inference.rounding.quality import weight_of
from fewbits.models.fast import FastLanguageModel
from fewbits.models.folders.checkpoint import inspect_folder
from fewbits.models.folders.one_writer import one_writer
from fewbits.models.folders.whole_folder import check_destination, whole_folder
from fewbits.models.loading.hf_quantizer import write_packed
from fewbits.models.loading.in_memory import mark_loaded
from fewbits.models.packing.convert import linears_to_replace
from fewbits.models.packing.experts import packed_place
from fewbits.models.packing.packed import is_packed, put
from fewbits.models.packing.packed_head import head_rule
from fewbits.models.packing.recipe_patterns import unmatched_patterns
from fewbits.models.stochastic.rotations import rotate_residual, rotate_values
from fewbits.models.writing.calibration_rows import read_windows
from fewbits.nn.experts import QuantizedExperts
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import Recipe, Rule

_UNREACHED = "unreached"  # in what is kept of a layer
_MEASURED = 2048  # tokens on which the loss of each linear in each candidate is measured


@dataclass(frozen=True, kw_only=True)
class CalibrationResult(QuantizeResult):
    """What `calibrate_checkpoint` wrote.

    Attributes:
        method: its steps, joined by "+".
        tokens: of calibration text that were used.
        output_errors: for each linear, ||x (Q - W)^T||^2 / ||x W^T||^2 over them, as it was reached.
        resumed: layers that were there from an earlier call.
        drift: after each layer, how far the rounded model's activations are from the plain one's on that
            text: ||h - h_plain|| / ||h_plain||. Where it jumps, loss starts.
        steps: of a budget, the line of best choices: bits of a value and the sum of the measured losses.
        predicted_loss: of a budget, that sum for what was chosen, in nats a token; else None.
        notes: what was not rounded, experts that no token reached, and where "awq" found nothing to scale, in
            sentences.
        unreached: numbers of the experts that no token of the text reached, by the full name of the module
            that holds them.
    """

    method: str
    tokens: int
    output_errors: Mapping[str, float]
    resumed: int
    drift: tuple[float, ...] = ()
    steps: tuple[Step, ...] = ()
    predicted_loss: float | None = None
    notes: tuple[str, ...] = ()
    unreached: Mapping[str, list[int]] = field(default_factory=dict)


@torch.no_grad()
def calibrate_checkpoint(
    source: str | Path,
    destination: str | Path,
    format: str | Format | Mapping[str, Any] | Budget | Recipe,
    rows: str | Path,
    *,
    method: str = "gptq",
    windows: tuple[int, int] = (128, 512),
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> CalibrationResult:
    """Write a packed copy of a checkpoint, rounded by what its layers compute on a text.

    Args:
        source: a model folder with plain weights. It is held in memory whole, on the CPU; its layers are
            computed one at a time on a GPU if there is one.
        destination: the folder to write; never the source. Beside it, as ".calibration" after its
            name, the work is kept until it is done.
        format: of the decoder's linears and experts: whole numbers in groups or rows, FP8, an MX format,
            nvfp4, nf4, fp4, a GGUF type. Or a `Recipe`, which may give each linear another one. Or a
            `Budget`: each format is then chosen by the loss that was measured with that weight alone rounded.
        rows: JSON Lines with "text" or "messages".
        method: steps joined by "+", from `methods`: "rotate", "smooth" or "awq"; "nearest" (under scales with
            the least error), "gptq" or "gptaq"; "learned", or with the number of its steps "learned:400".
        windows: how many pieces of text are used at most, and the tokens of each.
        overwrite: replace a model that is in the destination.
        progress: called as ``progress(layers done, layers in all)``.

    Raises:
        BadInput: an unknown method, too little text, a destination that is taken or being written.
        BadCheckpoint, NotFinite: the source is damaged.
        Unsupported: a packed source, or a format that its rows do not fill.
    """
    how = read_method(method)
    samples, length = windows
    if min(windows) < 1:
        raise BadInput(f"{samples} windows of {length} tokens hold no text; give at least one of each.")
    budget, target = format if isinstance(format, Budget) else None, Path(destination)
    choices = [get_format(name) for name in budget.formats] if budget else []
    recipe = _recipe_of(choices[0] if isinstance(format, Budget) else format)
    check_destination(target, overwrite=overwrite, protected=[source])
    with one_writer(target):
        check_destination(target, overwrite=overwrite, protected=[source])  # whoever wrote may have ended
        model, tokenizer = _plain_model(source, rotate=how.rotate)
        work = _Work(model, recipe, choices, how)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or length
        tokens = read_windows(
            rows, tokenizer, length=min(length, positions), count=samples, least=work.most_columns
        )
        chosen = budget.text if budget else work.text
        progress_folder = KeptWork(target, fingerprint(source, chosen, method, tokens))
        if budget is not None:
            work.choose(budget, tokens, progress_folder, progress)
        before = sum(p.numel() * p.element_size() for p in model.parameters())
        resumed = work.run(tokens, progress_folder, progress)
        name = recipe.name if budget is None else "mixed"
        mark_loaded(model, f"{name}_{method.replace('+', '_')}")
        with whole_folder(target, overwrite=overwrite, protected=[source]) as folder:
            write_packed(model, folder, published=target)
            tokenizer.save_pretrained(folder)
            inspect_folder(folder)  # what was written reads back
        progress_folder.remove()
    errors = tuple(work.errors.values())
    return CalibrationResult(
        folder=target,
        recipe=f"{name}, {method}",
        layers=errors,
        bytes_before=before,
        bytes_after=sum(p.numel() * p.element_size() for p in model.parameters()),
        relative_error=math.sqrt(sum(e.relative_error**2 for e in errors) / max(len(errors), 1)),
        method=method,
        tokens=tokens.numel(),
        output_errors=work.output_errors,
        resumed=resumed,
        drift=tuple(work.drift),
        steps=tuple(work.steps),
        predicted_loss=work.predicted_loss,
        notes=tuple(work.notes(len(work.layers) - resumed)),
        unreached=work.unreached,
    )


def _plain_model(source: str | Path, *, rotate: bool) -> tuple[Any, Any]:
    """The model, on the CPU, and its tokenizer."""
    model, tokenizer = FastLanguageModel.from_pretrained(source, load_in_4bit=False, device_map="cpu")
    if is_packed(model):
        raise Unsupported(f"{source} is packed already; calibrate the original model.")
    if rotate:
        rotate_values(model)
        rotate_residual(model)
    return model.eval(), tokenizer


def _recipe_of(format: str | Format | Mapping[str, Any] | Recipe) -> Recipe:
    if isinstance(format, Recipe):
        return for_storage(format)
    value: Format = get_format(format)
    return Recipe(name=value.name, linear=Rule(weight=value))


def _packed_rules(model: nn.Module, recipe: Recipe) -> tuple[dict[str, Rule], dict[str, Rule], list[str]]:
    """The rules of the decoder's linears that the recipe packs, those of experts, and what is left, told.

    Raises:
        BadInput: it packs none.
        Unsupported: it packs something else.
    """
    spec = spec_for(model)
    head = head_rule(model, spec, recipe)
    if head is not None and head.rule.weight is not None:
        raise Unsupported(
            f"the recipe {recipe.name!r} packs the output head, which calibration leaves as it is; leave its"
            " head out, or leave out --calibrate."
        )
    rules = {n: r for n, r in linears_to_replace(model, recipe).items() if r.weight is not None}
    of_experts, sentences = experts_to_round(model, spec, recipe)
    if not rules and not of_experts:
        raise BadInput(
            f"the recipe {recipe.name!r} packs no weight of this model; choose one such as qlora_nf4."
        )
    return rules, of_experts, sentences


class _Work:
    """The model while its layers are rounded one after another."""

    def __init__(self, model: nn.Module, recipe: Recipe, choices: list[Format], method: Method) -> None:
        self.model, self.method = model, method
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.layers = list(layer_names(model, spec_for(model)))
        unmatched_patterns(model, spec_for(model), recipe)
        self.linear_rules, self.expert_rules, self.left = _packed_rules(model, recipe)
        rules = {**self.linear_rules, **self.expert_rules}
        self.formats = {name: rule.weight for name, rule in rules.items() if rule.weight is not None}
        weights = {name: weight_of(model, name) for name in rules}
        for name, weight in weights.items():
            for format in choices or [self.formats[name]]:  # refuses before the work begins
                if weight.dim() == 3:
                    check_format(name, format, tuple(weight.shape))
                Grids(format, torch.zeros(1, weight.shape[-1], dtype=torch.float32))
        self.most_columns = max((weight.shape[-1] for weight in weights.values()), default=0)
        self.unreached: dict[str, list[int]] = {}
        self.errors: dict[str, LayerError] = {}
        self.output_errors: dict[str, float] = {}
        self.folded = 0
        self.drift: list[float] = []
        self.steps: list[Step] = []
        self.predicted_loss: float | None = None

    @property
    def text(self) -> str:
        """Which format each linear gets, as text."""
        return json.dumps({name: format.text for name, format in self.formats.items()})

    def choose(
        self, budget: Budget, windows: Tensor, cache: KeptWork, progress: Callable[[int, int], None] | None
    ) -> None:
        """Give each linear the format that a budget allows it, by measured losses."""
        candidates = [get_format(name) for name in budget.formats]
        pieces = windows[: max(_MEASURED // windows.shape[1], 1)]
        losses = measure_losses(
            self.model,
            list(self.formats),
            candidates,
            pieces,
            cache_file=cache.folder / LOSSES,
            progress=progress,
        )
        shapes = {name: tuple(weight_of(self.model, name).shape) for name in losses}
        self.formats, self.steps = allocate(losses, shapes, budget)
        self.predicted_loss = sum(losses[name][format.name] for name, format in self.formats.items())

    def run(self, windows: Tensor, cache: KeptWork, progress: Callable[[int, int], None] | None) -> int:
        """Round every layer; returns how many were there already."""
        hidden, words = first_inputs(self.model, self.layers, windows, self.device)
        plain, resumed = hidden, 0
        for number, name in enumerate(self.layers):
            rounded = cache.layer(number)
            layer = self.model.get_submodule(name).to(self.device)
            outputs = [output_of(layer, x, words[name]) for x in plain]
            if rounded is None:
                self._round(name, layer, Flow(hidden=hidden, plain=plain, words=words[name]))
                cache.save(number, layer.state_dict(), self._numbers(name))
            else:
                self._take(name, layer, *rounded)
                layer.to(self.device)  # what was read from the disk
                resumed += 1
            plain, hidden = outputs, [output_of(layer, x, words[name]) for x in hidden]
            self.drift.append(distance(hidden, plain))
            layer.to("cpu")
            if progress is not None:
                progress(number + 1, len(self.layers))
        return resumed

    def _of_layer(self, name: str, rules: Mapping[str, Rule]) -> list[str]:
        """What of these rules is in a layer, by its name in it."""
        return [n.removeprefix(f"{name}.") for n in rules if n.startswith(f"{name}.")]

    def _round(self, name: str, layer: nn.Module, flow: Flow) -> None:
        spec = spec_for(self.model)
        formats = {leaf: self.formats[f"{name}.{leaf}"] for leaf in self._of_layer(name, self.linear_rules)}
        folds = list(folds_of(spec))
        rules = {n: replace(r, weight=self.formats[n]) for n, r in self.expert_rules.items()}
        experts = split_layer(self.model, name, spec, rules)
        if experts is not None:
            for own, stacks in experts.weights.items():
                format = self.formats[f"{name}.{experts.path}.{own}"]
                formats |= {linear: format for stack in stacks for linear in stack}
            folds = [fold for fold in folds if fold.maker != spec.norm.before_mlp]
            folds += expert_folds(layer, spec, experts)
        rounded = round_layer(layer, formats, flow, self.method, folds, experts)
        self.folded += len(rounded.folded)
        for leaf in self._of_layer(name, self.linear_rules):
            full, weight = f"{name}.{leaf}", as_linear(layer.get_submodule(leaf)).weight.detach()
            self.output_errors[full] = rounded.error([leaf])
            self.errors[full] = _error(full, weight, rounded.packed[leaf])
            _put_packed(layer, leaf, rounded.packed[leaf], self.linear_rules[full])
        if experts is not None:
            self._join(name, experts, rounded, rules)
            layer.to(self.device)  # an expert's parameter that stays plain

    def _join(
        self, name: str, experts: ExpertLinears, rounded: RoundedLayer, rules: Mapping[str, Rule]
    ) -> None:
        path = f"{name}.{experts.path}"
        plain = {leaf: stacked_weight(self.model, name, each) for leaf, each in experts.weights.items()}
        join(self.model, name, experts, rounded.packed, rules)
        packed: Any = self.model.get_submodule(path)
        for leaf, stacks in experts.weights.items():
            full = f"{path}.{leaf}"
            self.output_errors[full] = rounded.error([linear for stack in stacks for linear in stack])
            self.errors[full] = _error(full, plain[leaf], packed.packed(leaf))
        if rounded.unreached:
            self.unreached[path] = list(rounded.unreached)

    def notes(self, rounded: int) -> Iterator[str]:
        """Sentences about a finished run, of whose layers so many were rounded now."""
        yield from self.left
        for name, missed in self.unreached.items():
            yield sentence(name, missed, self.model.get_submodule(name).num_stored)  # type: ignore[arg-type]
        if rounded and (self.method.awq or self.method.smooth) and not self.folded:
            yield (
                f"{'awq' if self.method.awq else 'smooth'} found no input that a norm or a linear alone"
                f" scales in this family, so that the codes are those of {self.method.rounding}"
            )

    def _numbers(self, name: str) -> dict[str, Any]:
        own = [n for n in self.errors if n.startswith(f"{name}.")]
        missed = {n: m for n, m in self.unreached.items() if n.startswith(f"{name}.")}
        return {n: [self.output_errors[n], self.errors[n].relative_error] for n in own} | {_UNREACHED: missed}

    def _take(self, name: str, layer: nn.Module, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Put back what an earlier call made of a layer."""
        self.unreached |= numbers.get(_UNREACHED, {})
        for leaf in self._of_layer(name, self.linear_rules):
            weight, full = as_linear(layer.get_submodule(leaf)).weight.detach(), f"{name}.{leaf}"
            names = {part: f"{leaf}.weight_{part}" for part in self._parts(full, weight)}
            packed = self._stored(full, weight, tensors, names)
            _put_packed(layer, leaf, packed, self.linear_rules[full])
            self._told(full, weight, packed, numbers)
        rules = {n: replace(r, weight=self.formats[n]) for n, r in self.expert_rules.items()}
        of_experts = self._of_layer(name, self.expert_rules)
        for leaf, weight in [(leaf, weight_of(self.model, f"{name}.{leaf}")) for leaf in of_experts]:
            (path, _, own), full = leaf.rpartition("."), f"{name}.{leaf}"
            names = {part: f"{path}.{QuantizedExperts.key(own, part)}" for part in self._parts(full, weight)}
            packed = self._stored(full, weight, tensors, names)
            packed_place(self.model, f"{name}.{path}", rules).take(own, packed.parts)
            self._told(full, weight, packed, numbers)
        layer.load_state_dict(tensors, strict=False)

    def _parts(self, full: str, weight: Tensor) -> list[str]:
        return list(self.formats[full].layout(tuple(weight.shape)))

    def _stored(
        self, full: str, weight: Tensor, tensors: dict[str, Tensor], names: Mapping[str, str]
    ) -> Packed:
        """A packed weight of the tensors that were kept, which it takes away from them."""
        parts = {part: tensors.pop(name) for part, name in names.items()}
        return Packed(self.formats[full], tuple(weight.shape), weight.dtype, parts)

    def _told(self, full: str, weight: Tensor, packed: Packed, numbers: Mapping[str, Any]) -> None:
        self.output_errors[full], error = numbers[full]
        self.errors[full] = _error(full, weight, packed, error)


def _put_packed(layer: Any, leaf: str, packed: Packed, rule: Rule) -> None:
    linear = layer.get_submodule(leaf)
    meta = nn.Linear(packed.shape[1], packed.shape[0], bias=False, dtype=packed.dtype, device="meta")
    meta.bias = linear.bias
    quantized = QuantizedLinear.from_linear(meta, replace(rule, weight=packed.format))
    quantized.load_packed(packed)
    quantized.transposed = is_transposed(linear)
    put(layer, leaf, quantized.train(linear.training))


def _error(name: str, weight: Tensor, packed: Packed, relative: float | None = None) -> LayerError:
    w = weight.float()
    if relative is None:
        relative = float((packed.dequantize(torch.float32) - w).norm() / w.norm().clamp_min(1e-30))
    return LayerError(
        name=name,
        format=packed.format.name,
        shape=tuple(packed.shape),
        bits_per_value=packed.format.bits_per_value(tuple(packed.shape)),
        bytes_before=weight.numel() * weight.element_size(),
        bytes_after=packed.nbytes,
        relative_error=relative,
        snr_db=-20 * math.log10(relative) if relative else None,
    )
