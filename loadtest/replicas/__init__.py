"""Replicas on a real Ray Serve: what faults cost their clients, and what its proxies do.

    python -m loadtest.replicas faults --turns 2000
    python -m loadtest.replicas faults --turns 500 --faults node head
    python -m loadtest.replicas proxies --replicas 1 2
    python -m loadtest.replicas proxies --replicas 1 2 4 --pin --clients 6   # 8 cores or more

`faults`: clients carry out numbered turns of many sessions, while replicas, their engines and Ray's
controller are killed, replicas are stopped, and the number of replicas changes; with `node` and
`head`, a Ray cluster of three nodes on this machine loses one of them. In the end every session
must have every turn once, with the text that one server alone gives. `proxies`: requests
and tokens per second straight to as many `minserve serve`, through vllm-router in front of them if
it is installed, through HAProxy, and through Ray's proxy in Python. Both start Ray and a Redis on
this machine.
"""
