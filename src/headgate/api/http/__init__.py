"""HTTP/1.1 on a connection: requests in, responses out."""
