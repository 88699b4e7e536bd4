"""A terminal for a program to write to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import termios
import threading
import time


class Terminal:
    """`file` is its side for the programs; what they wrote comes as they wrote it, but for \\r\\n."""

    def __init__(self, columns: int = 80) -> None:
        self._screen, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        self.file = os.fdopen(side, "wb", buffering=0)
        self._received = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with os.fdopen(self._screen, "rb", buffering=0) as screen, contextlib.suppress(OSError):
            while piece := screen.read(1 << 16):  # EIO at the end: nobody has the terminal open any more
                self._received += piece

    def wait_for(self, text: str, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while text.encode() not in self._received:
            if not self._reader.is_alive() or time.monotonic() > deadline:
                raise AssertionError(f"never wrote {text!r}: {bytes(self._received)!r}")
            time.sleep(0.01)

    def text(self) -> str:
        """Everything; waits for the end of the programs that write here."""
        self.file.close()
        self._reader.join()
        return self._received.decode().replace("\r\n", "\n")
