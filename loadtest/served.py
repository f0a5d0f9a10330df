"""Starts a whole server around another engine: `python -m loadtest.served FACTORY SETTINGS`.

FACTORY is "module:function", as `engine.worker --engine` takes it. SETTINGS is a JSON object of
fields of service.settings.Settings. The engine runs in a process of its own behind the real
transport; nothing else differs from `minserve serve`. The tools here start their servers so.
"""

from __future__ import annotations

import json
import socket
import sys

from service.server.server import serve
from service.settings import Settings


def main(argv: list[str]) -> int:
    """Run the server and return its exit code."""
    factory, settings = argv
    return serve(Settings(**json.loads(settings)), engine=factory)


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
