"""One of several API processes: `python -m service.server.api_processes`, which
`service.server.host` starts.

Settings come on standard input, orders over a pipe; signals are left to the host.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys

from engine.errors import ConfigError
from engine.supervisor.supervisor_client import remote_member
from service.server.api_server import run_application
from service.settings import Settings


def main(arguments: list[str]) -> int:
    """Runs the process; `arguments` are the command line's."""
    parser = argparse.ArgumentParser(prog="service.server.api_processes", description=__doc__)
    parser.add_argument("--number", type=int, required=True, help="in log lines")
    parser.add_argument("--listen", type=int, required=True, help="descriptor of the socket")
    parser.add_argument("--pipe", type=int, required=True, help="descriptor of the host's pipe")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = Settings.from_json(sys.stdin.buffer.read())
    logging.basicConfig(
        level=settings.log_level.upper(),
        format=f"minserve[{options.number}]: %(message)s",
        stream=sys.stderr,
    )
    listener = socket.socket(fileno=options.listen)
    engines = remote_member(options.pipe)
    try:
        failure = run_application(engines, settings, listener, signals=False)
    except ConfigError as error:  # in a file that has changed since the host read it
        logging.getLogger(__name__).error("error: %s", error.message)
        return 2
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
