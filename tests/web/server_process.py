"""A page's server as a process, and the browser of a reviewer, for behaviour that only a real server shows."""

import http.client
import json
import re
import socket
import subprocess
from urllib.parse import urlsplit

from tests.audit.conftest import COMMAND, ENV


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class ServerProcess:
    """A running `equicam review` or `equicam open`; `before` is code that its process runs first."""

    def __init__(self, *arguments, command="review", before=""):
        arguments = [str(getattr(one, "folder", one)) for one in arguments]
        self.process = subprocess.Popen(
            [*COMMAND[:-1], f"{before}\n{COMMAND[-1]}", command, *arguments, "--no-browser"],
            env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.output, self.links = [], {}
        for line in self.process.stdout:
            self.output.append(line)
            if found := re.search(r"(?:review|live)(?: as (.+))?: (http\S+)", line):
                self.links[found[1]] = found[2]
            elif self.links:
                break
        else:
            raise AssertionError("".join(self.output))
        self.address = next(iter(self.links.values()))
        self.home, self.port = self.address.partition("/?")[0], urlsplit(self.address).port

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        self.output.append(self.process.communicate(timeout=20)[0] or "")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class Browser:
    """Requests as a browser makes them after it has opened the printed address, each on a new connection."""

    def __init__(self, server, name=None):
        self.port, self.cookie = server.port, ""
        response = self.request("GET", f"/?{urlsplit(server.address).query}")
        self.cookie = "; ".join(one.split(";")[0] for one in response.headers.get_all("set-cookie"))
        self.csrf = re.search(r'data-csrf="([^"]+)"', self.get("/reviewer"))[1]
        if name:
            self.post("/api/reviewer", {"name": name})
        queue = json.loads(self.get("/api/queue?limit=200"))["items"] if name else []
        self.keys = [row["key"] for row in queue]

    def request(self, method, path, body=None, **headers):
        headers |= {"cookie": self.cookie}
        if body is not None:
            headers |= {"content-type": "application/json", "x-equicam-csrf": self.csrf}
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        link.request(method, path, None if body is None else json.dumps(body), headers)
        response = link.getresponse()
        response.text = response.read().decode("utf-8", "replace")
        link.close()
        return response

    def get(self, path):
        response = self.request("GET", path)
        assert response.status == 200
        return response.text

    def post(self, path, body):
        response = self.request("POST", path, body)
        assert response.status == 200
        return json.loads(response.text)
