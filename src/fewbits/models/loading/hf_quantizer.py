"""The plug-in that lets transformers' ``from_pretrained`` read, make and write packed models.

Checkpoints come in three ways:

* plain (fp32, bf16, ...): each linear that the recipe names is quantised the moment its weight is read, and
  only the packed parts stay. One full-precision tensor exists at a time.
* fewbits: packed parts are read as they were written.
* packed by another library (`fewbits.models.loading.foreign`): its tensors become the same codes and scales
  in our layout, and that library is not needed.

Importing this module changes nothing; `register`, or constructing a `FewbitsConfig`, tells transformers the
method's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fewbits.errors import BadCheckpoint, FewbitsError, NotFinite, SpecMismatch, Unsupported
from fewbits.host.conversion import conversion_of
from fewbits.host.spec import locate, spec_for
from fewbits.host.transposed import as_linear, is_transposed, transposed_like
from fewbits.host.unwrap import unwrap
from fewbits.models.folders.checkpoint import read_headers, told_of
from fewbits.models.folders.original import original_of
from fewbits.models.folders.whole_folder import whole_folder
from fewbits.models.loading.conversion_ops import QuantizeWeight, ReadForeign
from fewbits.models.loading.expert_checkpoints import mxfp4_converters, mxfp4_rules, take_mxfp4
from fewbits.models.loading.foreign import FOREIGN, LAYOUTS, MXFP4_SOURCE, Target, packed_names
from fewbits.models.loading.hf_config import check_formats, formats_of, spell_out
from fewbits.models.loading.packed_folder import close_folder, open_config
from fewbits.models.packing.changes import expert_changes, loaded_change
from fewbits.models.packing.convert import convert, linears_to_replace
from fewbits.models.packing.experts import (
    check_experts,
    expert_rules_of,
    own_names,
    packed_place,
    place_empty_experts,
)
from fewbits.models.packing.packed import (
    check_device,
    check_parts,
    place_empty,
    put,
    quantize_by_rows,
    recipe_of,
)
from fewbits.models.packing.recipe_patterns import unmatched_patterns
from fewbits.models.stochastic.in_model import adopt_saved, save_config
from fewbits.nn.experts import QuantizedExperts
from fewbits.nn.finite import FiniteLater, first_not_finite
from fewbits.nn.linear import QuantizedLinear
from fewbits.nn.packed_layers import packed_layer
from fewbits.recipes import Recipe, Rule, get_recipe, recipe_from_config, recipe_to_config

METHOD = "fewbits"
LAYOUT_VERSION = 1
_CODES = ".weight_codes"
_OF_A_COMMIT = ("commit_message", "commit_description", "revision", "create_pr")
_HUB_OPTIONS = ("repo_id", "private", "token", "tags", *_OF_A_COMMIT)


def register() -> None:
    """Let the classes of transformers open packed folders: ``AutoModelForCausalLM.from_pretrained(folder)``.

    It enters ``quant_method: "fewbits"`` in transformers' two tables of quantisation methods, and changes
    nothing else; twice does no harm. `FastLanguageModel` and `FewbitsConfig` call it themselves.
    """
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(FewbitsConfig)
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(FewbitsQuantizer)


class FewbitsConfig(QuantizationConfigMixin):
    """Which recipe a model is loaded with; what config.json of a packed model holds.

    Args:
        recipe: a name from the catalog, a `Recipe`, or its plain-data form.
        allow_pickle: accept checkpoints that are not safetensors.
        source: the layout of the checkpoint's packed tensors: "fewbits", or a key of
            `fewbits.models.loading.foreign.FOREIGN`.
        settings: what config.json says about another library's layout.
        layout_version: the version of the packed layout that a checkpoint was written in.
        formats: the formats a checkpoint was written in, every field spelled out; compared with this
            version's own.
    """

    def __init__(
        self,
        recipe: str | Recipe | Mapping[str, Any] = "qlora_nf4",
        *,
        allow_pickle: bool = False,
        source: str = METHOD,
        layout_version: int = LAYOUT_VERSION,
        formats: list[dict[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        register()
        if quant_method != METHOD:
            raise SpecMismatch(
                f"this is a {quant_method!r} configuration; FewbitsConfig reads only {METHOD!r}."
            )
        if layout_version > LAYOUT_VERSION:
            raise Unsupported(
                f"the checkpoint has packed layout {layout_version}, this version of fewbits reads up to "
                f"{LAYOUT_VERSION}; install a newer fewbits."
            )
        self.quant_method = METHOD
        self.recipe = recipe_from_config(recipe) if isinstance(recipe, Mapping) else get_recipe(recipe)
        self.allow_pickle = allow_pickle
        self.source, self.settings = source, dict(settings or {})
        check_formats(self.recipe, formats)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for config.json: the recipe, and every format it uses with all fields."""
        settings = {"settings": self.settings} if self.settings else {}
        return {
            "quant_method": METHOD,
            "layout_version": LAYOUT_VERSION,
            "source": self.source,
            **settings,
            "recipe": recipe_to_config(self.recipe),
            "formats": [spell_out(f) for f in formats_of(self.recipe)],
        }

    def __iter__(self) -> Any:
        """``dict(config)``, as transformers' own configurations allow."""
        yield from self.to_dict().items()


class FewbitsQuantizer(HfQuantizer):
    """transformers' hook object: says what is packed, packs it while loading, and makes saving whole."""

    requires_calibration = False
    quantization_config: FewbitsConfig

    def __init__(self, quantization_config: FewbitsConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.rules: dict[str, Rule] = {}  # linears still to be packed, by full name
        self.problems: list[FewbitsError] = []
        self.files: tuple[Path, ...] = ()
        self.finite = FiniteLater()

    @property
    def recipe(self) -> Recipe:
        """The recipe in force."""
        return self.quantization_config.recipe

    @property
    def is_foreign(self) -> bool:
        """True for a checkpoint that another library packed."""
        return self.quantization_config.source in FOREIGN

    @property
    def reads_own_parts(self) -> bool:
        """True for a folder in our own layout, whose parts go into the layers as they are."""
        return bool(self.pre_quantized) and not self.is_foreign

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse devices on which packed weights cannot live."""
        device_map = kwargs.get("device_map")
        places = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
        if "disk" in places:
            raise Unsupported(
                "packed weights cannot be offloaded to disk; leave 'disk' out of device_map (the packed "
                "model is small: the CPU may hold it)."
            )
        for place in places:
            check_device(self.recipe, place)

    def update_attn_implementation(self, config: Any) -> Any:
        """Called before the weight files are looked for: they can be read here; see `packed_folder`."""
        return open_config(config)

    update_tp_plan = update_attn_implementation  # what transformers 5.0 calls at that place

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        """Bytes per value: what the packed weight will take, for device maps and allocator warm-up.

        ``param`` is (N, K), or of any shape that stays as it is.
        """
        if self.param_needs_quantization(model, param_name):
            rule = self.rules[param_name.removesuffix(".weight")]
            if rule.weight is not None:
                return rule.weight.bits_per_value(tuple(param.shape)) / 8
        return float(param.element_size())

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """True for the weight of a linear that is still to be packed."""
        return param_name.removesuffix(".weight") in self.rules  # a 3-D parameter of experts has no ".weight"

    def get_quantize_ops(self) -> ConversionOps:
        """The operation that packs a weight as it is read."""
        return QuantizeWeight(self)

    def get_weight_conversions(self) -> list[Any]:
        """For other libraries' checkpoints: gather the tensors that make up one weight."""
        if not self.is_foreign:
            return []
        if self.quantization_config.source == MXFP4_SOURCE:
            return mxfp4_converters(ReadForeign(self))
        parts = LAYOUTS[self.quantization_config.source].parts
        return [WeightConverter(list(parts), "weight", [ReadForeign(self)])]

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        files = tuple(Path(f) for f in checkpoint_files or ())
        pickles = [f for f in files if f.suffix != ".safetensors"]
        if pickles and not self.quantization_config.allow_pickle:
            raise BadCheckpoint(
                f"{pickles[0]} is a pickle, which can run code while it is read; convert it to safetensors, "
                "or pass allow_pickle=True if you trust where it comes from."
            )
        self.files = () if pickles else files
        tensors = read_headers(self.files)
        if self.quantization_config.source == MXFP4_SOURCE:
            self.rules = mxfp4_rules(model, tensors)
        elif self.is_foreign:
            self.rules = dict.fromkeys(packed_names(self.quantization_config.source, model, tensors), Rule())
        elif self.pre_quantized:
            place_empty(model, self._written_rules(model, tensors), tensors)
            place_empty_experts(model, self.recipe, tensors)
        else:
            unmatched_patterns(model, spec_for(model), self.recipe)  # a slip is refused before files are read
            self.rules = {
                n: r for n, r in linears_to_replace(model, self.recipe).items() if r.weight is not None
            } | expert_rules_of(model, self.recipe)

    def _written_rules(self, model: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Rule]:
        """The rule of each packed linear: the checkpoint's keys say which are packed, the recipe says how."""
        names = [key.removesuffix(_CODES) for key in tensors if key.endswith(_CODES)]
        rules = {name: self._rule_of_written(model, name) for name in names}
        for name, rule in rules.items():
            if rule.weight is None:
                raise SpecMismatch(
                    f"{name} is packed in the checkpoint, but the recipe {self.recipe.name!r} in its "
                    "config.json gives it no weight format; restore the config.json that was saved with it."
                )
        if not tensors:
            rules = {n: r for n, r in linears_to_replace(model, self.recipe).items() if r.weight is not None}
        return rules

    def _rule_of_written(self, model: nn.Module, name: str) -> Rule:
        """The recipe's rule for a linear that is packed in the checkpoint."""
        try:
            spec = spec_for(model)
        except Unsupported:
            return self.recipe.rule_for(name)
        is_head = name == locate(model, spec, spec.head)
        rule = self.recipe.rule_for_head(name) if is_head else Rule()
        return self.recipe.rule_for(name) if rule.weight is None else rule

    def quantize_into(self, model: nn.Module, param_name: str, weight: Tensor) -> None:
        """Replace the linear that owns ``param_name`` (N, K) by a packed layer of ``weight``."""
        name = param_name.removesuffix(".weight")
        if name == param_name:
            self._pack_experts(model, name, weight)
            return
        linear: Any = model.get_submodule(name)
        if tuple(weight.shape) != tuple(linear.weight.shape):
            self._other_shape(param_name, tuple(weight.shape), tuple(linear.weight.shape))
            return
        try:
            self.finite.add(weight, param_name)
        except NotFinite as error:
            self.problems.append(error)  # raised once all is read: transformers hides what is raised here
            return
        rule = self.rules.pop(name)
        assert rule.weight is not None
        weight = transposed_like(weight, linear)
        layer = packed_layer(as_linear(linear), rule)  # empty, on the meta device as the linear is
        layer.dtype, layer.transposed = weight.dtype, is_transposed(linear)
        layer.load_packed(quantize_by_rows(rule.weight, weight))
        put(model, name, layer)

    def _pack_experts(self, model: nn.Module, param_name: str, weight: Tensor) -> None:
        path, _, leaf = param_name.rpartition(".")
        experts = packed_place(model, path, self.rules)
        if tuple(weight.shape) != experts.shapes[leaf]:
            self._other_shape(param_name, tuple(weight.shape), experts.shapes[leaf])
            return
        try:
            experts.pack(leaf, weight)
        except NotFinite as error:
            self.problems.append(error)
        self.rules.pop(param_name, None)

    def take_packed(self, model: nn.Module, param_name: str, parts: Mapping[str, Tensor]) -> None:
        """Replace the linear that owns ``param_name`` by a layer of another library's ``parts``.

        The linear's weight is (N, K); the parts are as that library stores them.
        """
        if self.quantization_config.source == MXFP4_SOURCE:
            take_mxfp4(model, param_name, parts, self.rules)
            return
        name = param_name.removesuffix(".weight")
        linear: Any = model.get_submodule(name)
        shape, settings = tuple(linear.weight.shape), self.quantization_config.settings
        layout = LAYOUTS[self.quantization_config.source]
        packed = layout.read(parts, Target(name, shape, linear.weight.dtype, settings))
        if tuple(packed.shape) != tuple(linear.weight.shape):
            self._other_shape(param_name, tuple(packed.shape), tuple(linear.weight.shape))
            return
        self.rules.pop(name)
        dtype = linear.weight.dtype
        linear.weight = nn.Parameter(torch.empty(linear.weight.shape, dtype=dtype, device="meta"))
        layer = QuantizedLinear.from_linear(linear, Rule(weight=packed.format))
        layer.load_packed(packed)
        put(model, name, layer)

    def _other_shape(self, param_name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        self.problems.append(
            BadCheckpoint(
                f"{param_name} has shape {shape} in the checkpoint, but config.json makes it {expected}; the "
                "two belong to different models."
            )
        )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        where = model.config.name_or_path
        self.problems += [told_of(name, self.files) for name in self.finite.wrong()]
        if self.problems:
            raise type(self.problems[0])(f"{where}: {self.problems[0]}") from self.problems[0]
        if self.rules:
            first = next(iter(self.rules))
            raise BadCheckpoint(
                f"{where} lacks {first}.weight ({len(self.rules)} weights in all); copy or download its "
                "files again."
            )
        if self.is_foreign:
            self._become_fewbits(model)
        check_parts(model, str(where))
        check_experts(model, str(where))
        _finish_conversion(model, self.recipe, loaded=self.pre_quantized)
        attach(model, self)
        notes = adopt_saved(model, where) if self.pre_quantized and where else []
        conversion = conversion_of(model)
        if conversion is not None:
            conversion.receipt.notes.extend(notes)
        return model

    def _become_fewbits(self, model: Any) -> None:
        """From here on the model is an ordinary packed one: forget the other library's layout."""
        model._weight_conversions = [c for c in model._weight_conversions if not _is_ours(c)]
        recipe = recipe_of(model, name=self.recipe.name)
        self.quantization_config = FewbitsConfig(recipe)
        model.config.quantization_config = self.quantization_config

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """``model.dequantize()``: the same instance with plain linears of the decoded weights.

        Args:
            model: the model; a fused decoder is taken apart first, adapters stay.
            dtype: what all of it is cast to; None: each weight comes back in the dtype that it had.

        Raises:
            Unsupported: adapters are merged into packed weights; unmerge them first.
        """
        from fewbits.models.loading.plain_again import make_plain

        make_plain(model)
        detach(model)
        model.is_quantized = False
        return model if dtype is None else model.to(dtype)

    def is_serializable(self, **kwargs: Any) -> bool:
        """Packed parts are ordinary tensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters over packed weights are what the library is for."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True if the recipe leaves weights that train: fake quantisation, or products of few bits."""
        return self.recipe.linear.weight is None


def _finish_conversion(model: nn.Module, recipe: Recipe, *, loaded: bool) -> None:
    """What is done to loaded weights: norms, products of few bits, fake quantisation; one receipt for all."""
    try:
        spec_for(model)
    except Unsupported:  # such as another library's checkpoint of experts: it has packed linears alone
        return
    receipt = convert(model, recipe, loaded=loaded)
    told = {change.name for change in receipt.changes}
    packed = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear) and n not in told}
    receipt.left = [left for left in receipt.left if left.name not in packed]
    experts = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedExperts)}
    receipt.changes[:0] = [loaded_change(name, layer) for name, layer in packed.items()] + [
        change for path, module in experts.items() for change in expert_changes(path, module)
    ]


def _is_ours(conversion: Any) -> bool:
    return any(isinstance(op, ReadForeign) for op in getattr(conversion, "operations", ()))


def attach(model: Any, quantizer: FewbitsQuantizer) -> None:
    """Make transformers know a packed model as quantised, and its ``save_pretrained`` whole or nothing."""
    model.hf_quantizer = quantizer
    model.is_quantized = True
    model.quantization_method = METHOD
    model.config.quantization_config = quantizer.quantization_config
    model.save_pretrained = partial(_save_pretrained, model)  # a partial travels through pickle


def detach(model: nn.Module) -> None:
    """Take back what `attach` did: the model is an ordinary one again."""
    for owner in (model, unwrap(model)):
        for name in ("hf_quantizer", "is_quantized", "quantization_method", "save_pretrained"):
            owner.__dict__.pop(name, None)
    config: Any = getattr(unwrap(model), "config", None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def attach_recipe(model: nn.Module, recipe: Recipe) -> None:
    """`attach` for a model that was packed in memory, by `convert` for one."""
    attach(model, FewbitsQuantizer(FewbitsConfig(recipe), pre_quantized=True))


def _save_pretrained(
    self: Any, save_directory: str | Path, is_main_process: bool = True, **kwargs: Any
) -> None:
    """``save_pretrained`` of the model's class, into a folder that appears whole or not at all.

    The packed model is not written over the original weights it was made from. With an adapter that
    transformers' own ``add_adapter`` put in, it is the adapter alone, as from every model of transformers.

    Raises:
        Unsupported: a PeftModel's layers stand in the model, whose names nobody could read again.
    """
    if not is_main_process:
        return
    if getattr(self, "_hf_peft_config_loaded", False):
        type(self).save_pretrained(self, save_directory, **kwargs)
        return
    _refuse_adapter_layers(self)
    push = kwargs.pop("push_to_hub", False)
    hub = {name: kwargs.pop(name) for name in _HUB_OPTIONS if push and name in kwargs}
    original, _ = original_of(self)
    read = [] if original is None else [original.folder]
    with whole_folder(save_directory, overwrite=None, protected=read) as temporary:
        write_packed(self, temporary, published=Path(save_directory), **kwargs)
    if push:  # once more, by transformers' own method, which calls this one: what goes up is closed as well
        self.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)


def _refuse_adapter_layers(model: nn.Module) -> None:
    kinds = ("base_layer", "original_module")  # PEFT's layers, and what it trains as a whole
    name = next((name for name, m in model.named_modules() if any(hasattr(m, kind) for kind in kinds)), None)
    if name is not None:
        raise Unsupported(
            f"{name} is a layer with an adapter, whose names in a file no model could be loaded from; write "
            "the adapter with the PeftModel's save_pretrained, both as one model with "
            "save_pretrained_merged, or take the adapter out first (model.unload())."
        )


def write_packed(model: Any, folder: Path, *, published: Path | None = None, **options: Any) -> None:
    """Write a packed model into a folder that is not published yet.

    Args:
        model: a model that `attach` knows.
        folder: an empty folder, as `whole_folder` gives.
        published: the folder whose place it will take.
        options: of transformers' ``save_pretrained``.

    Raises:
        NotFinite: a weight holds a NaN or an infinity, of what is not packed too: an embedding, a norm.
    """
    if wrong := first_not_finite(model):
        raise NotFinite(f"{wrong}, so nothing was written; take an undamaged checkpoint.")
    with own_names(model):
        type(model).save_pretrained(model, folder, **options)
    save_config(model, folder)
    close_folder(folder, published)
