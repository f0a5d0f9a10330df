"""Requests that nobody should send: mutated bytes, generated cases, damaged snapshots.

    python -m loadtest.fuzz raw --requests 100000
    python -m loadtest.fuzz schema --examples 500          # needs the extra `test`
    python -m loadtest.fuzz snapshots

raw mutates valid requests; schema has schemathesis generate cases from the OpenAPI schema;
snapshots damages downloaded states. Each starts its own server with the bundled model. No answer
may be a 5xx, every complete request must be answered, and the engine's process must survive. Exit
code 1 otherwise.
"""
