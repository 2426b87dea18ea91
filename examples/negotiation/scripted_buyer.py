"""A buyer by rule, served as a model is: for tries without a second model.

python examples/negotiation/scripted_buyer.py [PORT]
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Buyer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = answer(asked["messages"])
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "buyer"}
        body = json.dumps({**reply, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """It prints nothing."""


def answer(messages):
    """DEAL within the budget that the system prompt names; a lower offer otherwise."""
    budget = int(re.search(r"\$(\d+)", messages[0]["content"])[1])
    prices = re.findall(r"\$(\d{1,6})\b", messages[-1]["content"])
    if prices and int(prices[-1]) <= budget:
        return "DEAL"
    return f"That is too much, I would give ${budget * 2 // 3}."


def serve(port=0):
    """A server that is not yet answering; `serve_forever` starts it."""
    return ThreadingHTTPServer(("127.0.0.1", port), Buyer)


if __name__ == "__main__":
    serve(int(sys.argv[1]) if len(sys.argv) > 1 else 8001).serve_forever()
