"""The log tells when loops are compiled: a run is silent for some time then, once on a machine."""

from __future__ import annotations

from numba.core.event import Listener

from allforce.logs import log

COMPILE = "numba:compile"  # the event; loops that come from numba's cache cause none


class TellOnce(Listener):
    """Says so when the first loop of this process is compiled."""

    told = False

    def on_start(self, event) -> None:
        if not self.told:
            self.told = True
            log.info("compiling loops for this processor: up to a minute, once on a machine")

    def on_end(self, event) -> None:
        pass
