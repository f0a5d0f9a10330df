"""What it costs that several servers share their sessions in one store.

    python -m loadtest.store
    python -m loadtest.store --model 300kb --sessions 200
    python -m loadtest.store --model 26mb --sessions 100 --state-store file:///tmp/states

Starts a Redis of its own (appendonly yes, appendfsync always), or uses --state-store, starts
servers on it, and sends the turns of many sessions: each turn to a random server, then, with other
sessions, each to the server that rendezvous hashing names (affinity). Before that, one server
without a store carries out the same turns, session by session. It is the witness: texts and
log-probabilities of every turn must be equal to its own, bit for bit. Then it compresses states of
these sessions.

Exit code 1 if a turn failed or its answer differs from the witness's.
"""
