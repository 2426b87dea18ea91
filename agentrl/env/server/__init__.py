"""The server: an ASGI application, and several processes that run it."""
