"""A batch that lives: texts join it when a slot is free and leave it when they have ended.

    for text in LiveBatch(slots, prompts, settings).run(rows):   # in the order in which they end

Between two looks at the tokens, `look_every` steps run without the host: what a text makes behind its end
is dropped. While the device is busy with them the host sets out to read the prompts that come next, one
forward a look, so that the device need not wait for the host in between. While fewer than half of the
slots are in use it reads more, up to four pieces of a long prompt: texts that are being made never wait for
all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fewbits.models.generation.live.prompts import Prompt, Prompts
from fewbits.models.generation.live.rows import Request, Row, Text, chosen
from fewbits.models.generation.live.slots import Slots

_PIECES_IN_A_ROW = 4  # of prompts, while texts wait


class LiveBatch:
    """Makes texts in the slots of one model.

    Attributes:
        texts: those in the slots now, from the first slot on, without gaps.
        steps: how many there were.
        filled: how many texts all steps had together; over ``steps`` it is the mean.
    """

    def __init__(
        self, slots: Slots, prompts: Prompts, settings: Callable[[Row], Request], *, look_every: int = 1
    ) -> None:
        self.slots, self.prompts, self.request_of, self.look_every = slots, prompts, settings, look_every
        self.texts: list[Text] = []
        self.steps = self.filled = 0

    def run(self, rows: Sequence[Row]) -> Iterator[Text]:
        """Make a text of each row; those that have ended, as they end."""
        waiting = deque(rows)
        while waiting or self.texts:
            self._join(waiting)
            yield from self._ended()
            if self.texts:
                self._advance(waiting)
                yield from self._ended()

    def _join(self, waiting: deque[Row]) -> None:
        """Prompts into free slots, each with its first token."""
        turns, tokens_read, joined = 0, 0, []
        most = _PIECES_IN_A_ROW * self.prompts.most_tokens
        while waiting and len(self.texts) < self.slots.count:
            read = self.prompts.ready.get(waiting[0].prompt)
            if read is None:
                enough = 2 * len(self.texts) >= self.slots.count or (self.texts and tokens_read >= most)
                if turns and enough:
                    break
                self.prompts.turn(self._next_prompts(waiting))
                turns, tokens_read = turns + 1, tokens_read + self.prompts.tokens_of_turn
                continue
            text = Text(waiting[0], self.request_of(waiting.popleft()))
            self.slots.put(len(self.texts), read)
            self.texts.append(text)
            joined.append((text, read.logits))
        if joined:
            texts = [text for text, _ in joined]
            tokens, trouble = chosen(texts, torch.stack([logits for _, logits in joined]))
            for text, token, why in zip(texts, tokens.tolist(), trouble.tolist(), strict=True):
                text.take(token, why)

    def _next_prompts(self, waiting: deque[Row]) -> list[Prompt]:
        """Those of as many rows as there are slots, in the order in which they are wanted."""
        return [row.prompt for row, _ in zip(waiting, range(self.slots.count), strict=False)]

    def _read_ahead(self, waiting: deque[Row]) -> None:
        """One forward towards prompts of rows that may join at the next look.

        None while a forward's tokens wait already: what is read lies in 16 bits beside the slots, whose plan
        knows of one prompt.
        """
        following = self._next_prompts(waiting)
        soon = following[: max(len(self.texts) // 4, 1)]
        ready = self.prompts.ready
        held = sum(len(prompt.ids) for prompt in dict.fromkeys(following) if prompt in ready)
        if held < self.prompts.most_tokens and any(prompt not in ready for prompt in soon):
            self.prompts.turn(following)

    def _advance(self, waiting: deque[Row]) -> None:
        """Some steps of all texts, and one look at what they made."""
        texts = self.texts
        every = 1 if any(text.request.has_to_see_every_token for text in texts) else self.look_every
        every = min(every, max(text.request.limit - len(text.tokens) for text in texts))
        tokens = torch.tensor([text.tokens[-1] for text in texts], device=self.prompts.model.device)
        tokens_of_steps, troubles = [], []
        for ahead in range(every):
            tokens, trouble = chosen(texts, self.slots.step(tokens), ahead)
            tokens_of_steps.append(tokens)
            troubles.append(trouble)
        self.steps, self.filled = self.steps + every, self.filled + every * len(texts)
        arrived = _on_the_way(torch.stack([torch.stack(tokens_of_steps, 1), torch.stack(troubles, 1)]))
        if self.look_every > 1:  # the host has time until the steps have run
            self._read_ahead(waiting)
        columns = arrived().tolist()
        for text, new, reasons in zip(texts, *columns, strict=True):
            for token, why in zip(new, reasons, strict=True):
                text.take(token, why)

    def _ended(self) -> Iterator[Text]:
        """Those that have ended, out of their slots; the last ones move into the gaps."""
        gone = [slot for slot, text in enumerate(self.texts) if text.stopped_by]
        ended = [self.texts[slot] for slot in gone]
        for slot in reversed(gone):
            last = self.texts.pop()
            if slot < len(self.texts):
                self.slots.move(len(self.texts), slot)
                self.texts[slot] = last
        yield from ended


def _on_the_way(tensor: Tensor) -> Callable[[], Tensor]:
    """Set out to copy a tensor of any shape to the host; a call that waits for it."""
    if not tensor.is_cuda:
        return lambda: tensor
    on_host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    there = torch.cuda.Event()
    there.record()

    def arrived() -> Tensor:
        there.synchronize()
        return on_host

    return arrived
