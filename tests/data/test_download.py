"""Fetching data sets from a server on this machine: whole, broken, lying and hostile."""

from __future__ import annotations

import hashlib
import io
import socket
import stat
import tarfile
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from data import fake
from data.fake import assert_holds, refused
from flatfed.cli.data import data_app
from flatfed.core.errors import FlatfedError
from flatfed.data.datasets import idx
from flatfed.data.datasets.catalog import CATALOG, DATASETS, Download
from flatfed.data.download import get, unpack


class Server:
    """Serves `files` by name; what is in `cut` breaks off after that many bytes."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.cut: dict[str, int] = {}
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.lstrip("/")
                outer.asked.append(name)
                if name not in outer.files:
                    self.send_error(404)
                    return
                content = outer.files[name]
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: outer.cut.get(name)])

            def log_message(self, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture(scope="module")
def _server():
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def server(_server, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for each in (_server.files, _server.cut, _server.asked):
        each.clear()
    return _server


def md5(content):
    return "md5:" + hashlib.md5(content).hexdigest()


def tar_of(files, extra=()):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in extra:
            tar.addfile(member)
    return stream.getvalue()


def zip_of(files, links=()):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in files.items():
            zipped.writestr(name, content)
        for name, target in links:
            member = zipfile.ZipInfo(name)
            member.external_attr = (stat.S_IFLNK | 0o777) << 16
            zipped.writestr(member, target)
    return stream.getvalue()


def damaged_zip():
    """A zip file whose first byte of content, after the member's header and name, is changed."""
    whole = bytearray(zip_of({"x/test_batch.bin": bytes(5000)}))
    whole[30 + len("x/test_batch.bin")] ^= 255
    return bytes(whole)


def tree(folder):
    """The files below a folder with their content; empty folders do not count."""
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if not path.is_dir()
    }


def set_downloads(monkeypatch, name, *downloads):
    monkeypatch.setitem(CATALOG, name, replace(CATALOG[name], downloads=downloads))


def publish(
    server, monkeypatch, name, content, file="archive.tar.gz", checksum=None, contents=("*.bin", "*.txt")
):
    """Serve content as the one download of a data set."""
    server.files[file] = content
    checksum = md5(content) if checksum is None else checksum
    download = Download((f"{server.address}/{file}",), checksum, len(content), contents)
    set_downloads(monkeypatch, name, download)


def cifar10_tar(tmp_path):
    written = fake.write_cifar10(tmp_path / "original")
    folder = tmp_path / "original" / "cifar-10-batches-bin"
    files = {f"cifar-10-batches-bin/{path.name}": path.read_bytes() for path in folder.iterdir()}
    return written, tar_of({**files, "cifar-10-batches-bin/readme.html": b"unwanted"})


def test_an_archive_is_downloaded_verified_and_unpacked(server, monkeypatch, tmp_path):
    written, content = cifar10_tar(tmp_path)
    publish(server, monkeypatch, "cifar10", content)
    seen = []
    root = tmp_path / "new" / "data"
    found = get("cifar10", root, lambda what, done, total: seen.append((what, done, total)))
    assert found == root / "cifar-10-batches-bin"
    assert sorted(path.name for path in root.iterdir()) == ["cifar-10-batches-bin"]
    assert sorted(tree(found)) == sorted(f"{name}.bin" for name in fake.CIFAR10_FILES)
    assert_holds(DATASETS["cifar10"](folder=root, verify=False), written, 10)
    assert seen[0] == ("archive.tar.gz", 0, len(content))
    assert ("archive.tar.gz", len(content), len(content)) in seen
    assert seen[-1][0] == "unpacking archive.tar.gz"


def test_single_files_are_put_in_place_and_not_fetched_twice(server, monkeypatch, tmp_path):
    written = fake.write_mnist(tmp_path / "original", packed=True)
    downloads = []
    for name, content in tree(tmp_path / "original").items():
        server.files[name] = content
        downloads.append(Download((f"{server.address}/{name}",), md5(content), len(content)))
    set_downloads(monkeypatch, "mnist", *downloads)
    root = tmp_path / "data"
    get("mnist", root)
    assert tree(root / "mnist") == tree(tmp_path / "original")
    assert_holds(DATASETS["mnist"](folder=root, verify=False), written, 10)
    assert len(server.asked) == 4
    (root / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    get("mnist", root)
    assert server.asked[4:] == ["t10k-labels-idx1-ubyte.gz"]
    assert tree(root / "mnist") == tree(tmp_path / "original")


def test_a_zip_loses_its_top_folder_and_keeps_the_tree(server, monkeypatch, tmp_path):
    files = {
        "tiny-imagenet-200/wnids.txt": b"n01\n",
        "tiny-imagenet-200/train/n01/images/a.JPEG": b"a",
        "tiny-imagenet-200/val/val_annotations.txt": b"",
        "tiny-imagenet-200/test/images/b.JPEG": b"b",
        "__MACOSX/tiny-imagenet-200/train/._a.JPEG": b"junk",
    }
    contents = CATALOG["tiny_imagenet"].downloads[0].contents
    publish(server, monkeypatch, "tiny_imagenet", zip_of(files), "tiny.zip", contents=contents)
    found = get("tiny_imagenet", tmp_path)
    assert tree(found) == {
        "wnids.txt": b"n01\n",
        "train/n01/images/a.JPEG": b"a",
        "val/val_annotations.txt": b"",
    }


def test_other_files_in_the_folder_are_kept_and_old_ones_replaced(server, monkeypatch, tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "own.txt").write_bytes(b"mine")
    (folder / "test_batch.bin").write_bytes(b"damaged")
    publish(server, monkeypatch, "cifar10", tar_of({"x/test_batch.bin": b"good"}))
    get("cifar10", tmp_path)
    assert tree(tmp_path) == {
        "cifar-10-batches-bin/own.txt": b"mine",
        "cifar-10-batches-bin/test_batch.bin": b"good",
    }


# --- what goes wrong leaves nothing behind ---


def test_a_truncated_download_is_refused(server, monkeypatch, tmp_path):
    content = tar_of({"x/test_batch.bin": bytes(5000)})
    publish(server, monkeypatch, "cifar10", content)
    server.cut["archive.tar.gz"] = 20
    with refused("cifar10", "broke off after 20", f"{len(content):,} bytes", f"put it into {tmp_path}"):
        get("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_checksum_is_refused(server, monkeypatch, tmp_path):
    publish(server, monkeypatch, "cifar10", tar_of({"x/test_batch.bin": b"good"}), checksum=md5(b"other"))
    with refused(
        f"{server.address}/archive.tar.gz", "wrong checksum", md5(b"other")[4:16], "nothing was kept"
    ):
        get("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


def member(name, kind=tarfile.REGTYPE, target=""):
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


GOOD = {"x/test_batch.bin": b"good"}
HOSTILE_TARS = {
    "parent": ([member("../escaped.bin")], "leads out of its folder"),
    "deep parent": ([member("x/../../escaped.bin")], "leads out of its folder"),
    "absolute": ([member("/tmp/flatfed-escaped.bin")], "leads out of its folder"),
    "parent folder": ([member("../folder", tarfile.DIRTYPE)], "leads out of its folder"),
    "backslash": ([member("x\\..\\..\\escaped.bin")], "leads out of its folder"),
    "drive": ([member("C:escaped.bin")], "leads out of its folder"),
    "unwanted parent": ([member("../escaped.html")], "leads out of its folder"),
    "symbolic link": ([member("x/link.bin", tarfile.SYMTYPE, "/etc/passwd")], "a link or device"),
    "link inside": ([member("x/link.bin", tarfile.SYMTYPE, "test_batch.bin")], "a link or device"),
    "hard link": ([member("x/link.bin", tarfile.LNKTYPE, "x/test_batch.bin")], "a link or device"),
    "link folder": ([member("x", tarfile.SYMTYPE, ".."), member("x/escaped.bin")], "a link or device"),
    "pipe": ([member("x/pipe.bin", tarfile.FIFOTYPE)], "a link or device"),
    "device": ([member("x/device.bin", tarfile.CHRTYPE)], "a link or device"),
    "twice": ([member("y/test_batch.bin")], "a second time"),
}


@pytest.mark.parametrize("attack", HOSTILE_TARS)
def test_a_hostile_tar_is_refused(attack, server, monkeypatch, tmp_path):
    members, said = HOSTILE_TARS[attack]
    root = tmp_path / "inner" / "data"
    publish(server, monkeypatch, "cifar10", tar_of(GOOD, members))
    with refused("archive.tar.gz", said, "nothing was unpacked"):
        get("cifar10", root)
    assert tree(tmp_path) == {} and list(root.iterdir()) == []


HOSTILE_ZIPS = {
    "parent": (zip_of({**GOOD, "../escaped.bin": b"bad"}), "leads out of its folder"),
    "deep parent": (zip_of({**GOOD, "x/../../../escaped.bin": b"bad"}), "leads out of its folder"),
    "absolute": (zip_of({**GOOD, "/tmp/flatfed-escaped.bin": b"bad"}), "leads out of its folder"),
    "parent folder": (zip_of({**GOOD, "../folder/": b""}), "leads out of its folder"),
    "backslash": (zip_of({**GOOD, "..\\escaped.bin": b"bad"}), "leads out of its folder"),
    "symbolic link": (zip_of(GOOD, [("x/link.bin", "/etc/passwd")]), "a link or device"),
}


@pytest.mark.parametrize("attack", HOSTILE_ZIPS)
def test_a_hostile_zip_is_refused(attack, server, monkeypatch, tmp_path):
    content, said = HOSTILE_ZIPS[attack]
    root = tmp_path / "inner" / "data"
    publish(server, monkeypatch, "cifar10", content, "archive.zip")
    with refused("archive.zip", said, "nothing was unpacked"):
        get("cifar10", root)
    assert tree(tmp_path) == {} and list(root.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not an archive",
        tar_of({"x/test_batch.bin": bytes(range(256)) * 400})[:-40],
        zip_of({"x/test_batch.bin": bytes(5000)})[:-10],
        # The first byte of the content, after the member's header and name, is changed.
        zip_of({"x/test_batch.bin": bytes(5000)})[:46]
        + b"\x00"
        + zip_of({"x/test_batch.bin": bytes(5000)})[47:],
    ],
    ids=["empty", "text", "cut tar", "cut zip", "damaged zip"],
)
def test_a_broken_archive_is_refused(content, server, monkeypatch, tmp_path):
    publish(server, monkeypatch, "cifar10", content)
    with refused("archive.tar.gz", "not a whole archive"):
        get("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_archive_is_refused(server, monkeypatch, tmp_path):
    publish(server, monkeypatch, "cifar10", tar_of({"x/readme.html": b"hello"}))
    with refused("archive.tar.gz", "has no *.bin or *.txt"):
        get("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_download_leaves_nothing(server, monkeypatch, tmp_path):
    publish(server, monkeypatch, "cifar10", tar_of(GOOD))

    def interrupt(what, done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get("cifar10", tmp_path, interrupt)
    assert list(tmp_path.iterdir()) == []


def closed_address():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def test_offline_one_line_says_what_to_do(server, monkeypatch, tmp_path):
    download = Download((f"{closed_address()}/archive.tar.gz",), md5(b""), 0, ("*.bin",))
    set_downloads(monkeypatch, "cifar10", download)
    with refused(
        download.urls[0],
        "cannot be reached",
        f"fetch archive.tar.gz elsewhere, put it into {tmp_path} and run `flatfed data get cifar10` again",
    ):
        get("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_the_user_put_there_is_used_instead(server, monkeypatch, tmp_path):
    content = tar_of(GOOD)
    download = Download((f"{closed_address()}/archive.tar.gz",), md5(content), 0, ("*.bin",))
    set_downloads(monkeypatch, "cifar10", download)
    (tmp_path / "archive.tar.gz").write_bytes(content)
    get("cifar10", tmp_path)
    assert tree(tmp_path) == {"archive.tar.gz": content, "cifar-10-batches-bin/test_batch.bin": b"good"}
    (tmp_path / "archive.tar.gz").write_bytes(content + b"x")
    with refused(tmp_path / "archive.tar.gz", "wrong checksum", "delete it"):
        get("cifar10", tmp_path)


def test_the_next_address_is_tried(server, monkeypatch, tmp_path):
    content = tar_of(GOOD)
    server.files["cut/archive.tar.gz"] = server.files["archive.tar.gz"] = content
    server.cut["cut/archive.tar.gz"] = 10
    addresses = [closed_address(), f"{server.address}/gone", f"{server.address}/cut", server.address]
    urls = tuple(f"{address}/archive.tar.gz" for address in addresses)
    set_downloads(monkeypatch, "cifar10", Download(urls, md5(content), 0, ("*.bin",)))
    assert tree(get("cifar10", tmp_path)) == {"test_batch.bin": b"good"}
    assert server.asked == ["gone/archive.tar.gz", "cut/archive.tar.gz", "archive.tar.gz"]


def test_a_missing_page_is_told(server, monkeypatch, tmp_path):
    publish(server, monkeypatch, "cifar10", b"")
    server.files.clear()
    with refused("answers 404"):
        get("cifar10", tmp_path)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(tmp_path / "file" / "data", "cannot be made"):
        get("cifar10", tmp_path / "file" / "data")


def test_names(tmp_path):
    with refused("cifar_10: not a data set to download", "did you mean 'cifar10'"):
        get("cifar_10", tmp_path)
    with refused("femnist: cannot be downloaded", "preprocess.sh"):
        get("femnist", tmp_path)
    assert CATALOG["emnist_l"].downloads == CATALOG["emnist"].downloads


def test_unpack_keeps_what_is_wanted(tmp_path):
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(
        tar_of({"./top/train/a/1.png": b"1", "./top/other/2.png": b"2", "./top/.x/train/3.png": b"3"})
    )
    (tmp_path / "into").mkdir()
    unpack(archive, tmp_path / "into", ("train",))
    assert tree(tmp_path / "into") == {"train/a/1.png": b"1"}


def test_every_download_is_complete():
    for info in CATALOG.values():
        for download in info.downloads:
            assert all(url.startswith("http") and url.endswith("/" + download.file) for url in download.urls)
            assert download.size > 0, info.name
            if download.checksum is not None:
                kind, digits = download.checksum.split(":")
                assert len(digits) == 2 * hashlib.new(kind).digest_size and int(digits, 16)
    unchecked = [
        info.name for info in CATALOG.values() if any(file.checksum is None for file in info.downloads)
    ]
    assert unchecked == ["shakespeare"]  # nobody has published one
    assert [info.name for info in CATALOG.values() if not (info.origin or info.downloads)] == ["femnist"]


# --- the command line ---


def run(*arguments):
    return CliRunner().invoke(data_app, [str(each) for each in arguments])


def test_list_names_every_data_set_and_where_it_is(tmp_path):
    fake.write_cifar10(tmp_path)
    result = run("list", "--folder", tmp_path)
    assert result.exit_code == 0
    for name in DATASETS:
        assert name in result.output
    assert "not here" in result.output and "170 MB" in result.output


def test_get_then_check(server, monkeypatch, tmp_path):
    _, content = cifar10_tar(tmp_path)
    publish(server, monkeypatch, "cifar10", content)
    root = tmp_path / "data"
    result = run("get", "cifar10", "--folder", root)
    assert result.exit_code == 0 and f"cifar10 is in {root / 'cifar-10-batches-bin'}" in result.output
    again = run("get", "cifar10", "--folder", root)
    assert again.exit_code == 0 and "--force" in again.output and len(server.asked) == 1
    assert run("get", "cifar10", "--folder", root, "--force").exit_code == 0 and len(server.asked) == 2
    # These are not the published files, which a check notices.
    result = run("check", "cifar10", "--folder", root)
    assert result.exit_code == 2 and "data_batch_1.bin: truncated" in result.output.replace("\n", "")
    assert not isinstance(result.exception, FlatfedError)


def test_check_without_a_name_looks_at_all_that_are_here(tmp_path, monkeypatch):
    monkeypatch.setitem(idx.SPLITS, "letters", idx.SPLITS["letters"]._replace(train=60, test=40))
    fake.write_emnist(tmp_path / "emnist")
    result = run("check", "--folder", tmp_path)
    assert result.exit_code == 0
    assert "emnist letters: 60 training and 40 test samples, 26 classes" in result.output
    assert "cifar10: not here" in result.output
    fake.write_cifar10(tmp_path)
    result = run("check", "--folder", tmp_path)
    assert result.exit_code == 1 and "data_batch_1.bin: truncated" in result.output
    assert "emnist letters: 60 training" in result.output


def test_commands_refuse_in_one_line(tmp_path):
    for arguments, said in (
        (("get", "cifra10"), "did you mean 'cifar10'"),
        (("get", "femnist"), "preprocess.sh"),
        (("check", "cifra10"), "did you mean 'cifar10'"),
        (("check", "npz"), "needs no check"),
        (("check", "mnist"), "flatfed data get mnist"),
    ):
        result = run(*arguments, "--folder", tmp_path)
        assert result.exit_code == 2
        lines = result.output.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0]
    result = run("get", "digits", "--folder", tmp_path)
    assert result.exit_code == 0 and "needs no download" in result.output
    assert list(tmp_path.iterdir()) == []
