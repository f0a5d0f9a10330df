"""Messages between API processes and engines: requests, events, limits and their validation."""
