"""The finished run of images that the tests of audits have."""

from tests.audit.conftest import patches, whole

__all__ = ["patches", "whole"]
