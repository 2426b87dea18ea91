"""A server with vLLM's process tree: an engine process of its own session, shared memory.

Environment: FAKE_VLLM_FAIL ends it at the start with that line, FAKE_VLLM_STUBBORN ignores SIGTERM.
What only the engine knows is not answered while that is stopped.
"""

import http.server
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory

if failure := os.environ.get("FAKE_VLLM_FAIL"):
    sys.exit(f"api_server.py: error: {failure}")
stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
code = (stubborn if "FAKE_VLLM_STUBBORN" in os.environ else "") + "import time; time.sleep(600)"
# A session of its own and started by a shell that ends: no parent and no group leads to it.
background = f"'{sys.executable}' -c '{code}' agentrl-fake-engine >/dev/null 2>&1 & echo $!"
engine = subprocess.run(["setsid", "sh", "-c", background], stdout=subprocess.PIPE, check=True)
memory = shared_memory.SharedMemory(create=True, size=4096)
print(f"engine {engine.stdout.decode().strip()} memory {memory.name}", flush=True)
if "FAKE_VLLM_STUBBORN" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def engine_is_stopped():
    with open(f"/proc/{engine.stdout.decode().strip()}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        while self.path == "/weight_info" and engine_is_stopped():
            time.sleep(0.05)
        self.send_response(200 if self.path in ("/health", "/weight_info") else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
