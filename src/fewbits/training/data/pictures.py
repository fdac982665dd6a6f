"""The images of a row: where they stand in its messages, and what a processor makes of them.

A row has images within its messages (parts of type image) or beside them (the column ``images`` or
``image``). `pictured_messages` brings both to one form: parts that hold a place, and the images in order.

A processor of transformers writes many tokens for each place, as many as the image has patches for the model.
`Sight` asks the processor itself what it writes, by listening to what it hands to its tokenizer, so that
tokens and trained spans come from the text that the model sees, whatever the family.
"""

from __future__ import annotations

import base64
import binascii
import copy
import hashlib
import io
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewbits.errors import BadInput, Unsupported

if TYPE_CHECKING:
    from PIL.Image import Image

_COLUMNS = ("images", "image")
_HOLDS = ("image", "image_url", "url", "path", "base64", "bytes")  # what a part may name its image by
_KINDS = ("image", "image_url")
_UNREADABLE = (OSError, ValueError, SyntaxError, struct.error)  # of files that are damaged, or of their EXIF
_TRIED = 64  # pixels of a side: large enough for every processor's patches


@dataclass(frozen=True)
class Picture:
    """One image of a row, not decoded.

    Attributes:
        source: a file, or the bytes of one.
        digest: a hash of its content.
        size: width and height in pixels, upright.
    """

    source: Path | bytes
    digest: bytes
    size: tuple[int, int]

    def opened(self) -> Image:
        """The image, upright and in RGB."""
        from PIL import Image

        with Image.open(io.BytesIO(_content(self.source))) as image:
            return _upright(image).convert("RGB")


def _upright(image: Image) -> Image:
    """Turned as its file says (cameras store what they saw and how they were held), as transformers does."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _content(source: Path | bytes) -> bytes:
    return source if isinstance(source, bytes) else source.read_bytes()


def picture_of(value: Any, folder: Path) -> Picture:
    """What a row has for an image: a file's name, ``{"bytes", "path"}``, a data URL, or an image of PIL.

    Args:
        value: one of these.
        folder: of the data; names are looked for there, then in the working directory.

    Raises:
        BadInput: there is no such image, or it cannot be read.
    """
    from PIL import Image, UnidentifiedImageError

    source = _source(value, folder)
    try:
        content = _content(source)
        with Image.open(io.BytesIO(content)) as image:
            size = _upright(image).size  # reads it, too
    except (*_UNREADABLE, UnidentifiedImageError, Image.DecompressionBombError) as error:
        name = "its bytes" if isinstance(source, bytes) else str(source)
        text = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise BadInput(f"an image of the row cannot be read ({name}: {text})") from error
    return Picture(source, hashlib.blake2b(content, digest_size=16).digest(), size)


def _source(value: Any, folder: Path) -> Path | bytes:
    if isinstance(value, Mapping):
        value = next((value[name] for name in ("bytes", "path", "url") if value.get(name)), None)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if hasattr(value, "save") and hasattr(value, "convert"):  # PIL's, as datasets decodes them
        written = io.BytesIO()
        value.save(written, format="PNG")
        return written.getvalue()
    if not isinstance(value, (str, Path)) or not str(value):
        raise BadInput("an image of the row is neither a file's name nor bytes nor an image of PIL")
    return _named(str(value), folder)


def _named(value: str, folder: Path) -> Path | bytes:
    if value.startswith("data:"):
        return _from_base64(value.partition(",")[2])
    if value.startswith(("http://", "https://")):
        raise BadInput(f"an image of the row is at {value[:100]}, which is not fetched; save it as a file")
    name = value.removeprefix("file://")
    for path in (folder / name, Path(name)):
        if path.is_file():
            return path.resolve()
    raise BadInput(f"there is no image {name} (beside the data, in {folder}, or in the working directory)")


def _from_base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise BadInput(f"an image of the row is no valid base64 ({error})") from error


def has_pictures(values: Mapping[str, Any], messages: Any = None) -> bool:
    """Whether a row has images, beside its messages or within."""
    if any(_listed(values.get(column)) for column in _COLUMNS):
        return True
    return any(
        isinstance(part, Mapping) and part.get("type") in _KINDS
        for message in (messages if isinstance(messages, (list, tuple)) else ())
        if isinstance(message, Mapping)
        for part in _parts(message.get("content", message.get("value")))
    )


def _listed(value: Any) -> list[Any]:
    if value is None or (isinstance(value, str) and not value):
        return []
    return [one for one in value if one is not None] if isinstance(value, (list, tuple)) else [value]


def _parts(content: Any) -> list[Any]:
    return list(content) if isinstance(content, (list, tuple)) else []


def pictured_messages(messages: Any, values: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """A row's messages with a part of type image at each place, and what stands for the images, in order.

    Args:
        messages: as the row has them.
        values: the row, whose images may stand beside the messages.

    Raises:
        BadInput: places and images are not as many.
    """
    beside = [one for column in _COLUMNS for one in _listed(values.get(column))]
    within: list[Any] = []
    places, written = 0, []
    for message in messages if isinstance(messages, (list, tuple)) else ():
        content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
        if not _parts(content):
            written.append(message)
            continue
        parts = []
        for part in _parts(content):
            if not isinstance(part, Mapping) or part.get("type") not in _KINDS:
                parts.append(_without_blanks(part))
                continue
            places += 1
            within += _held_by(part)
            parts.append({"type": "image"})
        written.append({**message, "content": parts})
    if beside and within:
        raise BadInput("the row has images both within its messages and beside them; leave one of the two")
    if beside and not places:  # as TRL reads such rows: before the first question
        return _with_places(written, len(beside)), beside
    if places != len(beside or within):
        raise BadInput(
            f"the row's messages have {places} places for images, and the row has {len(beside or within)}"
            " images; give each place its image, in the part or in the column images"
        )
    return written, beside or within


def _held_by(part: Mapping[str, Any]) -> list[Any]:
    """The image of a part, if it holds one."""
    for name in _HOLDS:
        value = part.get(name)
        if value is None:
            continue
        if name == "image_url" and isinstance(value, Mapping):
            value = value.get("url")
        return [_from_base64(value) if name == "base64" else value]
    return []


def _without_blanks(part: Any) -> Any:
    """A part as it was written: data sets give each part all keys of all parts."""
    if isinstance(part, Mapping):
        return {name: value for name, value in part.items() if value is not None}
    return part


def _with_places(messages: list[Any], count: int) -> list[Any]:
    """So many places for images in front of the first user's words."""
    for number, message in enumerate(messages):
        if message.get("role", message.get("from")) not in ("user", "human"):
            continue
        content = message.get("content", message.get("value"))
        words = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        rest = {name: value for name, value in message.items() if name not in ("content", "value")}
        begun = {**rest, "content": [{"type": "image"}] * count + words}
        return [*messages[:number], begun, *messages[number + 1 :]]
    raise BadInput("the row has images, and no user's message that they could belong to")


class _Heard:
    """A tokenizer that remembers the texts it is called with."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.texts: list[str] = []

    def __call__(self, text: Any, **options: Any) -> Any:
        self.texts = [text] if isinstance(text, str) else list(text)
        return self.tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


class Sight:
    """What one processor makes of images.

    Attributes:
        processor: of transformers, with an image processor.
        place: what the chat template writes where an image belongs.
        kinds: names of the inputs that say of each token whether it is an image's, and what they say of
            which token.
        token_ids: tokens that stand for parts of an image.
    """

    def __init__(self, processor: Any, tokenizer: Any) -> None:
        """Try the processor with a blank image.

        Raises:
            Unsupported: it has no image processor, or no token for an image.
        """
        if getattr(processor, "image_processor", None) is None:
            raise Unsupported(f"{type(processor).__name__} has no image processor, which images need.")
        self.processor = processor
        self.tokenizer = tokenizer
        names = [getattr(processor, name, None) for name in ("image_token", "boi_token")]
        self._candidates = list(dict.fromkeys(name for name in names if isinstance(name, str)))
        if not self._candidates:
            raise Unsupported(
                f"{type(processor).__name__} names no token for an image (image_token), by which images are"
                " put into a text."
            )
        self.place = ""
        self.kinds: dict[str, dict[int, int]] = {}
        self.token_ids: frozenset[int] = frozenset()
        self._expansions: dict[tuple[int, int], str] = {}

    def find_place(self, written: str) -> None:
        """Learn from a conversation with one image, as the template writes it, what stands for the image.

        Raises:
            BadInput: the template writes no place for it.
        """
        if self.place:
            return
        places = [name for name in self._candidates if written.count(name) == 1]
        if not places:
            raise BadInput(
                "the chat template writes no place for an image; leave chat_template out, so that the model's"
                " own is taken, or give one that writes"
                f" {self._candidates[0]} for a part of type image"
            )
        self.place = places[0]
        self._try()

    def _try(self) -> None:
        from PIL import Image

        _, out = self._heard([1], [Image.new("RGB", (_TRIED, _TRIED))])
        ids = out["input_ids"]
        for name, values in out.items():
            if name in ("input_ids", "attention_mask") or tuple(values.shape) != tuple(ids.shape):
                continue
            pairs = zip(ids.flatten().tolist(), values.flatten().tolist(), strict=True)
            self.kinds[name] = {token: kind for token, kind in pairs if kind}
        placed = set(ids.flatten().tolist()) - set(self.tokenizer("")["input_ids"])
        told = {token for table in self.kinds.values() for token in table}
        image = getattr(self.processor, "image_token_id", None)
        self.token_ids = frozenset(told or placed.intersection([image]) or placed)

    def _heard(self, counts: Sequence[int], images: Sequence[Image]) -> tuple[list[str], Any]:
        """Rows of so many places each, and their images one after the other: what is written, and inputs."""
        processor = copy.copy(self.processor)
        processor.tokenizer = heard = _Heard(self.tokenizer)
        left = iter(images)
        nested = [[next(left) for _ in range(count)] for count in counts]
        try:
            out = processor(
                text=[self.place * count for count in counts],
                images=nested,
                padding=True,
                return_tensors="pt",
            )
        except (ValueError, TypeError, RuntimeError, LookupError, ImportError) as error:
            text = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise BadInput(
                f"{type(self.processor).__name__} does not take the row's images ({text})"
            ) from error
        return heard.texts, out

    def expansion(self, picture: Picture) -> str:
        """What the processor writes for an image of this size."""
        if picture.size not in self._expansions:
            texts, _ = self._heard([1], [picture.opened()])
            self._expansions[picture.size] = texts[0]
        return self._expansions[picture.size]

    def count(self, ids: Sequence[int]) -> int:
        """How many tokens of an image there are."""
        return sum(token in self.token_ids for token in ids)

    def has_parts(self, ids: NDArray[np.int32]) -> bool:
        """Whether any of these (T,) stands for a part of an image."""
        return bool(np.isin(ids, list(self.token_ids)).any())

    def tokens_of(self, picture: Picture) -> int:
        """How many tokens of an image this one has."""
        written = self.tokenizer(self.expansion(picture), add_special_tokens=False)["input_ids"]
        return self.count(written)

    def seen_in(self, ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[Picture, ...]:
        """Those of a row's images, from the first on, whose tokens these are.

        Raises:
            BadInput: the tokens end within an image, or the text names an image that is not there.
        """
        left, number = self.count(ids), 0
        while left > 0 and number < len(pictures):
            left -= self.tokens_of(pictures[number])
            number += 1
        if left:
            raise BadInput(
                "the row's tokens end within an image, or hold more images than the row has; raise"
                " max_seq_length, drop such rows (long_rows: drop), or correct the text"
            )
        return tuple(pictures[:number])

    def filled(self, text: str, pictures: Sequence[Picture]) -> tuple[str, list[tuple[int, int]]]:
        """The text with each place written out, and (a place's end, characters gained by then) of each.

        Raises:
            BadInput: the text has more places than there are images.
        """
        pieces = text.split(self.place)
        if len(pieces) - 1 > len(pictures):
            raise BadInput(
                f"the row's text has {len(pieces) - 1} times {self.place}, which stands for an image, and"
                f" {len(pictures)} images; take it out of the text"
            )
        written, gains, at, gained = [pieces[0]], [], len(pieces[0]), 0
        for piece, picture in zip(pieces[1:], pictures, strict=False):
            expansion = self.expansion(picture)
            at += len(self.place)
            gained += len(expansion) - len(self.place)
            gains.append((at, gained))
            written += [expansion, piece]
            at += len(piece)
        return "".join(written), gains

    def inputs(self, rows: Sequence[Sequence[Picture]], input_ids: Tensor) -> dict[str, Tensor]:
        """A batch's further inputs: the images of all rows, and of each token whether it is an image's.

        Args:
            rows: the images of each row.
            input_ids: (B, T), of which the rows' images have as many tokens as they need.
        """
        batch: dict[str, Tensor] = {}
        pictured = [row for row in rows if row]
        if pictured:
            images = [picture.opened() for row in pictured for picture in row]
            _, out = self._heard([len(row) for row in pictured], images)
            texts = {"input_ids", "attention_mask", *self.kinds}
            batch = {name: value for name, value in out.items() if name not in texts}
        for name, table in self.kinds.items():
            kinds = torch.zeros_like(input_ids)
            for token, kind in table.items():
                kinds[input_ids == token] = kind
            batch[name] = kinds
        return batch


__all__ = ["Picture", "Sight", "has_pictures", "picture_of", "pictured_messages"]
