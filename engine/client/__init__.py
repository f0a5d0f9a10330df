"""The API process's side of engines: transports, request streams, routing over engines."""
