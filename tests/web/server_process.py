"""The review server as a process, for behaviour that only a real server shows."""

import http.cookiejar
import json
import re
import subprocess
import urllib.request
from urllib.parse import urlsplit

from tests.audit.conftest import COMMAND, ENV


class ServerProcess:
    """A running `equicam review`, and clients that opened its address."""

    def __init__(self, run, *options):
        self.process = subprocess.Popen(
            [*COMMAND, "review", str(run.folder), "--no-browser", *map(str, options)],
            env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.output = []
        for line in self.process.stdout:
            self.output.append(line)
            if found := re.search(r"review: (http\S+)", line):
                self.address = found[1]
                break
        else:
            raise AssertionError("".join(self.output))
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
        self.process.communicate(timeout=20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
