"""Requests that nobody should send: mutated bytes, and cases generated from the OpenAPI schema.

    python -m loadtest.fuzz raw --requests 100000
    python -m loadtest.fuzz schema --examples 500

A server of its own with the bundled model is asked. Nothing may be answered 5xx, nothing may be
left without an answer that was asked whole, and the engine's process must live through it.
"""
