"""How many replicas and how large a store many sessions need, simulated.

    python -m loadtest.cluster
    python -m loadtest.cluster --replicas 10 --sessions 1e6 --shards 1 2
    python -m loadtest.cluster --measure costs.json && python -m loadtest.cluster --costs costs.json
    python -m loadtest.cluster --replicas 4 --sessions 2000 --rows 200 --days 2 --events

Simulates replicas that share one store of states, as `minserve serve --state-store` does, for two
ways to place the turns: each at a random replica, or each at the replica that a hash of its session
names (affinity). It prints

- whether a turn finds its state in the replica's memory, reads it from the store, or begins anew;
- operations, bytes and memory of the store's shards;
- how long turns wait for a slot and for the store;
- what a failed replica and a change of their number cost;
- which resource is used up first, and at what multiple of the load.

How: sessions are sampled, and the printed errors are one standard error of this sample. A replica's
memory is LRU. A shard is simulated by rounds of its event loop; slots are a queue M/M/c. What is
not modelled: long prompts, turns that are quicker in smaller batches (each takes as long as with
all slots taken), waiting for a replica's threads that ask the store, a store that fails,
differences between replicas or between shards (except by the largest owner's index), copies of
shards.

The costs are measured ones: see --costs. `--events` also simulates event by event, for a small
number of sessions, and prints both.
"""
