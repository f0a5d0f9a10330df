"""A whole server whose engine is another one: `python -m loadtest.served FACTORY SETTINGS`.

FACTORY is "module:function", as `engine.worker --engine` takes it, and SETTINGS are fields of
service.settings.Settings as a JSON object. The engine runs in a process of its own behind the real
transport; nothing else differs from `minserve serve`.
"""

from __future__ import annotations

import asyncio
import json
import sys

import engine.client
from engine.config import EngineConfig
from engine.transport import ProcessTransport
from service.server import serve
from service.settings import Settings


def main(argv: list[str]) -> int:
    """The server's exit code."""
    factory, settings = argv

    class OtherEngine(ProcessTransport):
        """Starts `factory`'s engine where the model's would be."""

        def __init__(self, config: EngineConfig, engine: str | None = None) -> None:
            super().__init__(config, engine or factory)

    vars(engine.client)["ProcessTransport"] = OtherEngine
    return serve(Settings(**json.loads(settings)))


def free_port() -> int:
    """A port that nobody listens at."""

    async def find() -> int:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        server.close()
        return port

    return asyncio.run(find())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
