"""What crosses the process boundary, as plain data: requests, events, limits and their checks."""
