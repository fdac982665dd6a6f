"""What each subcommand does: read the arguments, call the library, show the answer. No arithmetic here.

Results go to standard output; progress, figures and prompts go to the error stream.
"""

from __future__ import annotations

import json
import sys
import webbrowser
from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.markup import escape

from fewbits.cli.console import Progress, console
from fewbits.errors import BadInput, Unsupported
from fewbits.text_files import read_text


def demo(args: Namespace) -> int:
    """``fewbits demo``."""
    from fewbits.demo.run import run_demo

    return int(
        run_demo(
            Path(args.output), seed=args.seed, quick=args.quick, open_report=args.open, console=console()
        )
    )


def train(args: Namespace) -> int:
    """``fewbits train``."""
    from fewbits.cli.launch import as_rank, check_tasks, launch, wants_launch
    from fewbits.cli.launch_flags import without_launch_flags
    from fewbits.cli.train_flags import train_overrides
    from fewbits.training.config import TrainConfig

    overrides = train_overrides(args)
    if args.config is None:
        config = TrainConfig.from_mapping(overrides)
    else:
        config = TrainConfig.from_yaml(args.config, overrides)
    starts = wants_launch(args)
    if args.dry_run:
        return _check_only(args, config, starts)
    if args.basis is not None:
        args.parser.error("--basis belongs to --dry-run")
    check_tasks(args)
    if starts:
        words = without_launch_flags(args.argv)
        return launch(args, words, device=config.device, output_dir=config.output_dir)
    return int(as_rank(args, lambda: _train_here(args, config)))


def _check_only(args: Namespace, config: Any, starts: bool) -> int:
    """``fewbits train --dry-run``."""
    from fewbits.training.ahead.dry_run import dry_run

    if starts:
        args.parser.error("--dry-run checks one process; leave --nproc-per-node and --nnodes out")
    forecast = dry_run(config, console=console(stderr=True), basis=args.basis, resume=args.resume)
    console().print(str(forecast), soft_wrap=True, highlight=False, markup=False)
    return 0


def _train_here(args: Namespace, config: Any) -> int:
    from fewbits.cli.next_steps import next_steps
    from fewbits.doctor.launchers import launched
    from fewbits.training.run import train as run_training

    told = launched()
    result = run_training(
        config,
        resume=args.resume,
        console=console(stderr=True),
        launch=told.launch,
        attempt=told.restarts,  # what torch's elastic agent starts again goes on by itself
    )
    if not result.leads:
        return 0
    facts: dict[str, object] = {"model": result.final, "merged": result.merged, "report": result.report}
    if result.best_metric is not None:
        facts = {"evaluation loss": f"{result.best_metric:.4f} at step {result.best_step}", **facts}
    for name, value in facts.items():
        if value is not None:
            console().print(f"[bold]{name:<16}[/]{escape(str(value))}", soft_wrap=True, highlight=False)
    for i, line in enumerate(next_steps(config, result.final)):
        name = "next" if i == 0 else ""
        console().print(f"[bold]{name:<16}[/]{escape(line)}", soft_wrap=True, highlight=False)
    return 0


def init(args: Namespace) -> int:
    """``fewbits init``."""
    from fewbits.cli.init import init as run

    return run(args)


def recipes(args: Namespace) -> int:
    """``fewbits recipes``."""
    from fewbits.cli.listings import recipes as run

    return run(args)


def models(args: Namespace) -> int:
    """``fewbits models``."""
    from fewbits.cli.listings import models as run

    return run(args)


def plan(args: Namespace) -> int:
    """``fewbits plan``."""
    from fewbits.cli.plan import plan as run

    return run(args)


def warm(args: Namespace) -> int:
    """``fewbits warm``."""
    from fewbits.cli.warm import run

    return run(args)


def preview(args: Namespace) -> int:
    """``fewbits preview``."""
    from fewbits.cli.preview import run

    return run(args)


def generate(args: Namespace) -> int:
    """``fewbits generate``."""
    from fewbits.cli.answer_rows import answer_rows, check, generate_words, refusing
    from fewbits.cli.chat import chat, write
    from fewbits.cli.models import guessing_of, load
    from fewbits.inference.generate import Sampling

    sampling = Sampling(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
    if args.system is not None and not args.chat:
        args.parser.error("--system belongs to --chat; in a file, put it among the messages")
    check(args)  # a wrong file is told before a model is loaded
    words = generate_words(args)
    if args.input is not None:
        with refusing(words):
            return answer_rows(args, sampling, words)
    prompt = None if args.chat else _prompt(args)
    model, tokenizer = load(args)
    guessing = guessing_of(args, model)
    how = {"guessing": guessing, "quiet": args.quiet, "words": words}
    with refusing(words):
        if prompt is None:
            return chat(model, tokenizer, sampling, system=args.system, **how)
        write(model, tokenizer, prompt, sampling, **how)
    return 0


def eval(args: Namespace) -> int:
    """``fewbits eval``."""
    from fewbits.cli.evaluate import evaluate

    return evaluate(args)


def compare(args: Namespace) -> int:
    """``fewbits compare``."""
    from fewbits.cli.compare import compare as run

    return run(args)


def quantize(args: Namespace) -> int:
    """``fewbits quantize``."""
    from fewbits.cli.tables import quantization_table
    from fewbits.inference.export import quantize_checkpoint
    from fewbits.models.packing.gguf_mix import recipe_of_format

    if args.calibrate is not None:
        from fewbits.cli.calibration import calibrate

        return calibrate(args)
    for name in ("method", "samples", "length", "bits", "report", "recover", "recover_rank", "recover_text"):
        if getattr(args, name) is not None:
            word = name.replace("_", "-")
            raise BadInput(f"--{word} says how to calibrate; give --calibrate ROWS too, or leave it out.")
    if args.recipe is None and args.format is None:
        raise BadInput(
            "neither --recipe nor --format says what to quantise to; give one, as in --recipe qlora_nf4."
        )
    recipe = args.recipe or recipe_of_format(args.source, args.format)
    with Progress("tensors") as advance:
        result = quantize_checkpoint(
            args.source, args.destination, recipe, overwrite=args.overwrite, progress=advance
        )
    if args.json:
        sys.stdout.write(json.dumps(result.as_dict(), indent=2) + "\n")
    else:
        console().print(quantization_table(result))
    return 0


def merge(args: Namespace) -> int:
    """``fewbits merge``."""
    from fewbits.cli.models import merge_adapter

    receipt = merge_adapter(args.adapter, args.destination, base=args.base, overwrite=args.overwrite)
    console().print(receipt, soft_wrap=True, highlight=False, markup=False)
    return 0


def push(args: Namespace) -> int:
    """``fewbits push``."""
    from fewbits.cli.push import push as push_folder

    address = push_folder(
        args.source,
        args.repository,
        base_model=args.base,
        private=args.private,
        revision=args.branch,
        create_pr=args.pull_request,
        commit_message=args.message,
        datasets=args.dataset,
    )
    console().print(f"uploaded: {address}", soft_wrap=True, highlight=False, markup=False)
    return 0


def export(args: Namespace) -> int:
    """``fewbits export``."""
    from fewbits.cli.models import export_model

    receipt = export_model(
        args.source,
        args.destination,
        args.to,
        base=args.base,
        overwrite=args.overwrite,
        calibrate=args.calibrate,
        check=not args.no_check,
    )
    console().print(receipt, soft_wrap=True, highlight=False, markup=False)
    return 0


def report(args: Namespace) -> int:
    """``fewbits report``."""
    from fewbits.training.report.page import write_report

    path = write_report(Path(args.run))
    console().print(escape(str(path)), soft_wrap=True, highlight=False)
    if args.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def bench(argv: list[str]) -> int:
    """``fewbits bench``: the bench has a parser of its own."""
    from importlib.util import find_spec

    if find_spec("fewbits.bench.run") is None:
        raise Unsupported("this installation has no fewbits.bench.run; install fewbits from its repository.")
    from fewbits.bench.run import main

    return int(main(argv))


def doctor(args: Namespace) -> int:
    """``fewbits doctor``."""
    from fewbits.cli.findings import findings_report
    from fewbits.doctor import diagnose

    findings = list(diagnose(args.packages))
    if args.json:
        sys.stdout.write(json.dumps({"findings": [item.as_dict() for item in findings]}, indent=2) + "\n")
    else:
        console().print(findings_report(findings))
    return int(any(item.status == "problem" for item in findings))


def build(args: Namespace) -> int:
    """``fewbits build``."""
    from fewjobs.command_line import build as run

    return run(args)


def plan_gpus(args: Namespace) -> int:
    """``fewbits plan-gpus``."""
    from fewbits.cli.plan_gpus import plan_gpus as run

    return run(args)


def sc(args: Namespace) -> int:
    """``fewbits sc``."""
    from fewbits.cli.sc.commands import sc as run

    return run(args)


def completion(args: Namespace) -> int:
    """``fewbits completion``."""
    from fewbits.cli.completion import script
    from fewbits.cli.parser import build_parser
    from fewbits.recipes import CATALOG

    sys.stdout.write(script(args.shell, build_parser(with_train_flags=True), CATALOG))
    return 0


def _prompt(args: Namespace) -> Any:
    if args.prompt is not None:
        return sys.stdin.read() if args.prompt == "-" else args.prompt
    try:
        messages = json.loads(read_text(args.messages))
    except json.JSONDecodeError as error:
        raise BadInput(
            f"{args.messages}, line {error.lineno}: not JSON ({error.msg.lower()}); see --help."
        ) from error
    if isinstance(messages, dict):
        messages = messages.get("messages")
    if not isinstance(messages, list):
        raise BadInput(
            f'{args.messages} holds no list of messages; write [{{"role": "user", "content": "..."}}].'
        )
    return messages
