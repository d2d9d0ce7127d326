"""The runs that are attacked here."""

from tests.audit.conftest import out, patches, whole
from tests.web.conftest import run, shared_run

__all__ = ["out", "patches", "run", "shared_run", "whole"]
