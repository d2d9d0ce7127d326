"""The secret of a run's reviews.

Keys, order and tags that reviewers see, the draw of the control arm and the order of the exports come from it, so
that nobody can compute an image's arm, name or label from them. It stays in the run's folder.
"""

import hmac
import os
import secrets
import tempfile
from json.encoder import encode_basestring_ascii as quote
from pathlib import Path

from equicam.errors import EquicamError
from equicam.shards import TEMPORARY_SUFFIX

FILE = "review.key"
KEY_BYTES = 32


class ReviewKey:
    """HMAC-SHA256 with the run's secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def digest(self, purpose: str, *values: str) -> str:
        """64 hexadecimal digits for these values; those of one purpose say nothing about another's."""
        listed = ", ".join(map(quote, (purpose, *values)))  # as JSON; `json.dumps` takes longer
        return hmac.digest(self._secret, f"[{listed}]".encode(), "sha256").hex()


def read_review_key(folder: Path, *, create: bool = True) -> ReviewKey:
    """The run's secret, made where there is none yet; all servers of a run share it."""
    path = Path(folder) / FILE
    if create and not path.is_file():
        _create(path)
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise EquicamError(
            str(path), needs="to be readable", got=error.strerror,
            fix="the user who ranked the run, or equicam triage again",
        ) from error  # fmt: skip
    if len(secret) != KEY_BYTES:
        raise EquicamError(
            str(path), needs=f"{KEY_BYTES} bytes", got=len(secret), fix="deleting it and equicam triage again"
        )
    return ReviewKey(secret)


def _create(path: Path) -> None:
    """Write a new secret that only this user can read, unless another process is first."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{FILE}.", suffix=TEMPORARY_SUFFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError:  # no hard links here
            if not path.is_file():
                Path(temporary).rename(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
