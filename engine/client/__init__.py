"""The API process's side of engines: transports, request streams and routing over engines."""
