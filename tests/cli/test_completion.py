"""Completion scripts are run by their shells."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from fewbits.cli.texts import TEXTS


@pytest.fixture(scope="module")
def scripts():
    """One script for each shell, printed by the command line itself."""
    from fewbits.cli.completion import script
    from fewbits.cli.parser import build_parser

    parser = build_parser(with_train_flags=True)
    return {shell: script(shell, parser, ["qlora_nf4", "int8"]) for shell in ("bash", "zsh", "fish")}


@pytest.mark.slow
def test_the_command_prints_it(spawn):
    from fewbits.recipes import CATALOG

    shown = spawn("completion", "bash")
    assert shown.code == 0
    assert "complete -F _fewbits fewbits" in shown.out
    assert all(name in shown.out for name in CATALOG)
    assert shown.err == ""


def bash(script: str, line: str, cwd) -> list[str]:
    """What bash would offer at the end of ``line``."""
    words = line.split(" ")
    code = (
        f"{script}\ncomplete -p fewbits >/dev/null || exit 3\n"
        f"COMP_WORDS=({' '.join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}\n"
        'COMPREPLY=(); _fewbits; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, cwd=cwd, check=True)
    assert done.stderr == ""
    return [x for x in done.stdout.splitlines() if x]


def test_bash_registers(scripts):
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{scripts['bash']}\ncomplete -p fewbits"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "complete -F _fewbits fewbits\n"


def test_bash_completes(scripts, tmp_path):
    (tmp_path / "my file.txt").touch()
    (tmp_path / "models").mkdir()

    def offers(line):
        return bash(scripts["bash"], line, tmp_path)

    assert set(offers("fewbits ")) == set(TEXTS)
    assert offers("fewbits gen") == ["generate"]
    assert offers("fewbits --v") == ["--version"]
    assert offers("fewbits eval --wi") == ["--window"]
    assert offers("fewbits eval --recipe ql") == ["qlora_nf4"]
    assert sorted(offers("fewbits eval --text m")) == ["models", "my file.txt"]
    assert offers("fewbits quantize mo") == ["models"]
    assert offers("fewbits eval --window ") == []
    assert offers("fewbits completion z") == ["zsh"]
    assert offers("fewbits train --learning-r") == ["--learning-rate"]
    assert "--no-packing" in offers("fewbits train --no-")
    assert offers("fewbits train --dtype bf") == ["bfloat16"] or offers("fewbits train --dtype bfl") == [
        "bfloat16"
    ]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_accepts_it(scripts, tmp_path):
    code = f"autoload -Uz compinit; compinit -u -D\n{scripts['zsh']}\nprint $_comps[fewbits]"
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "_fewbits\n", "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(scripts, tmp_path):
    file = tmp_path / "fewbits.fish"
    file.write_text(scripts["fish"])

    def offers(line):
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source {file}; complete -C '{line}'"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return [x.split("\t")[0] for x in done.stdout.splitlines()]

    assert set(offers("fewbits ")) == set(TEXTS)
    assert "--window" in offers("fewbits eval --wi")
    assert "qlora_nf4" in offers("fewbits eval --recipe q")
