"""Transport between processes: the HTTP server, the HTTP connections of clients, TLS, file descriptors, WebSockets,
pipes, and links that resume after a broken connection.

Messages do not belong here: each protocol has its own module (nodes/messages.py, engines/relay/messages.py).
"""
