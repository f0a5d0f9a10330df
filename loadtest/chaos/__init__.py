"""Faults and clients that misbehave, while others use the server.

    python -m loadtest.chaos

Each scenario starts its own server with the bundled model and loads it with streams, plain answers,
batches and scores. Then the fault happens. Afterwards it checks that each request ended in exactly
one terminal answer, that slots and memory came back, and whether the server is ready again. Exit
code 1 if one of these fails.

    python -m loadtest.chaos --store redis
    python -m loadtest.chaos --store folder --turns 2000

Several servers on a shared store of states carry out the numbered turns of many sessions, each at a
random server. Meanwhile servers, engines and the store are killed (-9) and started again, or
stopped for seconds, and the network between a server and the store is cut, loses everything or is
slow; what, when and for how long is random. Clients ask again, with the number of the turn, until
it is carried out. Every answer, and every session's state in the end, must be those of a witness
that nothing happened to, bit for bit. Exit code 1 if a turn is lost, doubled or another's.
"""
