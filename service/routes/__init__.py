"""The endpoints: one module per group, each with a `router`.

The docstrings of the endpoint functions are their descriptions in the API reference at /docs.
"""
