"""Messages between engine and worker over a Unix socket: four bytes of length, then one JSON object. No torch.

A message may bring one open file with it (the memory that weights pass through); it then says `"file": true`.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

MAX_FRAME_BYTES = 256 << 20
SEND_S = 60
Message = dict[str, Any]


class WireError(Exception):
    """What came is no message, or the other side does not read."""


class Wire:
    """One end. `send` may be called from any thread, `receive` from one."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()
        self._received = bytearray()
        self._files: list[int] = []
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_S, 0))

    def send(self, message: Mapping[str, Any], file: int | None = None) -> None:
        """Send one message, with an open file where given.

        Raises WireError when the other side is gone or has not read for a minute.
        """
        body = json.dumps(dict(message) | ({"file": True} if file is not None else {}), allow_nan=False).encode()
        frame = len(body).to_bytes(4, "little") + body
        try:
            with self._sending:
                if file is not None:
                    socket.send_fds(self._end, [frame[:1]], [file])
                    frame = frame[1:]
                self._end.sendall(frame)
        except BlockingIOError as error:
            raise WireError(f"the other side has read nothing for {SEND_S} s") from error
        except OSError as error:
            raise WireError(f"the other side is gone ({error.strerror or error})") from error

    def receive(self, wait_s: float | None = None) -> tuple[Message, int | None] | None:
        """The next message and the file it brings; None when the other side has closed.

        Raises TimeoutError when none came within `wait_s`, WireError for what is no message.
        """
        while (size := self._whole()) is None:
            try:
                if wait_s is not None and not select.select([self._end], [], [], wait_s)[0]:
                    raise TimeoutError
                data, files, _, _ = socket.recv_fds(self._end, 1 << 16, 1)
            except TimeoutError:
                raise
            except (OSError, ValueError):  # closed by ourselves, or by a peer that died
                return None
            if not data:
                return None
            self._received += data
            self._files += files
        body = bytes(self._received[4 : 4 + size])
        del self._received[: 4 + size]
        return self._message(body)

    def close(self) -> None:
        """Close this end; a `receive` that waits returns None."""
        with suppress(OSError):  # the other side was first
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _whole(self) -> int | None:
        """The size of the next message's body when all of it has arrived."""
        if len(self._received) < 4:
            return None
        size = int.from_bytes(self._received[:4], "little")
        if size > MAX_FRAME_BYTES:
            raise WireError(f"a message of {size} bytes was announced, which no engine sends")
        return size if len(self._received) >= 4 + size else None

    def _message(self, body: bytes) -> tuple[Message, int | None]:
        try:
            message = json.loads(body)
        except ValueError as error:
            raise WireError(f"what came is not JSON: {body[:60]!a}") from error
        if not isinstance(message, dict) or not isinstance(message.get("op"), str):
            raise WireError(f"what came is no message: {body[:60]!a}")
        if not message.pop("file", False):
            return message, None
        if not self._files:
            raise WireError("a message announced a file and brought none")
        return message, self._files.pop(0)
