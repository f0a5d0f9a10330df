"""The server process: sockets, TLS, API processes, signals, start and exit codes."""
