"""Token ids and trainable spans of prompts, responses and chats.

Which tokens are trained is decided by character positions of the rendered text and the tokenizer's offsets,
never by looking for a marker in the text:

* a template with ``{% generation %}`` marks its own spans;
* otherwise the i-th response is what the template adds to the conversation before it: the text of the first i
  messages with the generation prompt must be a prefix of the text of the first i + 1, and it is checked;
* where later turns change how earlier ones are written (templates that drop thoughts), the conversation
  becomes one row for each response; where even that fails, the template is refused.

A token that would hold characters from both sides of a boundary is avoided by tokenising the two sides apart,
so that the prompt has the very tokens it has when the model answers it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from fewbits.errors import BadInput, Unsupported
from fewbits.models.chat.template import CHARACTERS, check_template
from fewbits.training.data.pictures import Picture, Sight
from fewbits.training.data.spans import Span, SpanEncoder, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRIAL = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})
# a template computes: it may divide by zero, look for what is not there, or ask for too long a range
_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_SEEING_TRIAL = (
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "question"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "answer"}]},
)
_PICTURES, _MOVING = ("images", "image"), ("videos", "video", "audio", "audios")
TEXT_ALONE = "the model reads text alone; take one that sees, or leave them out of the data"
TEXT_METHOD = (
    "only method sft of fewbits train reads images; take TRL's trainer, or leave them out of the data"
)
_NO_SOUND = "fewbits train reads text and images; leave them out of the data"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
}


def _check_length(text: str, messages: Sequence[dict[str, Any]]) -> None:
    """A template may write each content more than once, but not without end."""
    num_characters = sum(len(str(message.get("content", ""))) for message in messages)
    if len(text) > CHARACTERS + 4 * num_characters:
        raise BadInput(
            f"the chat template makes {len(text):,} characters of messages of {num_characters:,}; correct"
            " chat_template in the model's folder"
        )


def refuse_pictures(values: Mapping[str, Any], why: str = TEXT_ALONE) -> None:
    """Refuse a row that holds images or the like beside its text, which would be lost.

    Args:
        values: the row; a column that holds one text is taken for a description.
        why: the reason and the way out.

    Raises:
        BadInput: it does.
    """
    for column in (*_PICTURES, *_MOVING):
        value = values.get(column)
        if value is not None and not isinstance(value, str) and (not isinstance(value, list) or value):
            raise BadInput(f"the row has {column}, and {why}")


def refuse_sound(values: Mapping[str, Any]) -> None:
    """Refuse a row with videos or sounds, beside a model that sees.

    Raises:
        BadInput: it has some.
    """
    refuse_pictures({name: value for name, value in values.items() if name in _MOVING}, _NO_SOUND)


def _text_of(content: Any, why: str) -> Any:
    """A content of parts that are all text as that text; anything else as it is.

    Raises:
        BadInput: a part is an image or the like.
    """
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    for part in content:
        kind = part.get("type", "text")
        if kind != "text":
            raise BadInput(f"a message holds a part of type {kind}, and {why}")
    texts = [part.get("text") for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content  # type: ignore[arg-type]


def _in_parts(content: Any) -> Any:
    """A content as a list of parts, each a text or the place of an image.

    Raises:
        BadInput: a part is a video or the like.
    """
    if not isinstance(content, list):
        return [{"type": "text", "text": content or ""}] if isinstance(content, (str, type(None))) else 0
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "?"
        if kind not in ("text", "image"):
            raise BadInput(f"a message holds a part of type {kind}, and {_NO_SOUND}")
        if kind == "text" and not isinstance(part.get("text"), str):
            return 0
    return content


def words_of(content: Any) -> str:
    """What is written in a message's content: a text, or a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return str(content)


def normalize_messages(value: Any, why: str = TEXT_ALONE, *, sees: bool = False) -> list[dict[str, Any]]:
    """Messages as role and content, from them or from ShareGPT's ``from`` and ``value``.

    Args:
        value: the row's messages.
        why: what is said of a part that is an image.
        sees: contents become lists of parts, images among them.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise BadInput("the messages are not a list with at least one message")
    messages = []
    for item in value:
        if not isinstance(item, dict) or not ({"role", "from"} & item.keys()):
            raise BadInput("a message is not an object with a role and a content")
        role, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
        content = _in_parts(content) if sees else _text_of(content, why)
        if not isinstance(role, str) or not isinstance(content, (list if sees else str, type(None))):
            raise BadInput("a message has a role or a content that is not text")
        extra = {
            key: item[key]
            for key in item.keys() - {"role", "from", "content", "value"}
            if item[key] is not None
        }
        messages.append({"role": _ROLES.get(role, role), "content": content or "", **extra})
    return messages


class ChatEncoder(SpanEncoder):
    """Chats, and pairs of prompt and response, as token ids with a trainable mask.

    Attributes:
        look: gives what turns images into tokens; None for a model that reads text alone.
        sight: that, once there was an image.
        pictures: the images of the conversation at hand, in their order.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None = None,
        look: Callable[[], Sight] | None = None,
    ) -> None:
        super().__init__(tokenizer, limit)
        self.look = look
        self.sight: Sight | None = None
        self.pictures: Sequence[Picture] = ()
        self.template = tokenizer.chat_template
        self._tried = 0  # conversations of so many messages come to an end
        self.marks_responses = isinstance(self.template, str) and bool(_GENERATION.search(self.template))

    def require_template(self) -> None:
        """Refuse chat rows early where the tokenizer cannot write them."""
        self._try(_TRIAL)

    def _try(self, messages: Sequence[dict[str, Any]]) -> None:
        """Refuse a template that is absent, or does not come to an end on so many messages.

        What a template does grows with them, so it is tried again, in a process that can be stopped, when
        they are more than twice as many as those it was tried on.
        """
        if len(messages) <= self._tried:
            return
        if not self.template:
            raise BadInput(
                f"the tokenizer of {self.tokenizer.name_or_path} has no chat template, which chat rows need;"
                " use an instruct model, or write the rows as prompt and completion."
            )
        check_template(self.tokenizer, messages)
        self._tried = 2 * len(messages)

    def see(self, pictures: Sequence[Picture]) -> None:
        """What follows is one conversation with these images."""
        self.pictures = pictures
        if pictures and self.sight is None:
            assert self.look is not None
            sight = self.look()
            try:
                written = self.written(_SEEING_TRIAL)
            except BadInput:  # a template of texts alone, most often
                written = ""
            sight.find_place(written)
            self.sight = sight

    def render(self, messages: Sequence[dict[str, Any]], *, for_answer: bool = False) -> str:
        """The conversation as the template writes it; ``for_answer`` ends with the next response's head.

        Images are written out as the tokens that stand for them.
        """
        text = self.written(messages, for_answer=for_answer)
        if self.sight is None:
            return text
        return self.sight.filled(text, self.pictures)[0]

    def written(self, messages: Sequence[dict[str, Any]], *, for_answer: bool = False) -> str:
        """The same with one mark at each place of an image."""
        self._try(messages)
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=for_answer
                )
            )
        except _TEMPLATE_ERRORS as error:
            raise BadInput(f"the chat template refuses the messages ({error})") from error
        _check_length(text, messages)
        return text

    def encode_chat(self, messages: Sequence[dict[str, Any]], *, responses_only: bool) -> list[Tokens]:
        """One or, for templates that rewrite earlier turns, several rows of tokens."""
        if not responses_only:
            text = self.render(messages)
            return [self.encode_spans(text, [(0, len(text))])]
        if self.marks_responses:
            return [self._encode_marked(messages)]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text = self.render(messages)
        spans = self._spans(messages, turns, text)
        if spans is not None:
            return [self.encode_spans(text, spans)]
        rows = []
        for turn in turns:
            part = messages[: turn + 1]
            text = self.render(part)
            own = self._spans(part, [turn], text)
            if own is None:
                raise Unsupported(
                    "the chat template writes a conversation and its continuation differently, so its"
                    " responses have no exact place; mark them in the template with {% generation %}, or"
                    " train with responses_only=false."
                )
            rows.append(self.encode_spans(text, own))
        return rows

    def _spans(self, messages: Sequence[dict[str, Any]], turns: list[int], text: str) -> list[Span] | None:
        spans = []
        for turn in turns:
            head = self.render(messages[:turn], for_answer=True) if turn else ""
            through = text if turn == len(messages) - 1 else self.render(messages[: turn + 1])
            if not through.startswith(head) or not text.startswith(through):
                return None
            spans.append((len(head), len(through)))
        return spans

    def _encode_marked(self, messages: Sequence[dict[str, Any]]) -> Tokens:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._try(messages)
        try:
            texts, marks = render_jinja_template(
                [list(messages)],
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except _TEMPLATE_ERRORS as error:
            raise BadInput(f"the chat template refuses the messages ({error})") from error
        _check_length(texts[0], messages)
        text, spans = texts[0], [(int(start), int(end)) for start, end in marks[0]]
        if self.sight is not None:
            text, gains = self.sight.filled(text, self.pictures)
            spans = [(_moved(start, gains), _moved(end, gains)) for start, end in spans]
        return self.encode_touched(text, spans)

    def encode_pair(self, prompt: str, response: str) -> Tokens:
        """A prompt and its response; spaces at the prompt's end go to the response, as tokenizers do."""
        bare = prompt.rstrip(" ")
        text = prompt + response
        return self.encode_spans(text, [(len(bare), len(text))])


def _moved(at: int, gains: Sequence[tuple[int, int]]) -> int:
    """Where a character stands once the places before it have grown: (a place's end, what was gained)."""
    return at + max((gained for end, gained in gains if end <= at), default=0)
