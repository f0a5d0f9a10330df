"""`minserve bench`: load test of a running server over HTTP, from the view of its users.

Requests arrive at times that do not depend on the responses (open loop), unless `--arrivals closed`
is given. Every latency counts from the time at which its request was scheduled, so a slow server or
client cannot hide a delay by sending later (coordinated omission).
"""
