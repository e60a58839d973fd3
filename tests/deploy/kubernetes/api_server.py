"""An API server for the real kubectl, with as much of it as jobs need; objects are held against the real schemas."""

import base64
import hashlib
import http.server
import json
import struct
import threading
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

from tests.deploy.kubernetes import crds

Object = dict[str, Any]
_KINDS = {
    ("v1", "configmaps"): "ConfigMap",
    ("v1", "pods"): "Pod",
    ("ray.io/v1", "rayjobs"): "RayJob",
}


class ApiServer:
    """Objects by kind and name, served on loopback."""

    def __init__(self, *, knows_ray: bool = True, kinds: Mapping[tuple[str, str], str] | None = None) -> None:
        """`kinds`: more of them, by API version and plural."""
        self.kinds = {key: kind for key, kind in _KINDS.items() if knows_ray or kind != "RayJob"} | dict(kinds or {})
        self.objects: dict[tuple[str, str], Object] = {}
        self.logs: dict[str, Log] = {}
        self.execute: Callable[[str, list[str]], tuple[str, bool]] = lambda pod, command: ("no such container", False)
        """What a command in a container says, and whether it went well."""
        self.refuse: Callable[[str, Object], str | None] = lambda kind, manifest: None
        self.hides: Callable[[str], str | None] = lambda resource: None
        """Why the user may not look at a resource (pods, pods/log)."""
        self.loses: Callable[[str, bool], bool] = lambda kind, is_made: False
        """Whether a connection breaks before an object is made, or before its making is told."""
        self.knows_ray = knows_ray
        self.lock = threading.RLock()
        api = self

        class Handler(_Handler):
            server_api = api

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        for log in self.logs.values():
            log.end()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def kubeconfig(self) -> str:
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "here", "cluster": {"server": self.url}}],
                "users": [{"name": "me", "user": {}}],
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                "current-context": "here",
            }
        )

    def put(self, manifest: Object) -> None:
        with self.lock:
            metadata = manifest["metadata"]
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
            self.objects[manifest["kind"], metadata["name"]] = manifest

    def get(self, kind: str, name: str) -> Object | None:
        with self.lock:
            return self.objects.get((kind, name))

    def set_status(self, name: str, **status: Any) -> None:
        with self.lock:
            found = self.objects.get(("RayJob", name))
            if found is not None:
                found["status"] = {**found.get("status", {}), **status}


class Log:
    """A container's log, which grows."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_over = False
        self.breaks_at: int | None = None
        """After how many lines a connection breaks, once."""
        self._changed = threading.Condition()

    def add(self, line: str) -> None:
        with self._changed:
            self.lines.append(f"{datetime.now(UTC).strftime('%Y-%m-%dT%H:%M:%S.%f')}000Z {line}")
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def after(self, number: int) -> tuple[list[str], bool]:
        with self._changed:
            while len(self.lines) <= number and not self.is_over:
                self._changed.wait(1)
            return self.lines[number:], self.is_over and number >= len(self.lines)


class _Handler(http.server.BaseHTTPRequestHandler):
    server_api: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if (listing := self._discovery(parts)) is not None:
            self._answer(200, listing)
            return
        group, namespace, resource, rest = _parsed(parts)
        if (why := self.server_api.hides("/".join([resource, *rest[1:]]))) is not None:
            self._fail(403, "Forbidden", why)
        elif resource == "pods" and rest[1:] == ["exec"]:
            self._execute(rest[0], parse_qs(url.query)["command"])
        elif resource == "pods" and rest[1:] == ["log"]:
            self._stream(rest[0], query.get("sinceTime", ""))
        elif (kind := self.server_api.kinds.get((group, resource))) is None:
            self._fail(404, "NotFound", "the server could not find the requested resource")
        elif rest:
            found = self.server_api.get(kind, rest[0])
            if found is None:
                self._fail(404, "NotFound", f'{resource} "{rest[0]}" not found')
            else:
                self._answer(200, found)
        else:
            self._answer(200, self._list(kind, group, namespace, query.get("labelSelector", "")))

    def do_POST(self) -> None:
        manifest = json.loads(self._body())
        group, _, resource, _ = _parsed(urlsplit(self.path).path.strip("/").split("/"))
        kind = _KINDS.get((group, resource))
        if kind is None or (group != "v1" and not self.server_api.knows_ray):
            self._fail(404, "NotFound", "the server could not find the requested resource")
            return
        name = manifest["metadata"]["name"]
        complaints = _complaints(manifest)
        why = self.server_api.refuse(kind, manifest)
        if complaints:
            self._fail(422, "Invalid", f'{kind} "{name}" is invalid: {"; ".join(complaints)}')
        elif why is not None:
            self._fail(403, "Forbidden", why)
        elif self.server_api.get(kind, name) is not None:
            self._fail(409, "AlreadyExists", f'{resource} "{name}" already exists')
        elif self.server_api.loses(kind, False):
            self.close_connection = True
        else:
            self.server_api.put(manifest)
            if self.server_api.loses(kind, True):
                self.close_connection = True
            else:
                self._answer(201, manifest)

    def do_DELETE(self) -> None:
        self._body()
        group, _, resource, rest = _parsed(urlsplit(self.path).path.strip("/").split("/"))
        with self.server_api.lock:
            found = self.server_api.objects.pop((_KINDS[group, resource], rest[0]), None)
            if found is not None:  # what belongs to it goes with it
                uid = found["metadata"]["uid"]
                for key, other in list(self.server_api.objects.items()):
                    if any(owner["uid"] == uid for owner in other["metadata"].get("ownerReferences", [])):
                        del self.server_api.objects[key]
        if found is None:
            self._fail(404, "NotFound", f'{resource} "{rest[0]}" not found')
        else:
            self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _body(self) -> bytes:
        """What was sent: of a length that is said before, or in chunks."""
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while length := int(self.rfile.readline(), 16) if "Transfer-Encoding" in self.headers else 0:
            body += self.rfile.read(length)
            self.rfile.readline()
        return body

    def _list(self, kind: str, group: str, namespace: str, selector: str) -> Object:
        wanted = dict(item.split("=") for item in selector.split(",") if item)
        with self.server_api.lock:
            items = [
                found
                for (its_kind, _), found in self.server_api.objects.items()
                if its_kind == kind
                and found["metadata"].get("namespace", namespace) == namespace
                and wanted.items() <= found["metadata"].get("labels", {}).items()
            ]
        return {"kind": f"{kind}List", "apiVersion": group, "metadata": {}, "items": items}

    def _discovery(self, parts: list[str]) -> Object | None:
        groups = sorted({group for group, _ in self.server_api.kinds} - {"v1"})
        if parts == ["version"]:
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
        if parts == ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        if parts == ["apis"]:
            versions = [(name.split("/")[0], {"groupVersion": name, "version": name.split("/")[1]}) for name in groups]
            found = [{"name": name, "versions": [it], "preferredVersion": it} for name, it in versions]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}
        group = "/".join(parts[1:]) if parts[:1] == ["apis"] else "v1" if parts == ["api", "v1"] else ""
        if group not in [*groups, "v1"]:
            return None
        resources = [
            {"name": name, "singularName": kind.lower(), "kind": kind, "verbs": _VERBS}
            | {"namespaced": kind not in ("Namespace", "StorageClass")}
            for (its_group, name), kind in self.server_api.kinds.items()
            if its_group == group
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": resources}

    def do_PATCH(self) -> None:
        group, _, resource, rest = _parsed(urlsplit(self.path).path.strip("/").split("/"))
        change = json.loads(self._body())
        found = self.server_api.get(_KINDS[group, resource], rest[0])
        if found is None:
            self._fail(404, "NotFound", f'{resource} "{rest[0]}" not found')
            return
        with self.server_api.lock:
            found["metadata"].update(change["metadata"])
        self._answer(200, found)

    def _stream(self, pod: str, since: str) -> None:
        log = self.server_api.logs.get(pod)
        if log is None:
            self._fail(400, "BadRequest", f'container in pod "{pod}" is waiting to start: ContainerCreating')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Connection", "close")
        self.end_headers()
        number, is_over = 0, False
        while not is_over:
            lines, is_over = log.after(number)
            number += len(lines)
            later = [line for line in lines if line[: len("2026-01-01T00:00:00")] >= since[:19]]  # by whole seconds
            self.wfile.write("".join(f"{line}\n" for line in later).encode())
            self.wfile.flush()
            if (log.breaks_at or number + 1) <= number:  # the connection, once
                log.breaks_at = None
                break
        self.close_connection = True

    def _execute(self, pod: str, command: list[str]) -> None:
        """As a WebSocket of Kubernetes (v5.channel.k8s.io): output on channel 1, how it ended on channel 3."""
        accept = hashlib.sha1(self.headers["Sec-WebSocket-Key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11")
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(accept.digest()).decode())
        self.send_header("Sec-WebSocket-Protocol", "v5.channel.k8s.io")
        self.end_headers()
        output, is_right = self.server_api.execute(pod, command)
        status = {"metadata": {}, "status": "Success" if is_right else "Failure", "message": output}
        for channel, text in ((1, output), (3, json.dumps(status))):
            payload = bytes([channel]) + text.encode()[:60000]
            self.wfile.write(b"\x82\x7e" + struct.pack(">H", len(payload)) + payload)
        self.wfile.write(b"\x88\x02\x03\xe8")
        self.wfile.flush()
        self.close_connection = True

    def _answer(self, status: int, content: Object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _fail(self, status: int, reason: str, message: str) -> None:
        content = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message}
        self._answer(status, {**content, "code": status})


_VERBS = ["create", "delete", "get", "list", "watch"]


def _parsed(parts: list[str]) -> tuple[str, str, str, list[str]]:
    """Group and version, namespace, resource, and what comes after it."""
    group, rest = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        return group, rest[1], rest[2], rest[3:]
    return group, "", rest[0] if rest else "", rest[1:]


def _complaints(manifest: Object) -> list[str]:
    try:
        return list(crds.complaints(manifest))
    except KeyError:
        try:
            kubernetes_validate.validate(manifest, "1.36", strict=True)
        except kubernetes_validate.ValidationError as error:
            return [str(error)]
        return []
