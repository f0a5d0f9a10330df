"""Upgrades are ignored, as RFC 9110 (7.8) allows: who would rather speak HTTP/2 or WebSocket is
answered by HTTP/1.1 on the connection that it has.

httptools takes what follows the head of such a request for the other protocol, its body too. So the
head is read once more, without the header that asks for it, and then what follows. (h11, which
stands in for httptools on other systems, does not mind.)
"""

from __future__ import annotations

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from service.http.errors import ApiError
from service.http.refusals import RefusingProtocol

try:
    from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade
except ImportError:
    HttpParserCallbackError = HttpParserError = None  # type: ignore[assignment, misc]
    HttpParserUpgrade = None  # type: ignore[assignment, misc]

IS_HTTPTOOLS = hasattr(AutoHTTPProtocol, "on_headers_complete")


class PlainProtocol(RefusingProtocol):
    """uvicorn's HTTP protocol, which stays the protocol of its connection."""

    def _should_upgrade(self) -> bool:
        """Asked by uvicorn, of either parser."""
        return False

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():  # else it comes again
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if not IS_HTTPTOOLS:
            super().data_received(data)
            return
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as stop:
                if self.parser.get_method() == b"CONNECT":  # asks for a tunnel without that header
                    self.refuse(_error("CONNECT is not supported"))
                    return
                (read,) = stop.args
                data = self._plain_head() + data[read:]
            except HttpParserCallbackError:  # uvicorn takes the target apart when a head has come
                self.refuse(_error("the target is no path"))
                return
            except HttpParserError as error:
                self.refuse(_error(str(error)))
                return

    def _plain_head(self) -> bytes:
        """The latest request's."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


def _error(reason: str) -> ApiError:
    return ApiError(400, f"this cannot be read as HTTP/1.1: {reason}", code="invalid_http")
