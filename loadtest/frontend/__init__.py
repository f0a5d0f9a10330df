"""The Python front end alone: a whole server over a mock engine, on a real socket.

    python -m loadtest.frontend

The mock engine is a process of its own, which sends ids through the real transport; tokenising,
detokenising, stop strings (of streams), metrics, API keys and the access log are on. Clients are
raw sockets that count bytes. Beside it, in the same run, a bare ASGI application under the same
uvicorn sends the same bytes: the ceiling. The server, and the ceiling, have one core for
themselves; the mock engine and the clients share another one.

The mock engine sends `--window` steps at once, whenever the clients have read all but as many of
those before them. So the front end is neither waited for nor flooded, and finds some steps each
time that it comes round, as behind a real engine that is quicker than it.
"""
