"""The runs that are attacked here, and a certificate of our own."""

import shutil
import subprocess

import pytest

from tests.audit.conftest import patches, whole

__all__ = ["certificate", "patches", "whole"]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """The stem of two files: .pem, a certificate for 127.0.0.1, and .key, its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    stem = tmp_path_factory.mktemp("tls") / "review"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", stem.with_suffix(".key"), "-out", stem.with_suffix(".pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    return stem
