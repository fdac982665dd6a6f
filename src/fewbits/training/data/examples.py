"""From rows to tokens: what a row is, how it is written for the model, which of its tokens are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fewbits.errors import BadInput
from fewbits.training.config import TrainConfig
from fewbits.training.data.chat import (
    ChatEncoder,
    normalize_messages,
    refuse_pictures,
    refuse_sound,
    words_of,
)
from fewbits.training.data.pictures import Picture, Sight, has_pictures, picture_of, pictured_messages
from fewbits.training.data.rows import BadRows, Row
from fewbits.training.data.sources import Source, read_source
from fewbits.training.data.spans import SpanEncoder, Tokens
from fewbits.training.data.token_data import DataReport, TokenData
from fewbits.training.data.token_store import Example as Example
from fewbits.training.data.token_store import StoredExamples, TokenStore, subset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = {
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the"
        " request.\n\n### Instruction:\n{instruction}\n\n### Response:\n",
        "Below is an instruction that describes a task, paired with an input that provides further context."
        " Write a response that appropriately completes the request."
        "\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    ),
    "question": ("Question: {instruction}\nAnswer:", "{input}\nQuestion: {instruction}\nAnswer:"),
}
_COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {  # role: the columns it may stand in, the usual name first
    "chat": {"messages": ("messages", "conversations")},
    "instruction": {
        "instruction": ("instruction",),
        "response": ("response", "output"),
        "input": ("input", "context"),
    },
    "completion": {"prompt": ("prompt",), "completion": ("completion", "response")},
    "text": {"text": ("text",)},
    "document": {"document": ("document",)},
}
_OPTIONAL = {"input"}
_LONGEST_PROMPT = 1_000_000  # characters of a sample's prompt; a longer one loses its beginning, as in tokens
Sample = dict[str, Any]  # prompt, expected where the data tell it, images (names of files) where it has some


def choose_format(config: TrainConfig, values: dict[str, Any], where: str) -> str:
    """The format of rows with these columns.

    Raises:
        BadInput: none of the formats that the configuration allows; ``where`` begins the sentence.
    """
    choice = config.format
    if "document" in values and choice in ("auto", "text"):
        return "document"
    names = [choice] if choice != "auto" else list(_COLUMNS)
    for name in names:
        required = [role for role in _COLUMNS[name] if role not in _OPTIONAL]
        if all(_column(config, name, role, values) is not None for role in required):
            return name
    need = {
        "chat": "messages",
        "instruction": "instruction and response",
        "completion": "prompt and completion",
        "text": "text",
    }
    needs = need.get(choice) or "; or ".join(need.values())
    raise BadInput(
        f"{where} has the columns {', '.join(map(str, values)) or '(none)'}, but {choice} rows need"
        f" {needs}; name your columns with fields, as in fields.text=body."
    )


def _column(config: TrainConfig, name: str, role: str, values: dict[str, Any]) -> str | None:
    named = config.fields.get(role)
    candidates = (named,) if named else _COLUMNS[name][role]
    return next((column for column in candidates if column in values), None)


class RowEncoder:
    """Writes rows of one format as tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: TrainConfig,
        max_length: int,
        look: Callable[[], Sight] | None = None,
    ) -> None:
        """How rows are written.

        Args:
            tokenizer: the model's.
            config: of the run.
            max_length: tokens of a row.
            look: gives what turns images into tokens; None for a model that reads text alone.
        """
        self.tokenizer = tokenizer
        self.config = config
        self.max_length = max_length
        self.folder = Path()
        self.chat = ChatEncoder(tokenizer, max_length, look)
        self.long = SpanEncoder(tokenizer)  # for documents, of which every token counts
        probe = tokenizer("a", verbose=False)["input_ids"]
        self.bos: int | None = tokenizer.bos_token_id
        self.adds_bos = self.bos is not None and probe[:1] == [self.bos]
        self.eos: int | None = tokenizer.eos_token_id

    def with_config(self, config: TrainConfig) -> RowEncoder:
        """The same tokenizer and template under other settings of the rows."""
        other = copy(self)
        other.config = config
        return other

    def choose_format(self, values: dict[str, Any], where: str) -> str:
        """The format of rows with these columns."""
        return choose_format(self.config, values, where)

    def value(self, name: str, role: str, values: dict[str, Any]) -> Any:
        """What the row holds for a role; an absent optional role is empty."""
        column = _column(self.config, name, role, values)
        if column is None and role not in _OPTIONAL:
            raise BadInput(f"the row has no {role}")
        value = "" if column is None else values[column]
        if value is None and role in _OPTIONAL:
            return ""
        return value

    def text(self, name: str, role: str, values: dict[str, Any]) -> str:
        """The same, refused where it is not text."""
        value = self.value(name, role, values)
        if not isinstance(value, str):
            raise BadInput(f"the row's {role} is not text")
        return value

    def encode(self, name: str, values: dict[str, Any]) -> list[Tokens]:
        """The row's tokens: one row for most formats, several for a long document."""
        self.chat.see(())
        if name == "document":
            return self._chunks(self.text(name, "document", values))
        if name == "text":
            self._check_no_pictures(values)
            text = self.text(name, "text", values)
            return [self._closed(self.chat.encode_spans(text, [(0, len(text))] if text.strip() else []))]
        messages = self.messages(name, values)
        if messages is not None:
            if not any(m["role"] == "assistant" and words_of(m["content"]).strip() for m in messages):
                raise BadInput("the row has no token to train on (no assistant message with content)")
            return self.chat.encode_chat(messages, responses_only=self.config.responses_only)
        prompt, response = self.pair(name, values)
        if not response.strip():
            raise BadInput("the row has no token to train on (its response is empty)")
        ids, trained = self.chat.encode_pair(prompt, response)
        if not self.config.responses_only:
            trained = [True] * len(ids)
        return [self._closed((ids, trained))]

    def messages(self, name: str, values: dict[str, Any]) -> list[dict[str, Any]] | None:
        """The row as a conversation, where it is written with the chat template; its images are looked at."""
        written = self._conversation(name, values)
        self.chat.see(())
        if written is None:
            self._check_no_pictures(values)
            return None
        if self.chat.look is None:
            refuse_pictures(values)
            return normalize_messages(written)
        refuse_sound(values)
        if not has_pictures(values, written):
            return normalize_messages(written)
        written, sources = pictured_messages(written, values)
        messages = normalize_messages(written, sees=True)
        self.chat.see([picture_of(source, self.folder) for source in sources])
        return messages

    def _check_no_pictures(self, values: dict[str, Any]) -> None:
        """Refuse images in a row that is no conversation."""
        if self.chat.look is None:
            refuse_pictures(values)
            return
        refuse_sound(values)
        if has_pictures(values):
            raise BadInput(
                "the row has images, which need a conversation to stand in; write it as messages, or set"
                " prompt_template to chat"
            )

    def _conversation(self, name: str, values: dict[str, Any]) -> Any:
        """The row's messages as it has them; None where it is no conversation."""
        if name == "chat":
            return self.value(name, "messages", values)
        if name == "completion" and isinstance(self.value(name, "prompt", values), list):
            answer = self.value(name, "completion", values)
            if isinstance(answer, str):
                answer = [{"role": "assistant", "content": answer}]
            return [*self.value(name, "prompt", values), *(answer or [])]
        if name == "instruction" and self.config.prompt_template == "chat":
            parts = [self.text(name, "instruction", values), self.text(name, "input", values)]
            return [
                {"role": "user", "content": "\n\n".join(part for part in parts if part.strip())},
                {"role": "assistant", "content": self.text(name, "response", values)},
            ]
        return None

    def pictures(self, rows: Sequence[Tokens]) -> list[tuple[Picture, ...]]:
        """The images in each of the tokens that one row was written as.

        Raises:
            BadInput: the template has left some out, the tokens end within one, or the text has tokens that
                stand for parts of an image that is not there.
        """
        sight, pictures = self.chat.sight, self.chat.pictures
        pictures_of: list[tuple[Picture, ...]] = []
        if sight is None:  # no image yet: `check_images` looks again
            return [()] * len(rows)
        is_whole = not self.chat.was_cut
        for ids, _ in rows:
            if len(ids) > self.max_length and self.config.long_rows != "truncate":
                pictures_of.append(())  # it is dropped or refused for its length
                is_whole = False
            else:
                is_whole = is_whole and len(ids) <= self.max_length
                pictures_of.append(sight.seen_in(ids[: self.max_length], pictures))
        if is_whole and max(map(len, pictures_of)) < len(pictures):
            raise BadInput("the chat template leaves out an image of the row; write images in user messages")
        return pictures_of

    def pair(self, name: str, values: dict[str, Any]) -> tuple[str, str]:
        """The row as prompt and response."""
        if name == "completion":
            return self.text(name, "prompt", values), self.text(name, "completion", values)
        instruction, extra = self.text(name, "instruction", values), self.text(name, "input", values)
        template = self.config.prompt_template
        without, with_input = TEMPLATES.get(template, (template, template))
        if "{instruction}" not in without:
            raise BadInput(
                f"prompt_template {template!r} is no known name and has no {{instruction}}; use"
                " alpaca, question or chat, or put {instruction} into the text"
            )
        chosen = with_input if extra.strip() else without
        prompt = chosen.replace("{input}", extra).replace("{instruction}", instruction)
        response = self.text(name, "response", values)
        if not response.strip():
            return prompt, ""
        return prompt, response if prompt[-1:].isspace() else " " + response

    def sample(self, name: str, values: dict[str, Any]) -> Sample | None:
        """The row as a prompt for a sample, with the answer that the data give."""
        if name in ("text", "document"):
            return None
        messages = self.messages(name, values)
        names = [str(p.source) for p in self.chat.pictures if isinstance(p.source, Path)]
        if messages is None:
            prompt, response = self.pair(name, values)
            return {"prompt": prompt, "expected": response.strip()}
        if len(names) < len(self.chat.pictures):
            return None  # the record names images, it does not hold them
        while messages and messages[-1]["role"] != "assistant":
            messages = messages[:-1]
        sample = {
            "prompt": self.chat.written(messages[:-1], for_answer=True),
            "expected": words_of(messages[-1]["content"]).strip(),
        }
        return {**sample, "images": names} if names else sample

    def request_of(self, sample: Sample) -> tuple[list[int], dict[str, Any]]:
        """A sample's tokens, begun as in training, and the tensors of its images, if it has some."""
        pictures = [picture_of(name, Path()) for name in sample.get("images", ())]
        self.chat.see(pictures)
        sight = self.chat.sight
        if not pictures or sight is None:
            return self.prompt_ids(sample["prompt"]), {}
        ids = self.prompt_ids(sight.filled(sample["prompt"], pictures)[0])
        return ids, sight.inputs([pictures], torch.tensor([ids]))

    def prompt(self, name: str, text: str) -> Sample:
        """A user's question in the words of the rows: with the template that the run trains on."""
        if name == "chat" or (name == "instruction" and self.config.prompt_template == "chat"):
            return {"prompt": self.chat.render([{"role": "user", "content": text}], for_answer=True)}
        if name == "instruction":
            column = (
                self.config.fields.get("instruction") or "instruction",
                self.config.fields.get("response"),
            )
            return {"prompt": self.pair(name, {column[0]: text, column[1] or "response": ""})[0]}
        return {"prompt": text}

    def prompt_ids(self, prompt: str) -> list[int]:
        """A prompt's tokens, begun as in training."""
        ids = self.long.all_ids(prompt.rstrip(" ")[-_LONGEST_PROMPT:])
        if self.adds_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        return ids or ([self.eos] if self.eos is not None else [0])

    def _closed(self, tokens: Tokens) -> Tokens:
        """Begin and end tokens, once each."""
        ids, trained = tokens
        if not any(trained) and not self.chat.was_cut:
            raise BadInput("the row has no token to train on (it is empty)")
        if self.adds_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids, trained = [self.bos, *ids], [False, *trained]
        if self.eos is not None and ids[-1:] != [self.eos]:
            ids, trained = [*ids, self.eos], [*trained, True]
        return ids, trained

    def _chunks(self, text: str) -> list[Tokens]:
        """A long text in windows, each begun as the model expects."""
        ids = self.long.all_ids(text)
        if self.eos is not None:
            ids = [*ids, self.eos]
        head = [self.bos] if self.adds_bos and self.bos is not None else []
        size = self.max_length - len(head)
        parts = [ids[start : start + size] for start in range(0, len(ids), size)]
        return [([*head, *part], [False] * len(head) + [True] * len(part)) for part in parts]


def load_data(
    path: str | Path | Source,
    encoder: RowEncoder,
    *,
    splits: tuple[str, ...] = ("train",),
    first: int = 0,
    store: TokenStore | None = None,
) -> TokenData:
    """Read and tokenise one place; bad rows stop the run, or are counted where that is asked for.

    Args:
        path: a file, a folder, or a `Source`.
        encoder: writes rows as tokens.
        splits: names of splits to look for; the first that there is.
        store: where tokens go that are not to stay in memory; rows of the hub then come as they are read.
        first: what is added to the rows' numbers, where other places come before.
    """
    source = path if isinstance(path, Source) else Source(path=str(path))
    bad = BadRows(skip=encoder.config.skip_bad_rows)
    data = TokenData([] if store is None else StoredExamples(store), DataReport(str(source)))
    name, refused = "", 0
    encoder.folder = source.folder
    for row in read_source(source, bad, splits=splits, stream=store is not None):
        data.report.rows += 1
        if not name:
            name = data.report.format = encoder.choose_format(row.values, f"{source}, row {row.number}")
            _check_format(name, encoder)
        encoder.chat.inexact = encoder.chat.was_cut = False
        try:
            encoded = encoder.encode(name, row.values)
            if not any(any(trained[1:]) for _, trained in encoded) and not encoder.chat.was_cut:
                raise BadInput("the row has no token to train on")
            pictures_of = encoder.pictures(encoded)
        except BadInput as error:
            refused += 1
            bad.refuse(f"{source}, row {row.number}: {error}", error)
            continue
        data.report.inexact += encoder.chat.inexact
        for tokens, pictures in zip(encoded, pictures_of, strict=True):
            _keep(tokens, pictures, Row(row.number + first, {}), data, encoder)
    data.report.rows += bad.count - refused  # those that could not even be read are rows, too
    _finish(data, bad)
    return data


def read_samples(
    path: str | Path | Source, encoder: RowEncoder, rows: Sequence[int], name: str, *, splits: tuple[str, ...]
) -> list[Sample]:
    """The rows with these numbers as prompts with the answers that the data give."""
    numbers, samples = set(rows), []
    source = path if isinstance(path, Source) else Source(path=str(path))
    encoder.folder = source.folder
    for row in read_source(source, BadRows(skip=True), splits=splits):
        if row.number in numbers:
            numbers.discard(row.number)
            if sample := encoder.sample(name, row.values):
                samples.append(sample)
        if not numbers:
            break
    return samples


def _check_format(name: str, encoder: RowEncoder) -> None:
    if name == "chat" or (name == "instruction" and encoder.config.prompt_template == "chat"):
        encoder.chat.require_template()


def _keep(
    tokens: Tokens, pictures: tuple[Picture, ...], row: Row, data: TokenData, encoder: RowEncoder
) -> None:
    ids, trained = tokens
    report, limit = data.report, encoder.max_length
    if len(ids) > limit:
        if encoder.config.long_rows == "refuse":
            least = "at least " if encoder.chat.was_cut else ""
            raise BadInput(
                f"{report.path}, row {row.number} has {least}{len(ids):,} tokens, but max_seq_length is"
                f" {limit:,}; raise it, or set long_rows to truncate or drop."
            )
        report.truncated += encoder.config.long_rows == "truncate"
        ids, trained = ids[:limit], trained[:limit]
        if encoder.config.long_rows == "drop" or not any(trained[1:]):
            report.dropped += 1
            return
    example = Example(np.asarray(ids, np.int32), np.asarray(trained, np.bool_), row.number, pictures)
    example.trained[0] = False
    data.examples.append(example)
    report.tokens += len(ids)
    report.trained_tokens += int(example.trained.sum())


def _finish(data: TokenData, bad: BadRows) -> None:
    report = data.report
    report.skipped += bad.count
    report.examples = len(data.examples)
    if data.examples:
        return
    if report.rows == 0:
        raise BadInput(f"{report.path} is empty; training and evaluation need at least one row.")
    raise BadInput(
        f"{report.path} has no usable row ({report.skipped:,} bad, {report.dropped:,} without a trained"
        f" token within max_seq_length, of {report.rows:,}); check format, columns and length."
    )


def split_rows(data: TokenData, fraction: float, seed: int) -> tuple[TokenData, TokenData]:
    """Hold out a share of the rows for evaluation; parts of one row stay together."""
    rows = sorted({example.row for example in data.examples})
    if len(rows) < 2 and len(data.examples) > 1:  # a document: its windows are split instead
        rows = key = list(range(len(data.examples)))
    else:
        key = [example.row for example in data.examples]
    count = max(1, round(len(rows) * fraction))
    if count >= len(rows):
        raise BadInput(
            f"{data.report.path} has {len(rows)} usable rows, too few to hold out {fraction:g} of them;"
            " give eval_data, or a smaller eval_fraction."
        )
    chosen = np.random.default_rng([seed, 1]).permutation(len(rows))[:count]
    held = {rows[i] for i in chosen}
    return _select(data, key, held, inside=False), _select(data, key, held, inside=True)


def _select(data: TokenData, keys: Sequence[int], held: set[int], *, inside: bool) -> TokenData:
    examples = subset(data.examples, [i for i, key in enumerate(keys) if (key in held) == inside])
    report = DataReport(
        data.report.path,
        data.report.format,
        rows=len({e.row for e in examples}),
        examples=len(examples),
        tokens=sum(len(e) for e in examples),
        trained_tokens=sum(int(e.trained.sum()) for e in examples),
    )
    if not inside:
        report.skipped, report.truncated, report.dropped = (
            data.report.skipped,
            data.report.truncated,
            data.report.dropped,
        )
    return TokenData(examples, report)
