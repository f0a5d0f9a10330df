"""Faults and clients that misbehave, while others use the server.

    python -m loadtest.chaos

Each scenario starts its own server with the bundled model and loads it with streams, plain answers,
batches and scores. Then the fault happens. Afterwards it checks that each request ended in exactly
one terminal answer, that slots and memory came back, and whether the server is ready again. Exit
code 1 if one of these fails.
"""
