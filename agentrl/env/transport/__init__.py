"""The ways from a client to the sessions: in this process, over HTTP, over a WebSocket."""
