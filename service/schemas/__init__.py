"""Wire types: the requests and answers of the endpoints, as pydantic models.

The docstrings and field descriptions of these models are the API reference at /docs.
"""
