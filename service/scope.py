"""What the service leaves in an ASGI scope, for those who handle the same request later."""

REQUEST_ID = "minserve.request_id"
ARRIVED = "minserve.arrived"  # by time.perf_counter
KEY_NAME = "minserve.key_name"  # of the key that the client showed, where one is asked for
LEAST_PRIORITY = "minserve.least_priority"  # the most urgent one that the key may ask for
RUNTIME = "minserve.runtime"  # service.runtime.Runtime that the request began with
FLIGHT = "minserve.flight"  # service.flight.Flight of a request for the model
ERROR_CODE = "minserve.error_code"  # of the error that the client got
OUTCOME = "minserve.outcome"  # where the status cannot tell it, and of all that has ended
STATUS = "minserve.status"  # of what has ended
TRACE = "minserve.trace"  # service.traces.Trace, where traces are taken
