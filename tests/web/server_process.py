"""The review server as a process, for behaviour that only a real server shows."""

import http.cookiejar
import json
import re
import subprocess
import urllib.request
from urllib.parse import urlsplit

from tests.audit.conftest import COMMAND, ENV


class ServerProcess:
    """A running `equicam review`, and clients that opened its address; `before` is code that its process runs first."""

    def __init__(self, run, *options, before=""):
        self.process = subprocess.Popen(
            [*COMMAND[:-1], f"{before}\n{COMMAND[-1]}", "review", str(run.folder), "--no-browser", *map(str, options)],
            env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.output, self.links = [], {}
        for line in self.process.stdout:
            self.output.append(line)
            if found := re.search(r"review(?: as (.+))?: (http\S+)", line):
                self.links[found[1]] = found[2]
            elif self.links:
                break
        else:
            raise AssertionError("".join(self.output))
        self.address = next(iter(self.links.values()))
        parts = urlsplit(self.address)
        self.home, self.port = f"{parts.scheme}://{parts.netloc}", parts.port

    def client(self):
        jar = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        client = urllib.request.build_opener(jar)
        client.open(self.address).read()
        return client

    def secret(self, client):
        return re.search(r'data-csrf="([^"]+)"', client.open(f"{self.home}/reviewer").read().decode())[1]

    def post(self, client, secret, path, body):
        headers = {"content-type": "application/json", "x-equicam-csrf": secret}
        request = urllib.request.Request(f"{self.home}{path}", json.dumps(body).encode(), headers)
        return json.loads(client.open(request, timeout=30).read())

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        self.output.append(self.process.communicate(timeout=20)[0] or "")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
