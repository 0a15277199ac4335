"""Transport between processes: the HTTP server, HTTP connections of clients, TLS, file descriptors, WebSockets, pipes,
and links that resume after a broken connection.

Each protocol defines its messages in its own module (nodes/messages.py, engines/relay/messages.py).
"""
