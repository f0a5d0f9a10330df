"""The service's part of inference: from validated requests to engine requests, and back to answers.

Admission control, the life of a request, generation, rendering of streams, and the runtime of the
model that is served.
"""
