"""What the service leaves in an ASGI scope, for those who handle the same request later."""

REQUEST_ID = "minserve.request_id"
ARRIVED = "minserve.arrived"  # by time.perf_counter
KEY_NAME = "minserve.key_name"  # of the key that the client showed, where one is asked for
FLIGHT = "minserve.flight"  # service.flight.Flight of a request for the model
OUTCOME = "minserve.outcome"  # where the status cannot tell it
