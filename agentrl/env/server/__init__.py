"""What speaks to clients: an ASGI application, and several processes behind one port."""
