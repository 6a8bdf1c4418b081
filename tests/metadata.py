"""A cloud's metadata service on this machine. A program: python -m tests.metadata ADDRESS FILE

As a program it is AWS's, on port 80 of an address, and ends the instance at the time in FILE, once there is one.
"""

import contextlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TIME = "2026-11-27T08:22:00Z"


class Service(BaseHTTPRequestHandler):
    """Answers with what `values` of the server has for a path without its query; 404 without."""

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        path, _, query = self.path.partition("?")
        self.server.asked.append((self.command, path, query, body))
        value = self.server.values.get(path)
        status, text = self.server.rules(self, path, value(query) if callable(value) else value)
        self.send_response(status)
        self.send_header("ETag", str(len(self.server.asked)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(text.encode())

    do_GET = do_PUT = do_POST = answer  # noqa: N815

    def log_message(self, *_):
        pass


def plain(handler, path, value):
    """Google Cloud and Azure want to know that no browser asks."""
    meant = handler.headers.get("Metadata") == "true" or handler.headers.get("Metadata-Flavor") == "Google"
    return (
        (403, "") if not meant else (404, "") if value is None else value if isinstance(value, tuple) else (200, value)
    )


def aws(handler, path, value):
    """A token is good for one look."""
    tokens = handler.server.tokens
    if handler.command == "PUT":
        assert int(handler.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
        tokens.append(f"token-{len(handler.server.asked)}")
        return 200, tokens[-1]
    if handler.headers.get("X-aws-ec2-metadata-token") not in tokens:
        return 401, ""
    tokens.clear()
    return (404, "") if value is None else value if isinstance(value, tuple) else (200, value)


@contextlib.contextmanager
def service(rules, values, address=("127.0.0.1", 0)):
    """The service, which keeps its requests in `asked`, and its address as HOST:PORT."""
    server = ThreadingHTTPServer(address, Service)
    server.daemon_threads = True
    server.rules, server.values, server.asked, server.tokens = rules, values, [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server, f"{address[0]}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


ACTION = "/latest/meta-data/spot/instance-action"
EVENTS, NAME = "/metadata/scheduledevents", "/metadata/instance/compute/name"


def interruption(time):
    """The notice of AWS."""
    return json.dumps({"action": "terminate", "time": time})


def events(*kinds, resources=("vm_3",), start=""):
    """The events of Azure that vm_3 reads."""
    found = [{"EventId": kind[:2], "EventType": kind, "Resources": resources, "NotBefore": start} for kind in kinds]
    return {EVENTS: json.dumps({"DocumentIncarnation": 1, "Events": found}), NAME: "vm_3"}


if __name__ == "__main__":
    file = Path(sys.argv[2])
    notice = {ACTION: lambda _: interruption(file.read_text()) if file.exists() else None}
    with service(aws, notice, (sys.argv[1], 80)):
        print("ready", flush=True)
        threading.Event().wait()
