"""A receiver of webhooks that prints each: `python3 receiver.py PORT`."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Receiver(BaseHTTPRequestHandler):
    """Answers every POST with 204, once it has printed what happened to which task."""

    def do_POST(self) -> None:
        """Take one message."""
        task = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(self.headers["X-Headgate-Event"], task["taskId"], task["state"], flush=True)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing else."""


HTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
