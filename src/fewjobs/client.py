"""One launcher, seen from the controller."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cached_property

from fewjobs.request import Request
from fewjobs.stage import Stage

MAX_MESSAGE = 200_000  # below the usual bound of a message on a socket


@dataclass(eq=False)
class Client:
    """A connection, and what it stands for.

    Attributes:
        socket: messages of NUL-separated fields.
        pid: the launcher.
        pid_of_tool: the tool that it has started, which leads a process group.
        request: what it asked for.
        stage: what was made of it, while that is not done.
        message: the sentence that is told with a failure.
        began: the clock when the tool started.
        is_unit: it belongs to no other launcher's tool.
    """

    socket: socket.socket
    pid: int
    pid_of_tool: int = 0
    request: Request | None = None
    stage: Stage | None = None
    message: str = ""
    began: float = 0.0
    closed: bool = False
    is_unit: bool = True

    @cached_property
    def group(self) -> int:
        """The process group of the launcher: that of the stage it belongs to, if any."""
        try:
            return os.getpgid(self.pid)
        except OSError:
            return 0

    def receive(self) -> str | None:
        """A message, "" at the end, None if there is none yet."""
        try:
            return os.fsdecode(self.socket.recv(1 << 16, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return None
        except OSError:
            return ""

    def send(self, *fields: str) -> bool:
        """Give an order; False if it is too long or the launcher is gone."""
        data = os.fsencode("\0".join([*fields, ""]))
        if len(data) > MAX_MESSAGE:
            return False
        try:
            self.socket.send(data, socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def printed(self, file: int) -> str | None:
        """What the tool has printed so far into one of the launcher's files; None if that was not kept."""
        if file < 0:
            return ""
        try:
            with open(f"/proc/{self.pid}/fd/{file}", "rb") as file_read:  # noqa: PTH123 - a magic link
                data = file_read.read(MAX_MESSAGE)
            return data.decode() if len(data) < MAX_MESSAGE // 4 and b"\0" not in data else None
        except (OSError, UnicodeDecodeError):
            return None
