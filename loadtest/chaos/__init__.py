"""Chaos: what a server makes of faults and of clients that misbehave, while others use it.

    python -m loadtest.chaos

Each scenario starts a server of its own with the bundled model, loads it with streams, plain
answers, batches and scores, does something to it, and then looks: whether each request ended in
exactly one terminal answer, whether slots and memory came back, and what became of the server.
"""
