"""A whole server whose engine is another one: `python -m loadtest.served FACTORY SETTINGS`.

FACTORY is "module:function", as `engine.worker --engine` takes it, and SETTINGS are fields of
service.settings.Settings as a JSON object. The engine runs in a process of its own behind the real
transport; nothing else differs from `minserve serve`.
"""

from __future__ import annotations

import json
import socket
import sys

from service.server.server import serve
from service.settings import Settings


def main(argv: list[str]) -> int:
    """The server's exit code."""
    factory, settings = argv
    return serve(Settings(**json.loads(settings)), engine=factory)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
