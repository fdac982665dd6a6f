"""``fewbits quantize --calibrate``: rounding on a text, its report, and recovery by distillation."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from fewbits.cli.console import Progress, console
from fewbits.cli.rounding_report import check_report, write_report
from fewbits.cli.tables import quantization_table
from fewbits.errors import BadInput
from fewbits.inference.rounding.budget import CANDIDATES, Budget
from fewbits.inference.rounding.kept_work import folder_facts
from fewbits.inference.rounding.pipeline import CalibrationResult, calibrate_checkpoint
from fewbits.models.folders.whole_folder import check_destination
from fewbits.models.packing.gguf_mix import recipe_of_format
from fewbits.recipes import Recipe, get_recipe
from fewbits.training.calibration.recovery import Recovery, RecoveryResult, recover_checkpoint


def calibrate(args: Namespace) -> int:
    """Round to formats or within ``args.bits``; with ``args.recover`` distil for some minutes after."""
    format = _wanted(args)
    if args.report is not None:
        check_report(Path(args.report))
    if args.recover is None:
        for word in ("recover_rank", "recover_text"):
            if getattr(args, word) is not None:
                named = word.replace("_", "-")
                raise BadInput(f"--{named} says how to recover; give --recover MINUTES too, or leave it out.")
        return _show(args, _round(args, format, args.destination, overwrite=args.overwrite), None)
    how = Recovery(args.recover, args.recover_rank or 0, args.recover_text or 0)
    check_destination(args.destination, overwrite=args.overwrite, protected=[args.source])
    rounded = _rounded_folder(args, format)
    result = None
    if (rounded / "config.json").is_file():
        sys.stderr.write(f"{rounded} was rounded by an earlier call of this command; recovery goes on.\n")
    else:
        result = _round(args, format, rounded, overwrite=False)
    length = {} if args.length is None else {"length": args.length}
    with Progress("seconds") as advance:
        recovery = recover_checkpoint(
            args.source,
            rounded,
            args.destination,
            args.calibrate,
            how,
            overwrite=args.overwrite,
            progress=advance,
            **length,
        )
    shutil.rmtree(rounded)
    if result is not None:  # where it was rounded to is gone
        result = replace(result, folder=Path(args.destination))
    return _show(args, result, recovery)


def _wanted(args: Namespace) -> Recipe | Budget:
    """What the words ask for: one format, a recipe, one of GGUF's mixes, or a budget.

    Raises:
        BadInput: nothing, or several formats and no budget, or a budget and a recipe.
    """
    names = () if args.format is None else tuple(args.format.split(","))
    if args.bits is not None:
        if args.recipe is not None:
            raise BadInput("--bits chooses each linear's format, and so does --recipe; give one of them.")
        return Budget(bits=args.bits, formats=names or CANDIDATES)
    if args.recipe is not None:
        return get_recipe(args.recipe)
    if len(names) != 1:
        raise BadInput(
            "--calibrate needs to be told what to round to: --format NAME, a --recipe with formats, or a "
            "budget, --bits N, to be spent among --format a,b,c."
        )
    return recipe_of_format(args.source, names[0])


def _rounded_folder(args: Namespace, format: Recipe | Budget) -> Path:
    """Where the rounded model waits until it has recovered: beside the destination, its name this call's."""
    target, rows = Path(args.destination).absolute(), Path(args.calibrate)
    text = hashlib.sha256(rows.read_bytes()).hexdigest() if rows.is_file() else ""
    facts = [
        folder_facts(args.source),
        format,
        args.method,
        args.samples,
        args.length,
        text,
    ]
    call = hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:8]
    return target.with_name(f"{target.name}.rounded-{call}")


def _round(
    args: Namespace, format: Recipe | Budget, folder: str | Path, *, overwrite: bool
) -> CalibrationResult:
    with Progress("layers") as advance:
        result = calibrate_checkpoint(
            args.source,
            folder,
            format,
            args.calibrate,
            method=args.method or "gptq",
            windows=(
                128 if args.samples is None else args.samples,
                512 if args.length is None else args.length,
            ),
            overwrite=overwrite,
            progress=advance,
        )
    if args.report is not None:
        with Progress("formats") as advance:
            write_report(result, args.source, args.calibrate, Path(args.report), progress=advance)
    return result


def _show(args: Namespace, result: CalibrationResult | None, recovery: RecoveryResult | None) -> int:
    if args.json:
        facts: dict[str, Any] = {} if result is None else result.as_dict()
        if recovery is not None:
            facts |= {"folder": str(recovery.folder), "recovery": recovery.as_dict()}
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return 0
    notes: list[str] = []
    if result is not None:
        console().print(quantization_table(result))
        notes += result.notes
    if recovery is not None:
        notes.append(recovery.sentence)
        if result is None:
            notes.append(str(recovery.folder))
    for note in notes:
        console().print(note, highlight=False, markup=False, soft_wrap=True)
    return 0
