"""The Python front end alone: a whole server over a mock engine, on a real socket.

    python -m loadtest.frontend

The mock engine is a process of its own that sends ids through the real transport. Tokenising,
detokenising, stop strings (of streams), metrics, API keys and the access log are on. Clients are
raw sockets that count bytes.

Two bare ASGI applications stand beside it, in the same run and under the same uvicorn: the ceiling
(`bare`), which takes ids from the same mock engine, writes the same JSON and events, and does
nothing else; and one that sends the same bytes ready-made, without any engine (`ready`; for streams
of many lengths the bytes of the middle one).

Each server has one core, the mock engines and the clients another. Server and ceiling are loaded in
turn, a second each, so both meet the same changes of a shared machine.

The mock engine sends `--window` steps at once (of as many tokens as an event has), whenever the
clients have read all but as many of those before. So the front end neither waits nor is flooded: it
finds some steps each time, as behind a real engine that is quicker than it.
"""
