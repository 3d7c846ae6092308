"""Connections of clients: one on which no request begins is closed, and what is no HTTP leaves a log line.

uvicorn by itself waits for ever for the first request of a connection, and for the rest of a head that has begun. Here
a connection is closed when no request begins within the seconds of keep-alive, and none is being answered. That also
bounds how long a body is read and thrown away after it was refused: at once would be too soon, because a client that
is still sending would not see the answer. What a slow reader has not received yet is sent before the end.
"""

import asyncio
from typing import final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from dubito.serve.engine import write_log


# uvicorn does not document what this class overrides and reads: hence its upper bound in pyproject.toml.
@final
class ClientConnection(H11Protocol):
    """One connection, from its beginning to its end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It begins."""
        super().connection_made(transport)
        self._check_idle_later(None)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        if self.conn.our_state is h11.IDLE:
            client = self.client[0] if self.client else ""
            write_log({"event": "no HTTP", "status": 400, "client": client})
            super().send_400_response(msg)
        else:  # within the body of a request, which has an answer or a log line of its own
            self.transport.close()

    def _check_idle_later(self, latest: RequestResponseCycle | None) -> None:
        self.loop.call_later(self.timeout_keep_alive, self._close_if_idle, latest)

    def _close_if_idle(self, latest: RequestResponseCycle | None) -> None:
        """Close the connection if the latest request is still the same, and was answered before the last check."""
        answered = self.cycle is None or self.cycle.response_complete
        if self.transport.is_closing():
            return
        if answered and self.cycle is latest:
            self.transport.close()
        else:
            self._check_idle_later(self.cycle if answered else None)
