"""HTTP/1.1 on sockets: connections, requests, answers."""
