"""The runs that are attacked here."""

from tests.audit.conftest import patches, whole

__all__ = ["patches", "whole"]
