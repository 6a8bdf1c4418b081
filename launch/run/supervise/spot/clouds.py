"""The notice that a cloud ends this instance, read from the instance's metadata service.

The service is link-local, so it is never reached through a proxy: http.client uses none.
"""

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from launch.documents import Document, parse
from launch.errors import HostError

ADDRESS = "169.254.169.254"  # of all three clouds
ADDRESS_VARIABLE = "_HVDLAUNCH_METADATA"  # HOST:PORT of another service, for tests
CONNECT_S, ANSWER_S = 2.0, 5.0
ENABLE_S = 120.0  # Azure turns its events on at the first request for them, which may take two minutes
WAIT_S = 5  # until Google Cloud answers that nothing has changed
MOST_BYTES = 1 << 20


class Reply(NamedTuple):
    """A reply of the metadata service."""

    status: int
    text: str
    etag: str  # identifies a version of the value; "" without one


def request(
    method: str,
    path: str,
    headers: Mapping[str, str],
    *,
    body: str | None = None,
    timeout_s: float = ANSWER_S,
    may_be_missing: bool = False,
) -> Reply:
    """Return the service's reply; HostError unless its status is 200, or 404 for a value that `may_be_missing`."""
    from http.client import HTTPConnection, HTTPException  # slow to import

    connection = HTTPConnection(os.environ.get(ADDRESS_VARIABLE, ADDRESS), timeout=CONNECT_S)
    try:
        connection.connect()
        connection.sock.settimeout(timeout_s)
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        text = answer.read(MOST_BYTES).decode(errors="replace").strip()
    except (OSError, HTTPException) as error:
        raise HostError(f"{method} {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        connection.close()
    if answer.status != 200 and not (may_be_missing and answer.status == 404):
        raise HostError(f"{method} {path}: status {answer.status}")
    return Reply(status=answer.status, text=text, etag=answer.headers.get("ETag", ""))


class Aws:
    """Interruption notices, two minutes before; a rebalance recommendation is not an end, and is not read."""

    pause_s = 5.0  # as AWS recommends

    def notice(self) -> str | None:
        """Return the notice; None without one."""
        # A token for each look, so that none expires.
        token = request("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}).text
        path, headers = "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}
        reply = request("GET", path, headers, may_be_missing=True)
        if reply.status == 404:
            return None
        action = Document(parse(reply.text))
        return f"AWS will {action.text('action')} this instance at {action.text('time')}"

    def acknowledge(self) -> None:
        """Do nothing: the end comes at its time."""


class GoogleCloud:
    """Preemptions, 30 seconds before, and maintenance that ends the instance; not a live migration."""

    pause_s = 1.0  # in addition to the wait of the service

    def __init__(self) -> None:
        self._etag = ""

    def notice(self) -> str | None:
        """Return the notice; None without one. From the second call on the service waits for a preemption itself."""
        changed = f"?wait_for_change=true&last_etag={self._etag}&timeout_sec={WAIT_S}" if self._etag else ""
        preempted = self._value(f"preempted{changed}")
        if preempted.text not in ("TRUE", "FALSE"):
            raise HostError("instance/preempted is neither TRUE nor FALSE")
        self._etag = preempted.etag
        if preempted.text == "TRUE":
            return "Google Cloud preempts this instance"
        ends = self._value("maintenance-event").text == "TERMINATE_ON_HOST_MAINTENANCE"
        return "Google Cloud will end this instance for maintenance" if ends else None

    def acknowledge(self) -> None:
        """Do nothing: the end comes at its time."""

    def _value(self, key: str) -> Reply:
        path, headers = f"/computeMetadata/v1/instance/{key}", {"Metadata-Flavor": "Google"}
        return request("GET", path, headers, timeout_s=WAIT_S + ANSWER_S)


class Azure:
    """Scheduled Events that end the instance's processes; those that pause it are not an end."""

    ends = ("Preempt", "Terminate", "Reboot", "Redeploy")

    pause_s = 1.0  # as Azure recommends
    _headers: Mapping[str, str] = {"Metadata": "true"}
    _path = "/metadata/scheduledevents?api-version=2020-07-01"

    def notice(self) -> str | None:
        """Return the notice; None without one."""
        for event in self._ends():
            start = event.optional_text("NotBefore")  # empty once it has started
            return f"Azure will {event.text('EventType').lower()} this instance{f' after {start}' if start else ''}"
        return None

    def acknowledge(self) -> None:
        """Let Azure start its event before the time, now that nothing is left to save."""
        if ends := self._ends():
            body = {"StartRequests": [{"EventId": event.text("EventId")} for event in ends]}
            request("POST", self._path, self._headers, body=json.dumps(body))

    def _ends(self) -> list[Document]:
        """Return the events that end this instance; the service lists those of all instances of its group."""
        events = Document(parse(request("GET", self._path, self._headers, timeout_s=ENABLE_S).text)).list("Events")
        ends = [event for event in map(Document, events) if event.text("EventType") in self.ends]
        if not ends:
            return []
        name = request("GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text", self._headers).text
        return [event for event in ends if name in event.list("Resources")]


Cloud = Aws | GoogleCloud | Azure
CLOUDS: Mapping[str, type[Cloud]] = {"aws": Aws, "gcp": GoogleCloud, "azure": Azure}


def read_notice(cloud: Cloud) -> str | None:
    """Return the notice, None without one; HostError if the service does not answer as it should."""
    try:
        return cloud.notice()
    except ValueError as error:
        raise HostError(f"its answer is malformed: {error}") from error
