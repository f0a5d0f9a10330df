"""Load test of a running server over HTTP, seen as its users see it.

    python -m loadtest.http --url http://127.0.0.1:8000 --rate 20 --requests 200

Requests arrive at times that do not depend on the answers (open loop), unless `--arrivals closed`
says so, and every latency counts from the time at which its request was meant to be sent: a server
or a client that falls behind cannot hide it by sending later (coordinated omission).
"""

from loadtest.http.command import main

__all__ = ["main"]
