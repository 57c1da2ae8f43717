"""Asking a run to stop: SIGTERM or SIGINT lets it finish its step and save, a second one ends the process at once."""

from __future__ import annotations

import signal
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """`asked` turns true at the first signal. Only the process's main thread may make one."""

    def __init__(self) -> None:
        self.asked = False
        for number in _SIGNALS:
            signal.signal(number, self._ask)

    def _ask(self, _: int, __: FrameType | None) -> None:
        self.asked = True
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
