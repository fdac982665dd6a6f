"""`fuse`: the decoder layers of a model compute as two autograd nodes each, and the head without its logits.

Instances only: each decoder layer gets a ``forward`` of its own that hands over to
`fewbits.decoder.attention_half` and `fewbits.decoder.mlp_half`; modules, parameters, names and classes stay.
Where a node cannot do what a layer asks for (a KV cache that holds tokens, dropout, several adapters), that
call takes the layer's own forward, and `fusion_of` says how often and why. `unfuse` takes it all out again.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fewbits.decoder.keep import KEEP_NONE, Keep
from fewbits.decoder.offload import HostStash
from fewbits.decoder.prompt_cache import begins_a_cache
from fewbits.decoder.prompt_weights import PromptWeights
from fewbits.errors import NotFused, Unsupported
from fewbits.host.packed_rows import holds_packed_rows
from fewbits.host.receipt import Change, Receipt
from fewbits.host.record import part_of, put_part, take_part
from fewbits.host.spec import layer_names, spec_for
from fewbits.host.unwrap import unwrap
from fewbits.host.walks import lengthen_walks, shorten_walks

if TYPE_CHECKING:  # they define kernels, which takes a fifth of a second: `fuse` imports them
    from fewbits.decoder.parts import LayerParts
    from fewbits.decoder.pass_scales import PassScales
    from fewbits.decoder.proof import Proofs
    from fewbits.decoder.scales import DelayedScales, Slot
    from fewbits.decoder.trl_head import TrlHead


@dataclass
class Fusion:
    """What `fuse` left on a model.

    Attributes:
        receipt: what was replaced, what not, and why.
        layers: the forwards in place, in the order of the layers.
        fallbacks: how many layer calls took their own forward, by reason.
        stash: where inputs wait that are kept on the host.
        delayed_scaling: whether float8 scales are known before the tensor is.
        scales: the float8 scales of each device that holds layers, made when its first layer runs.
        saved_scales: scales read from a checkpoint, by name, with which `scales` begin.
        guards: the hooks that refuse copies of the modules.
        pass_scales: finds the float8 scales of weights that train.
        trl_head: answers what TRL's trainers ask of the output head.
        for_inference: whether passes outside of training mode fill a KV cache, gradients or not.
        prompt_weights: float8 values of weights that stay from prompt to prompt then.
    """

    receipt: Receipt
    layers: list[FusedForward] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)
    stash: HostStash = field(default_factory=HostStash)
    delayed_scaling: bool = False
    scales: dict[torch.device, DelayedScales] = field(default_factory=dict)
    saved_scales: dict[str, Tensor] = field(default_factory=dict)
    guards: list[RemovableHandle] = field(default_factory=list)
    pass_scales: PassScales | None = None
    trl_head: TrlHead | None = None
    for_inference: bool = False
    prompt_weights: PromptWeights = field(default_factory=PromptWeights)

    def begin_layer(self, forward: FusedForward, device: torch.device) -> None:
        """Have the scales of weights that train found for all layers at once, where a pass begins.

        A pass without gradients decides which float8 values stay while the model generates.
        """
        if self.pass_scales is None:
            from fewbits.decoder.pass_scales import PassScales

            self.pass_scales = PassScales()
        parts = [f.parts for f in self.layers]
        if forward.layer.training and torch.is_grad_enabled():
            self.prompt_weights.let_go(parts, self.receipt)
        elif self.for_inference and self.prompt_weights.stay is None and not torch.is_grad_enabled():
            self.prompt_weights.decide(parts, self.receipt)
        self.pass_scales.before(self.layers.index(forward), parts, device)

    def is_for_inference(self, is_so: bool) -> None:
        """Set `for_inference`; a model that trains again lets go of what stayed for its prompts."""
        self.for_inference = is_so
        if not is_so:
            self.prompt_weights.let_go([f.parts for f in self.layers], self.receipt)

    def new_scales(self, count: int, device: torch.device) -> DelayedScales:
        """Scales of ``count`` tensors on a device that has none yet."""
        from fewbits.decoder.scales import DelayedScales

        return DelayedScales(count, device)


class FusedForward:
    """The forward of one decoder layer: two nodes where they apply, else the layer's own.

    Attributes:
        unproved: why the nodes could not be compared with the layer when it was fused; it then takes its own
            forward for as long as it is fused.
    """

    unproved: str | None = None

    def __init__(self, layer: nn.Module, parts: LayerParts, fusion: Fusion, keep: Keep) -> None:
        self.layer, self.parts, self.fusion, self.keep = layer, parts, fusion, keep

    @property
    def keep(self) -> Keep:
        """What the layer keeps for its backward pass, and of its weights; to be set at any time."""
        return self._keep

    @keep.setter
    def keep(self, keep: Keep) -> None:
        self._keep = keep
        if not keep.weights:
            self.parts.forget_values()
        elif self.parts.own_mlp is not None:
            self.parts.own_mlp.keep_values(True)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        begins = not torch.is_grad_enabled() and self._begins(past_key_values, hidden_states, attention_mask)
        if torch.is_grad_enabled() or past_key_values is None or begins:
            words = {**kwargs, "past_key_values": past_key_values} if begins else kwargs
            cache = None if begins else past_key_values
            try:
                return self._fused(hidden_states, attention_mask, cache, position_embeddings, words)
            except NotFused as reason:
                if not begins:  # a prompt through the layer's own forward is right, and what it always was
                    self._note(str(reason))
        result: Tensor = type(self.layer).forward(
            self.layer,
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        return result

    def _begins(self, cache: Any, x: Tensor, mask: Tensor | None) -> bool:
        """Whether this call reads the first tokens x (B, S, H) into a cache."""
        if cache is None or self.unproved is not None:
            return False
        attention: Any = self.layer.get_submodule(self.parts.attention_path)
        return begins_a_cache(cache, getattr(attention, "layer_idx", None), x, mask)

    def _fused(
        self,
        x: Tensor,
        mask: Tensor | None,
        past_key_values: Any,
        rotary: tuple[Tensor, Tensor] | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        if self.unproved is not None:
            raise NotFused(self.unproved)
        if past_key_values is not None:
            raise NotFused("the call has a KV cache")
        if rotary is None:
            raise NotFused("the call has no position embeddings")
        x = x.contiguous()
        self.fusion.begin_layer(self, x.device)
        keep = self.keep
        if getattr(self.layer, "gradient_checkpointing", False) and self.layer.training:
            # The layer is computed again as a whole then, and modules of its own need not be once more.
            keep = replace(KEEP_NONE, offload=keep.offload, mlp=self.parts.own_mlp is not None)
        return self.parts.run(x, rotary, mask, kwargs, keep, self.fusion.stash, self._delayed(x))

    def _delayed(self, x: Tensor) -> tuple[Slot, Slot] | None:
        """The slots of this layer, under delayed scaling; the first layer of a pass begins it."""
        fusion = self.fusion
        if not fusion.delayed_scaling or not torch.is_grad_enabled():
            return None  # an evaluation leaves no trace
        of_device = fusion.scales.get(x.device)
        if of_device is None:
            of_device = fusion.scales[x.device] = fusion.new_scales(2 * len(fusion.layers), x.device)
            if fusion.saved_scales:
                of_device.load_state_dict(fusion.saved_scales)
        i = fusion.layers.index(self)
        if i == 0 and torch._C._current_graph_task_id() == -1:  # no layer that is computed again
            for scales in fusion.scales.values():
                scales.advance()
        return of_device.slot(2 * i), of_device.slot(2 * i + 1)

    def _note(self, reason: str) -> None:
        if reason not in self.fusion.fallbacks:
            warnings.warn(
                f"decoder layers run unfused: {reason}; fewbits.decoder.fuse.fusion_of(model) counts them.",
                stacklevel=4,
            )
        self.fusion.fallbacks[reason] += 1


def fuse(
    model: nn.Module, *, keep: Keep | None = None, loss: bool = True, delayed_scaling: bool = False
) -> Receipt:
    """Let the decoder layers compute as fused nodes, in training and wherever gradients are on.

    One layer of each kind computes both ways first, on a few random tokens; layers whose outputs or gradients
    differ stay as they are, and the receipt says by how much (`fewbits.decoder.proof`).

    Decoded copies of frozen weights may be reused by later passes (`Keep.weights`), and so may the scales of
    FP8 products. Both are computed again when torch's version counter shows that the weight was changed. The
    counter misses writes through ``tensor.data``, NumPy and DLPack: call `forget_weights` after those.

    Args:
        model: a Hugging Face model of a known family, converted or not, with or without adapters (which may
            come later); the formats of its linears decide in which precision the products run.
        keep: what each layer keeps for its backward pass; None: everything of full size but the norms'
            outputs.
        loss: also compute the loss of a causal LM without its logits.
        delayed_scaling: float8 products take the MLP's inner tensors under scales of earlier steps
            (`fewbits.decoder.scales`), which saves passes over memory; False: under a scale for each row.

    Returns:
        The receipt.

    Raises:
        Unsupported: the model is fused already, or of no known family.
    """
    from fewbits.decoder.loss import fuse_loss
    from fewbits.decoder.proof import Proofs
    from fewbits.host.attention import decoder_of, use_attention

    if fusion_of(model) is not None:
        raise Unsupported("this model is fused already; call fewbits.unfuse first.")
    spec = spec_for(model)
    if spec.generic:
        raise Unsupported(
            f"{spec.without_spec}, so its layers run through their own forward; write one "
            "(docs/guide/adding-a-model.md) and call fewbits.register_family to have them fused."
        )
    fusion = Fusion(Receipt(f"{spec.model_type}, fused decoder"), delayed_scaling=delayed_scaling)
    proofs = Proofs(decoder_of(model), spec, keep or Keep())
    for name in layer_names(model, spec):
        _fuse_layer(name, model.get_submodule(name), proofs, fusion)
    fusion.receipt.notes.extend(proofs.notes())
    fusion.guards.append(
        decoder_of(model).register_forward_pre_hook(partial(_no_cache, fusion), with_kwargs=True)
    )
    fusion.receipt.notes.append(
        "forward() with gradients, or in training mode, keeps no KV cache unless it is called with "
        "use_cache=True, as generate() does; in evaluation mode after for_inference it keeps one"
    )
    fusion.receipt.notes.extend(use_attention(model).notes)
    if loss:
        fusion.trl_head = fuse_loss(model, spec, fusion.receipt)
    fusion.guards.append(unwrap(model).register_forward_pre_hook(_refuse_copies))
    put_part(model, fusion)
    shorten_walks(model)
    fusion.receipt.notes.append("train(), parameters() and zero_grad() take one loop over all modules each")
    fusion.receipt.notes.append(
        "decoded copies of frozen weights may be reused; after writing a weight through tensor.data, call "
        "fewbits.decoder.fuse.forget_weights(model)"
    )
    return fusion.receipt


def _fuse_layer(name: str, layer: nn.Module, proofs: Proofs, fusion: Fusion) -> None:
    """Put the fused forward into one layer, if it computes the same."""
    from fewbits.decoder.own_mlp import spec_of_layer
    from fewbits.decoder.parts import LayerParts, check_layer

    parts = LayerParts(layer, spec_of_layer(proofs.spec, layer), name)
    unproved = None
    try:
        reason = check_layer(layer, parts) or proofs.why_not(layer, parts.spec)
    except NotFused as why:
        reason, unproved = None, str(why)
        proofs.pending.setdefault(unproved, []).append(name)
    if reason is not None:
        proofs.refused.setdefault(reason, []).append(name)
        return
    forward = FusedForward(layer, parts, fusion, proofs.keep)
    forward.unproved = unproved
    _put_forward(layer, forward)
    fusion.guards.append(layer.register_forward_pre_hook(_refuse_copies))
    fusion.layers.append(forward)
    before = type(layer).__name__
    fusion.receipt.changes.append(Change(name, before, f"{before}, {_how(parts)}", 0, 0))


def _how(parts: LayerParts) -> str:
    """How a layer computes, for the receipt."""
    if parts.own_mlp is None:
        return "computed as two fused autograd nodes"
    what = parts.own_mlp.mlp[0] if parts.spec.experts is None else "experts"
    return f"its attention computed as one fused autograd node, its {what} by modules of the model"


def unfuse(model: nn.Module) -> Receipt:
    """Take out what `fuse` put in, and nothing else.

    Returns:
        The receipt: which layers have their own forwards again, and what the attention is now.

    Raises:
        Unsupported: the model is not fused.
    """
    from fewbits.decoder.loss import unfuse_loss
    from fewbits.host.attention import restore_attention

    fusion = fusion_of(model)
    if fusion is None:
        raise Unsupported("this model is not fused; there is nothing to take out.")
    lengthen_walks(model)
    model = unwrap(model)
    for guard in fusion.guards:
        guard.remove()
    for forward in fusion.layers:
        _take_forward(forward.layer)
        forward.parts.forget_values()
    unfuse_loss(model)
    for handle in () if fusion.trl_head is None else fusion.trl_head.handles:
        handle.remove()
    take_part(model, Fusion)
    said = "decoder layers: their own forwards again"
    return Receipt("", notes=[said, *restore_attention(model).notes])


def fusion_of(model: nn.Module) -> Fusion | None:
    """What `fuse` left on this model, through every wrapper; None if it is not fused."""
    return part_of(model, Fusion)


def fused_layers(model: nn.Module) -> list[FusedForward]:
    """The fused layers in order, each with its ``keep``; empty if the model is not fused."""
    fusion = fusion_of(model)
    return [] if fusion is None else fusion.layers


def free_prompt_weights(model: nn.Module, why: str) -> bool:
    """Free float8 values of weights that stay from prompt to prompt, until the model has trained again.

    Returns:
        Whether there were any; the receipt then says that they are made for each prompt anew, for ``why``.
    """
    fusion = fusion_of(model)
    if fusion is None:
        return False
    return fusion.prompt_weights.let_go([f.parts for f in fusion.layers], fusion.receipt, why)


def forget_weights(model: nn.Module) -> None:
    """Let go of all that was made from frozen weights: scales, decoded and 8-bit values, of the head too.

    To be called by whoever writes into a frozen weight's memory through ``tensor.data``, NumPy or DLPack, as
    some averages of weights and weight-decay scripts do: that leaves no trace, and reading all weights in
    each pass to find it would cost what keeping saves. All else is seen: merges (PEFT's too),
    ``load_state_dict``, ``torch.nn.init``, in-place operations under ``no_grad`` or on ``detach()``, another
    parameter, and other memory (``parameter.data = other``). A model that is not fused keeps
    nothing, but for weights that it has decoded to generate many texts.
    """
    from fewbits.decoder.loss import float8_head_of

    for forward in fused_layers(model):
        forward.parts.forget_weights()
    head = float8_head_of(model)
    if head is not None:
        head.forget()
    # Whoever else keeps something (a step of decoding) looks whether torch has counted a write.
    frozen = [p for p in model.parameters() if not p.requires_grad and not p.is_inference()]
    torch.autograd.graph.increment_version(frozen)


def scales_of(model: nn.Module) -> dict[str, Tensor]:
    """The float8 scales, (slots,) and (steps, slots), that a run goes on from; none without such."""
    fusion = fusion_of(model)
    states = [] if fusion is None else [scales.state_dict() for scales in fusion.scales.values()]
    if len(states) > 1:  # each device has recorded the layers that it holds
        return {key: torch.stack([s[key].cpu() for s in states]).amax(0) for key in states[0]}
    return {key: tensor.cpu() for key, tensor in states[0].items()} if states else {}


def load_scales(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Go on from what `scales_of` gave."""
    fusion = fusion_of(model)
    if fusion is not None:
        fusion.saved_scales = saved
        for scales in fusion.scales.values():
            scales.load_state_dict(saved)


def _put_forward(layer: Any, forward: FusedForward) -> None:
    """In the layer's place, or where accelerate's hook (device_map) calls it, with inputs on its device."""
    if "_hf_hook" in vars(layer):
        layer._old_forward = forward
    else:
        layer.forward = forward


def _take_forward(layer: Any) -> None:
    if "_hf_hook" in vars(layer):
        layer._old_forward = MethodType(type(layer).forward, layer)
    else:
        del layer.forward


def _refuse_copies(module: nn.Module, _: Any) -> None:
    """A forward pre-hook, which nn.DataParallel copies with the module that it gets.

    Its copies share the forward of the layer that they are copies of, which computes with that one's
    parameters: on the wrong device, or with gradients of one part of the batch.
    """
    if getattr(module, "_is_replica", False):
        raise Unsupported(
            "this model is fused, and nn.DataParallel (transformers' Trainer takes it where several GPUs are "
            "visible) runs copies of its layers; start one process for each GPU (torchrun, accelerate "
            "launch), or let the process see one GPU (CUDA_VISIBLE_DEVICES=0)."
        )


def _no_cache(fusion: Fusion, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook: packed rows fill no KV cache, nor, without a word of the caller, passes that train.

    Transformers fills one there too wherever the configuration says so, which is its default, and what
    inference sets it to; the layers would then take their own forward.
    """
    needs_cache = kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None
    trains = decoder.training or (torch.is_grad_enabled() and not fusion.for_inference)
    if (needs_cache or not trains) and not holds_packed_rows(decoder, kwargs):
        return None
    return args, {**kwargs, "use_cache": False}
