"""`minserve bench`: load on a running server over HTTP, seen as its users see it.

Requests arrive at times that do not depend on the responses (open loop), unless `--arrivals closed`
says so, and every latency counts from the time at which its request was meant to be sent: a server
or a client that falls behind cannot hide it by sending later (coordinated omission).
"""
