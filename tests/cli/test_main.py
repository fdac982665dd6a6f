"""Exit codes, one-sentence errors, help, and what is not imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fewbits import __version__, cli
from fewbits.cli import actions
from fewbits.cli.texts import TEXTS
from fewbits.errors import BadInput

LIGHT = "import sys; from fewbits.cli import main; code = main({argv}); heavy = {{'torch', 'transformers', 'rich'}} & set(sys.modules); print(code, sorted(heavy), file=sys.stderr)"  # fmt: skip  # noqa: E501


def test_version_and_help(run):
    assert run("--version") == (0, f"fewbits {__version__}\n", "")
    shown = run("--help")
    assert shown.code == 0
    for name, text in TEXTS.items():
        assert name in shown.out
        assert text.help in shown.out


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_has_help_with_examples(run, name):
    if name == "bench":
        pytest.skip("has a parser of its own")
    shown = run(name, "--help")
    assert shown.code == 0
    assert f"usage: fewbits {name}" in shown.out
    assert "examples:\n  " in shown.out
    assert f"fewbits {name}" in shown.out.split("examples:")[1]


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["train", "--help"], ["eval", "--help"], ["eval"], []]
)
def test_help_imports_nothing_heavy(argv):
    done = subprocess.run([sys.executable, "-c", LIGHT.format(argv=argv)], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith(" []"), done.stderr


def test_no_command_is_usage(run):
    shown = run()
    assert shown.code == 2
    assert "COMMAND" in shown.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["eval"], "error: the following arguments are required: --model; see fewbits eval --help."),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["generate", "--model", "m"], "one of the arguments --prompt --messages --chat --input is required"),
        (["generate", "--model", "m", "--prompt", "a", "--top-k", "x"], "invalid int value: 'x'"),
        (["generate", "--model", "m", "--prompt", "a", "--chat"], "not allowed with argument"),
        (["report"], "required: RUN"),
        (["eval", "--model", "m", "--text", "t", "--windw", "3"], "unrecognized arguments: --windw 3"),
        (["completion", "tcsh"], "invalid choice: 'tcsh'"),
        (["train", "c.yaml", "--learning-rat", "1"], "unrecognized arguments: --learning-rat"),
    ],
)
def test_wrong_usage_is_one_sentence_and_code_2(run, argv, message):
    shown = run(*argv)
    assert shown.code == 2
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (BadInput("the row is\nwrong."), 1, "error: the row is wrong.\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.txt"),
            1,
            "error: no such file or directory: a.txt.\n",
        ),
        (KeyError("x"), 1, "internal error: KeyError: 'x'; run again with --debug for the traceback.\n"),
        (
            MemoryError(),
            1,
            "error: the memory is full; use a smaller batch or window, or a recipe with fewer bits.\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted.\n"),
        (SystemExit(3), 3, ""),
    ],
)
def test_errors_are_one_sentence(run, monkeypatch, error, code, sentence):
    def fail(args):
        raise error

    monkeypatch.setattr(actions, "report", fail)
    shown = run("report", "x")
    assert (shown.code, shown.err) == (code, sentence)


def test_debug_shows_the_traceback(run, monkeypatch):
    def fail(args):
        raise BadInput("no.")

    monkeypatch.setattr(actions, "report", fail)
    for argv in (["--debug", "report", "x"], ["report", "x", "--debug"]):
        shown = run(*argv)
        assert shown.code == 1
        assert "Traceback" in shown.err
        assert shown.err.endswith("error: no.\n")


def test_ctrl_c_in_a_real_process(tmp_path):
    code = (
        "from fewbits import cli; from fewbits.cli import actions; import time, sys\n"
        "actions.report = lambda args: (print('on', flush=True), time.sleep(60))\n"
        "sys.exit(cli.main(['report', 'x']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "on\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == "interrupted.\n"


@pytest.mark.parametrize("module", ["fewbits", "fewbits.cli"])
def test_a_closed_pipe_is_no_traceback(module):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", module, "completion", "bash"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == ""


def test_help_is_fast():
    """By the processor's time, which a busy machine does not stretch as it does the clock's."""
    bare = min(_processor_seconds("-c", "") for _ in range(3))
    assert min(_processor_seconds("-m", "fewbits.cli", "--help") for _ in range(3)) < bare + 0.3


def _processor_seconds(*words):
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_bench_hands_its_arguments_on(run, monkeypatch):
    seen = []
    monkeypatch.setattr(actions, "bench", lambda argv: seen.append(argv) or 0)
    assert run("bench", "--help").code == 0
    assert run("--debug", "bench", "rmsnorm", "-n", "3").code == 0
    assert seen == [["--help"], ["rmsnorm", "-n", "3"]]


def test_quiet_restores_everything():
    import logging
    import warnings

    from transformers.utils import logging as hf_logging

    from fewbits.cli.quiet import quiet

    before = (logging.root.manager.disable, list(warnings.filters), hf_logging.is_progress_bar_enabled())
    with quiet():
        assert not logging.getLogger("torchao").isEnabledFor(logging.WARNING)
        assert not hf_logging.is_progress_bar_enabled()
    assert before == (
        logging.root.manager.disable,
        list(warnings.filters),
        hf_logging.is_progress_bar_enabled(),
    )


def test_describe_cuts_long_messages():
    code, sentence = cli.describe(RuntimeError("x" * 10_000))
    assert code == 1
    assert len(sentence) < 400


def test_the_report_opens_on_request(tmp_path, monkeypatch):
    import webbrowser

    from fewbits.training.report import page

    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(page, "write_report", lambda run: run / "report.html")
    assert cli.main(["report", str(tmp_path)]) == 0 and opened == []
    assert cli.main(["report", str(tmp_path), "--open"]) == 0
    assert opened == [(tmp_path / "report.html").as_uri()]
