"""The runs that are attacked here."""

from tests.audit.conftest import out, patches, whole
from tests.web.conftest import ana, run, server, shared_run

__all__ = ["ana", "out", "patches", "run", "server", "shared_run", "whole"]
