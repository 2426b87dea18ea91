"""Serves environments over HTTP: an ASGI application, and the processes that run it."""
