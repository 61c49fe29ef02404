"""The only place with sockets: URLs, connections, replies into buffers, scripts."""
