"""Answers to a file of prompts, resumable: ``rows.jsonl`` in, ``answers.jsonl`` out, in the rows' order.

A row is a JSON object with ``prompt`` (a text to continue) or ``messages`` (a conversation); what else it
holds is kept. Its line of the output is the row with ``answer``, ``tokens`` and ``stopped_by`` added.

While answers are made they are kept in ``answers.jsonl.part``, in the order in which they end; the file's
first line says which rows and settings they belong to. A run that was killed goes on from there, with the
same seeds, and the output appears, whole and in order, when the last answer is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import BadInput
from fewbits.formats.kv_cache import get_kv_cache, kv_cache_to_config
from fewbits.inference.generate import Generation, Prompt, Sampling, checked
from fewbits.inference.many import answered, encoded, seed_of
from fewbits.models.folders.one_writer import one_writer, refuse_second_writer
from fewbits.models.generation.adapters_by_row import BASE
from fewbits.models.generation.live.answers import Report
from fewbits.models.generation.live.plan import check_slots
from fewbits.text_files import lines_of, read_text

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

_ADDED = ("answer", "tokens", "stopped_by")


@dataclass(frozen=True, kw_only=True)
class Written:
    """What `answer_file` did.

    Attributes:
        path: of the output.
        rows: answers in it.
        earlier: of these, made by a run that was stopped.
        tokens: new tokens of this run.
        seconds: that this run took for them.
        report: how it was done.
    """

    path: Path
    rows: int
    earlier: int
    tokens: int
    seconds: float
    report: Report


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file of prompts.

    Raises:
        BadInput: no such file, no rows, or a line that is no row; the message names the line.
    """
    try:
        lines = lines_of(read_text(path))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.") from error
    rows = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise BadInput(f'{path} has no rows; write one JSON object with a "prompt" a line.')
    return rows


def _row(path: str | Path, number: int, line: str) -> dict[str, Any]:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not JSON ({error.msg.lower()}).") from error
    if not isinstance(row, dict):
        raise BadInput(f'{where}: not an object; write {{"prompt": "..."}}.')
    there = [name for name in ("prompt", "messages") if row.get(name) is not None]
    if len(there) != 1:
        fault = "both prompt and messages" if there else "neither a prompt nor messages"
        raise BadInput(f"{where}: the row has {fault}; give one of them.")
    if not isinstance(row[there[0]], str if there == ["prompt"] else list):
        need = "a text" if there == ["prompt"] else "a list of messages"
        raise BadInput(f"{where}: {there[0]} is not {need}.")
    reserved = [name for name in _ADDED if name in row]
    if reserved:
        raise BadInput(f"{where}: the row has a field {reserved[0]!r}, which the answer needs; rename it.")
    return row


def _prompt_of(row: dict[str, Any]) -> Prompt:
    prompt: Prompt = row["messages"] if row.get("prompt") is None else row["prompt"]
    return prompt


def answer_file(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    source: str | Path,
    destination: str | Path,
    sampling: Sampling | None = None,
    *,
    at_a_time: int | None = None,
    of_model: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **words: Any,
) -> Written:
    """Answer every row of ``source`` into ``destination``; goes on where an earlier call was stopped.

    Args:
        model: a causal language model of transformers.
        tokenizer: the tokenizer that belongs to it.
        source: JSON lines of prompts.
        destination: JSON lines of answers; must not be there yet.
        sampling: how tokens are chosen; row n draws with ``seed + n``.
        at_a_time: texts in the batch, 1 to 256; None: as many as the memory holds.
        of_model: what tells this model from others; answers of another one are not continued.
        progress: called with the answers there are and the rows.
        words: ``cache`` and words of transformers' ``generate``, as `generate_many` has them; plain data.
            ``adapter_field``: the rows' field that names each row's adapter; without it a row has the active
            one, and with ``null`` none.

    Raises:
        BadInput: a bad row, an output that is there already or that another process is writing, or answers
            begun with other rows or settings.
        NotFinite: the model's logits are NaN or infinite.
    """
    sampling, path = checked(sampling), Path(destination)
    _check_free(destination)
    check_slots(at_a_time)
    with one_writer(path):
        _check_free(path)  # whoever wrote it may have ended in the meantime
        rows = read_rows(source)
        part = _Part(path, rows, sampling, {"model": dict(of_model or {}), "words": _plain(words)})
        earlier = len(part.answers)
        names = _adapters_of(rows, words.pop("adapter_field", None))
        todo = encoded(tokenizer, [_prompt_of(row) for row in rows], part.seed, names)
        report, tokens, seconds = Report(), 0, 0.0
        if progress is not None:
            progress(earlier, len(rows))
        left = [row for row in todo if row.index not in part.answers]
        with part:
            how: dict[str, Any] = {"at_a_time": at_a_time, "report": report, "words": words}
            for number, answer in answered(model, tokenizer, left, replace(sampling, seed=part.seed), **how):
                part.add(number, answer)
                tokens, seconds = tokens + answer.tokens, answer.seconds
                if progress is not None:
                    progress(len(part.answers), len(rows))
        part.finish(rows)
    return Written(path=path, rows=len(rows), earlier=earlier, tokens=tokens, seconds=seconds, report=report)


def _adapters_of(rows: Sequence[Mapping[str, Any]], field: str | None) -> list[str | None] | None:
    """The adapter that each row names in a field; None if rows have no such field.

    Raises:
        BadInput: something that is no name.
    """
    if field is None:
        return None
    names: list[str | None] = []
    for number, row in enumerate(rows, 1):
        name = row.get(field, "")
        if name is not None and not isinstance(name, str):
            raise BadInput(
                f"row {number}: {field} is {name!r}; give the name of an adapter, or null for none."
            )
        names.append(BASE if name is None else name or None)
    return names


def _plain(words: Mapping[str, Any]) -> dict[str, Any]:
    """The call's words as JSON has them.

    Raises:
        BadInput: one that no file can tell from another.
    """
    plain = dict(words)
    if plain.get("cache") is not None:
        plain["cache"] = kv_cache_to_config(get_kv_cache(plain["cache"]))
    try:
        return dict(json.loads(json.dumps(plain)))
    except TypeError as error:
        raise BadInput(
            f"a word of the call is no plain data ({error}), and a run that was stopped could not be gone on"
            " with; use generate_many."
        ) from error


def check_destination(path: str | Path) -> None:
    """Raise `BadInput` if the answers cannot go there; to be asked before a model is loaded."""
    _check_free(path)
    refuse_second_writer(path)


def _check_free(path: str | Path) -> None:
    if str(path) == "-":
        raise BadInput(
            "answers go to a file, where a run that was stopped goes on; give its name in place of -."
        )
    path = Path(path)
    if path.exists():
        raise BadInput(f"{path} is there already; move it away or give another name.")
    if not path.absolute().parent.is_dir():
        raise BadInput(
            f"there is no folder {path.absolute().parent} to write {path.name} into; make it first."
        )


class _Part:
    """The answers so far, on disk."""

    def __init__(
        self, path: Path, rows: Sequence[dict[str, Any]], sampling: Sampling, others: Mapping[str, Any]
    ) -> None:
        self.path, self.part = path, path.with_name(path.name + ".part")
        self.answers: dict[int, dict[str, Any]] = {}
        settings = {name: value for name, value in asdict(sampling).items() if name != "seed"}
        self._head = {
            "rows": sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest(),
            "sampling": settings,
            **{name: value or None for name, value in others.items()},
        }
        lines = self._lines()
        if len(lines) > 1:  # a run that was refused has left no answer, and binds nobody
            self.seed = self._continued(lines, sampling.seed)
        else:
            self.seed = seed_of(sampling)
        self._file: Any = None

    def __enter__(self) -> _Part:
        """Write what is known anew, whole lines alone, and go on behind it."""
        anew = self.part.with_name(self.part.name + ".anew")  # a kill now leaves the old one whole
        self._file = anew.open("w", encoding="utf-8")
        self._write({**self._head, "seed": self.seed})
        for number, answer in self.answers.items():
            self._write({"row": number, **answer})
        anew.replace(self.part)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, number: int, answer: Generation) -> None:
        """One more answer."""
        self.answers[number] = {
            "answer": answer.text,
            "tokens": answer.tokens,
            "stopped_by": answer.stopped_by,
        }
        self._write({"row": number, **self.answers[number]})

    def finish(self, rows: Sequence[dict[str, Any]]) -> None:
        """The output, in the rows' order, in one move; the answers so far go."""
        whole = self.path.with_name(self.path.name + ".whole")
        with whole.open("w", encoding="utf-8") as file:
            for number, row in enumerate(rows):
                file.write(json.dumps({**row, **self.answers[number]}, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        whole.replace(self.path)
        self.part.unlink()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def _lines(self) -> list[dict[str, Any]]:
        """What a run before has left; a line that a kill has cut short is dropped."""
        lines = []
        if self.part.exists():
            for line in lines_of(self.part.read_text(encoding="utf-8", errors="replace")):
                try:
                    lines.append(json.loads(line))
                except json.JSONDecodeError:
                    break
            if any(not isinstance(line, dict) for line in lines):
                raise BadInput(f"{self.part} holds no answers of fewbits; move it away.")
        return lines

    def _continued(self, lines: list[dict[str, Any]], seed: int | None) -> int:
        """Take over the answers of a run before; its seed.

        Raises:
            BadInput: they belong to something else.
        """
        head = lines[0]
        same = {name: head.get(name) or None for name in self._head}
        other = [name for name, value in self._head.items() if same[name] != value]
        if seed is not None and head.get("seed") != seed:
            other.append("seed")
        if other:
            raise BadInput(
                f"{self.part} holds answers of another run (other {' and '.join(other)}); delete it to begin "
                "anew, or give another output."
            )
        self.answers = {line.pop("row"): line for line in lines[1:] if "row" in line}
        return int(head["seed"])
