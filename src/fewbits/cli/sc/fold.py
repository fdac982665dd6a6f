"""``fewbits sc fold``: rotations and scales folded into a model's weights, written as an ordinary model."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from rich.markup import escape

from fewbits.cli.console import console
from fewbits.cli.sc.common import load_original, print_json, stream_options, windows_of
from fewbits.errors import BadInput
from fewbits.text_files import read_text

PARTS = ("scales", "values", "residual")  # in the order in which they are folded


def fold(args: Namespace) -> int:
    """Fold, check that the exact model is still the same, save."""
    from fewbits.cli.models import resolve
    from fewbits.models.folders.whole_folder import check_destination, whole_folder

    parts = _parts(args)
    check_destination(args.output, overwrite=args.overwrite, protected=(resolve(args.model),))
    text = None if args.text is None else read_text(args.text)
    model, tokenizer = load_original(args)
    windows = _windows(model, tokenizer, text, args)
    before = _log_probabilities(model, windows[0])
    figures: dict[str, Any] = {"output": args.output, "folded": list(parts)}
    if "scales" in parts:
        figures |= _fold_scales(model, windows, args)
    if "values" in parts:
        from fewbits.models.stochastic.rotations import rotate_values

        rotate_values(model)
    if "residual" in parts:
        from fewbits.models.stochastic.rotations import rotate_residual

        rotate_residual(model, seed=args.seed)
    moved = float((_log_probabilities(model, windows[0]) - before).abs().max())
    figures |= {"moved": moved, "dtype": str(model.dtype).removeprefix("torch.")}
    with whole_folder(args.output, overwrite=args.overwrite, protected=(resolve(args.model),)) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    if args.json:
        return print_json(figures)
    said = f"[bold]{escape(args.output)}[/]   {', '.join(parts)} folded; exact log-probabilities moved by at "
    said += f"most {moved:.2g} ({figures['dtype']})"
    if "divergence" in figures:
        was, now = figures["divergence"]
        said += f"; attention's divergence {was:.4f} before its scales, {now:.4f} with them, on this text"
    console().print(said, highlight=False, soft_wrap=True)
    return 0


def _parts(args: Namespace) -> tuple[str, ...]:
    named = [word.strip() for word in args.parts.split(",") if word.strip()]
    unknown = [word for word in named if word not in PARTS]
    if unknown or not named:
        raise BadInput(f"--parts {args.parts!r} is refused: choose from {', '.join(PARTS)}.")
    if "scales" in named and args.text is None:
        raise BadInput("scales between queries and keys are chosen by a text; add --text, or leave them out.")
    if "scales" not in named and (args.text is not None or args.powers_of_two or args.length is not None):
        raise BadInput("--text, --length and --powers-of-two are for scales; add scales to --parts.")
    return tuple(part for part in PARTS if part in named)


def _windows(model: Any, tokenizer: Any, text: str | None, args: Namespace) -> list[Any]:
    """Token ids (1, T) of the text, or 64 that mean nothing."""
    import torch

    if text is not None:
        windows: list[Any] = windows_of(model, tokenizer, text, args)
        return windows
    many = model.get_input_embeddings().num_embeddings
    return [torch.randint(many, (1, 64), generator=torch.Generator().manual_seed(0))]


def _log_probabilities(model: Any, ids: Any) -> Any:
    """(1, T, vocabulary) float32."""
    import torch

    with torch.no_grad():
        return model(ids.to(model.device)).logits.float().log_softmax(-1)


def _fold_scales(model: Any, windows: list[Any], args: Namespace) -> dict[str, Any]:
    from statistics import fmean

    from fewbits.models.stochastic.query_key_scales import fold_query_key_scales
    from fewbits.training.calibration.query_key_scales import choose_query_key_scales

    options = stream_options(args, halve=True, scramble="bitrev", length=args.length or 32)
    choices = choose_query_key_scales(model, windows, options, powers_of_two=args.powers_of_two)
    fold_query_key_scales(model, {name: choice.scales for name, choice in choices.items()})
    mean = [fmean(getattr(c, name) for c in choices.values()) for name in ("before", "after")]
    return {"divergence": mean}
