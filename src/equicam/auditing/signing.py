"""Seals of a run: the hash of its log's last event, noted elsewhere or signed with an Ed25519 key.

The log chains its events, so the last hash stands for all of them, and through the digests in them for every file.
Someone with write access can cut off or rewrite the whole chain, but cannot sign the result. `seals.json` keeps every
signed seal; each must still be on the chain.
"""

import base64
import binascii
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from equicam.auditing.integrity import check_files, logged_digests
from equicam.auditing.log import Event, Log
from equicam.auditing.store import RunStore
from equicam.data.items import valid_utf8
from equicam.errors import EquicamError
from equicam.shards import parse_object, write_atomic

FILE = "seals.json"
MAX_KEY_BYTES = 1 << 16


@dataclass(frozen=True)
class Seal:
    """The last event of a log at one moment, signed or not."""

    event: int
    hash: str
    time: str
    public_key: str | None = None  # base64 of its 32 bytes
    signature: str | None = None  # base64

    def message(self) -> bytes:
        """The bytes that are signed."""
        return b"equicam seal\n" + json.dumps([self.event, self.hash, self.time]).encode()


def seal_run(store: RunStore, sign: str | Path | None = None) -> Seal:
    """Seal a run whose files are as its log has them; with a key, the seal is signed and kept in `seals.json`."""
    folder, log = store.folder, Log(store.folder)
    problems = log.problems() if log.path.is_file() else ["events.sqlite is not there"]
    if problems := problems or ([] if log.events() else ["the log is empty"]) or check_files(store)[1]:
        raise EquicamError(
            f"sealing {valid_utf8(str(folder))}", needs="files and a log as they were written", got="; ".join(problems[:3]),
            fix="equicam verify first",
        )  # fmt: skip
    if sign is None:
        return _of(log.events()[-1])
    key = _read_key(sign, private=True)
    raw = base64.b64encode(key.public_key().public_bytes_raw()).decode()
    before = _read_seals(folder)  # a damaged file is refused before anything is written
    last = _of(log.add("sealed", {"public_key": raw}))
    signed = Seal(last.event, last.hash, last.time, raw, base64.b64encode(key.sign(last.message())).decode())
    text = json.dumps({"seals": [asdict(one) for one in (*before, signed)]}, indent=1)
    write_atomic(folder / FILE, text.encode())
    return signed


def verify_seals(store: RunStore, public_key: str | Path) -> tuple[list[str], list[str]]:
    """What is wrong with the seals by this key, and notes on what they do not cover."""
    from cryptography.exceptions import InvalidSignature

    key = _read_key(public_key, private=False)
    raw = base64.b64encode(key.public_bytes_raw()).decode()
    folder, log = store.folder, Log(store.folder)
    seals = [seal for seal in _read_seals(folder) if seal.public_key == raw]
    if not seals:
        return [f"{FILE} has no seal by the key {public_key}"], []
    events = {event.number: event.hash for event in log.events()}
    problems = []
    for seal in seals:
        try:
            key.verify(base64.b64decode(seal.signature or "", validate=True), seal.message())
        except (InvalidSignature, binascii.Error, ValueError):
            problems.append(f"the seal of event {seal.event} was not signed with the key {public_key}")
            continue
        if events.get(seal.event) != seal.hash:
            problems.append(
                f"the sealed event {seal.event} ({seal.hash[:12]}…) is not there: the log was cut off or rewritten"
            )
    last = max(seal.event for seal in seals)
    before, now = logged_digests(store, log, until=last), logged_digests(store, log)
    problems += [
        f"{name} was written again after the last seal" for name in before if now[name] != before[name]
    ]
    later = Counter(event.kind for event in log.events(after=last))
    kinds = ", ".join(f"{count} × {kind}" for kind, count in sorted(later.items()))
    return problems, [f"the last seal is of event {last}; later events are not covered: {kinds}"] * bool(
        later
    )


def _of(event: Event) -> Seal:
    return Seal(event.number, event.hash, event.time)


def _read_seals(folder: Path) -> list[Seal]:
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        found = [Seal(**one) for one in parse_object(path.read_bytes())["seals"]]
        for one in found:
            if not isinstance(one.event, int) or not all(
                isinstance(v, str) for v in list(asdict(one).values())[1:]
            ):
                raise ValueError("fields of other types")
    except (KeyError, TypeError, ValueError) as error:
        raise EquicamError(
            valid_utf8(str(path)), needs="to be as it was written", got=error, fix="restoring it"
        ) from error
    return found


def _read_key(path: str | Path, *, private: bool) -> Any:
    """An Ed25519 key from a PEM or OpenSSH file."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization as read
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise EquicamError(
            "a signature", needs="the package cryptography", got="no such package here", fix="pip install 'equicam[sign]'"
        ) from error  # fmt: skip
    what = f"the {'private' if private else 'public'} key {valid_utf8(str(path))!r}"
    kind = ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey
    make = "openssl genpkey -algorithm ed25519 -out key.pem, and openssl pkey -in key.pem -pubout -out public.pem"
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_KEY_BYTES)
        key: Any
        if private:
            openssh = b"BEGIN OPENSSH" in text
            key = (read.load_ssh_private_key if openssh else read.load_pem_private_key)(text, None)
        else:
            key = (read.load_pem_public_key if b"-----BEGIN" in text else read.load_ssh_public_key)(text)
    except OSError as error:
        raise EquicamError(what, needs="a file", got=error.strerror, fix=make) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise EquicamError(
            what, needs="PEM or OpenSSH, without a password", got=next(iter(str(error).splitlines()), "none"), fix=make
        ) from error  # fmt: skip
    if not isinstance(key, kind):
        raise EquicamError(what, needs="an Ed25519 key", got=type(key).__name__, fix=make)
    return key
