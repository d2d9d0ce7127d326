"""Nothing connects anywhere that the user has not named: lists and runs are files that anybody may have written."""

import contextlib
import socket
import threading

import pytest

import equicam
from equicam.errors import EquicamError
from equicam.images import files
from equicam.images.decoding import decode_image
from equicam.images.files import RemotePath, as_path
from equicam.images.items import Item
from equicam.images.sources import find_items, list_source
from equicam.runs.report.render import read_input
from tests.hostile.generate import encode
from tests.hostile.test_decoding import box, plain


@pytest.fixture
def server(monkeypatch):
    """A port that counts the connections to it and closes each."""
    monkeypatch.setattr(files, "RETRY_WAITS_S", ())
    accepted: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, address = listening.accept()
                    accepted.append(address)
                    connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listening.getsockname()[1], accepted
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def urls(port: int) -> list[str]:
    host = f"127.0.0.1:{port}"
    return [
        f"ftp://{host}/a.png", f"FTP://{host}/b.png", f"http://{host}/a.png", f"webhdfs://{host}/a.png",
        f"zip://a.png::ftp://{host}/a.zip", f"simplecache::ftp://{host}/a.png", f"filecache::http://{host}/a.png",
        f"reference://x::ftp://{host}/a", "nonsense://a/b.png", "s3://bucket/a.png", "://", "a://b://c",
    ]  # fmt: skip


def test_a_list_opens_no_url_of_a_protocol_the_user_did_not_name(tmp_path, server):
    port, accepted = server
    (tmp_path / "good.png").write_bytes(encode("png"))
    (tmp_path / "items.csv").write_text("\n".join(["path", "good.png", *urls(port)]))
    run = equicam.audit(tmp_path, equicam.load("embedded"), tmp_path / "run", views=2, workers=1)
    rows = {row["id"]: row for row in run.items.to_pylist()}
    assert len(rows) == 1 + len(urls(port))
    assert {name for name, row in rows.items() if row["status"] == "ok"} == {"good.png"}
    assert "EQUICAM_ALLOW_SCHEMES=ftp" in rows[urls(port)[0]]["reason_values"]
    equicam.audit(tmp_path, equicam.load("embedded"), tmp_path / "run", views=2, workers=1)
    moved = equicam.open_run(tmp_path / "run", str(tmp_path))
    assert all("URL" in read_input(row, (8, 8), fetch=row["id"] in moved.store.moved) for row in moved.items.to_pylist() if row["path"].lower().startswith("ftp"))  # fmt: skip
    assert accepted == []


def test_a_protocol_the_user_names_is_opened(tmp_path, server, monkeypatch):
    port, accepted = server
    monkeypatch.setenv("EQUICAM_ALLOW_SCHEMES", "gs, FTP")
    (tmp_path / "items.csv").write_text(f"path\n{urls(port)[0]}\n{urls(port)[4]}\n")
    allowed, chain = find_items(tmp_path)
    assert decode_image(chain, plain, box).reason.code == "unreadable"
    assert accepted == [], "a chain of protocols is never opened"
    assert decode_image(allowed, plain, box).reason.code == "unreadable"
    assert accepted


def test_a_list_of_nothing_but_such_urls_is_refused_at_once(tmp_path, server):
    port, accepted = server
    (tmp_path / "items.csv").write_text("\n".join(["path", f"ftp://127.0.0.1:{port}/a.png", "s3://b/c.png"]))
    with pytest.raises(EquicamError, match=r"permission to open ftp://, s3://.*EQUICAM_ALLOW_SCHEMES=ftp,s3"):
        find_items(tmp_path)
    assert accepted == []


def test_a_list_at_a_url_opens_no_local_file(tmp_path):
    import fsspec

    (tmp_path / "a.png").write_bytes(encode("png"))
    memory = fsspec.filesystem("memory")
    memory.pipe("/lists/items.csv", f"path\nmemory://lists/b.png\nfile://{tmp_path}/a.png".encode())
    memory.pipe("/lists/b.png", encode("png"))
    there, here = find_items("memory://lists/items.csv")
    assert decode_image(there, plain, box).reason is None
    assert "permission to open file://" in decode_image(here, plain, box).reason.values["message"]


def test_a_run_names_no_url_for_the_user(tmp_path, server):
    """The source in a run's manifest is opened by verify and triage."""
    port, accepted = server
    url = f"ftp://127.0.0.1:{port}/folder"
    with pytest.raises(EquicamError, match=f"to be named by you.*--source {url}"):
        list_source(url, from_user=False)
    assert accepted == []
    with pytest.raises((EquicamError, OSError)):
        find_items(url)
    assert accepted


@pytest.mark.parametrize("url", ["nonsense://x/y", "http://[bad/x.png", "zip://a::nonsense://b", "s3://", "ftp://me:secret@h/x"])  # fmt: skip
def test_a_url_that_cannot_be_is_refused_in_a_sentence(tmp_path, url):
    with pytest.raises(EquicamError) as refused:
        find_items(url)
    assert "secret" not in str(refused.value)
    (tmp_path / "items.csv").write_text(f"path\ngood.png\n{url}\n")
    with contextlib.suppress(EquicamError):  # the list, or a row of it
        item = find_items(tmp_path)[1]
        assert decode_image(item, plain, box).reason


def test_file_urls_are_local_files(tmp_path):
    (tmp_path / "a.png").write_bytes(encode("png"))
    assert as_path(f"file://{tmp_path}/a.png") == tmp_path / "a.png"
    reason = decode_image(Item("a", as_path("file:///dev/zero")), plain, box).reason
    assert "a character device" in reason.values["message"]
    assert str(RemotePath("memory://a") / "ftp://b") == "memory://a/ftp://b"
