"""Files of TLS: how they are made, and which of them are refused before they are used."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from tests.certificates import expired_files, run_files
from tests.pages import run_block
from weightsync import SyncConfig
from weightsync.config import TlsFiles
from weightsync.errors import ConfigError
from weightsync.protocol.certificates import check
from weightsync.recipes import cli


def keys(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["keys", *map(str, args)])
    return done.exit_code, done.output


def test_one_set_for_the_fleet_that_only_its_owner_reads(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    code, said = keys(folder, "--days", "7")
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=7)
    assert code == 0
    assert f"valid until {until:%Y-%m-%d}" in said
    assert {path.name for path in folder.iterdir()} == {"ca.pem", "certificate.pem", "key.pem"}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    made = x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes())
    assert abs(made.not_valid_after_utc - until) < datetime.timedelta(minutes=5)
    page = run_block("docs/security.md", 0, {"SyncConfig": SyncConfig}, {"/etc/weightsync/tls": str(folder)})
    check(page["config"].tls_files)


def test_a_set_for_each_host_of_the_same_ca(tmp_path: Path) -> None:
    assert keys(tmp_path, "--host", "one", "--host", "two")[0] == 0
    one, two = (TlsFiles.within(str(tmp_path / name)) for name in ("one", "two"))
    assert Path(one.ca).read_bytes() == Path(two.ca).read_bytes()
    assert Path(one.key).read_bytes() != Path(two.key).read_bytes()
    for files in (one, two):
        check(files)


def test_paths_are_the_same_for_processes_that_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = SyncConfig(tls="tls").tls_files
    assert files == TlsFiles.within(str(tmp_path / "tls"))
    given = {name: f"tls/{name}.pem" for name in ("ca", "certificate", "key")}
    assert SyncConfig.from_dict({"tls": given}).tls_files == files
    assert SyncConfig(tls=TlsFiles(**given)).tls_files == files


@pytest.mark.parametrize("tls", [3, {"ca": "ca.pem"}, {"ca": 1, "certificate": "c", "key": "k"}])
def test_anything_else_than_a_folder_or_three_paths_is_refused(tls: object) -> None:
    with pytest.raises(ConfigError, match=r"sync\.tls"):
        SyncConfig.from_dict({"tls": tls})


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run_files(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    code, said = keys(tmp_path)
    assert code == 2
    assert f"{tmp_path}/ca.pem exists" in said.replace("\n", "")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "hosts", [["../elsewhere"], ["one", "one"], [""], [".."], ["a" * 65], ["one", "t wo"]]
)
def test_a_host_that_is_no_name_is_refused_before_anything_is_written(
    hosts: list[str], tmp_path: Path
) -> None:
    code, said = keys(tmp_path / "tls", *(part for host in hosts for part in ("--host", host)))
    assert code == 2
    assert f"--host: '{hosts[-1]}' is not valid; give each host once, by a name" in said.replace("\n", "")
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, said = keys(tmp_path / "file" / "tls")
    assert code == 2
    assert "Not a directory" in said


def test_an_expired_certificate_is_named_with_the_date(tmp_path: Path) -> None:
    files = expired_files(tmp_path)
    expired = x509.load_pem_x509_certificate(Path(files.ca).read_bytes()).not_valid_after_utc
    said = f"ca.pem.*expired on {expired:%Y-%m-%d %H:%M} UTC.*weightsync keys"
    with pytest.raises(ConfigError, match=said):
        check(files)


def test_a_file_that_does_not_belong_to_the_others_is_named(tmp_path: Path) -> None:
    own, other = run_files(tmp_path / "own"), run_files(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"sync.tls.certificate: '.*own.*is not of the CA in .*other"):
        check(dataclasses.replace(own, ca=other.ca))
    with pytest.raises(ConfigError, match=r"sync.tls.key: '.*other.*is not the key of .*own"):
        check(dataclasses.replace(own, key=other.key))


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\n!\n"])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    files = run_files(tmp_path)
    path = Path(getattr(files, name))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"sync.tls.{name}: '.*{path.name}'"):
        check(files)
