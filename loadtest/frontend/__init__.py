"""The Python front end alone: a whole server over a mock engine, on a real socket.

    python -m loadtest.frontend

The mock engine is a process of its own, which sends ids through the real transport; tokenising,
detokenising, stop strings (of streams), metrics, API keys and the access log are on. Clients are
raw sockets that count bytes. Beside it, in the same run and under the same uvicorn, stand two bare
ASGI applications: the ceiling, which takes ids from the same mock engine and writes the same JSON
and events, and does nothing else (`bare`); and one that sends the same bytes, which it has ready,
without any engine (`ready`). Servers have one core, and the mock engines and the clients another
one. The server and the ceiling are loaded in turn, a second each, and wait in between: so both meet
the same changes of cores that other machines share. (Of streams of many lengths the ready
bytes are those of the middle one.)

The mock engine sends `--window` steps at once (of as many tokens as an event has), whenever the
clients have read all but as many of those before them. So the front end is neither waited for nor
flooded, and finds some steps each time that it comes round, as behind a real engine that is quicker
than it.
"""
