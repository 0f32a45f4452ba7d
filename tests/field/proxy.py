"""nginx and HAProxy with the configurations of docs/lab.md, on loopback."""

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.serving import SECONDS

_DOCUMENT = Path(__file__).parents[2] / "docs" / "lab.md"
_ADDRESSES = ("10.0.0.11:8000", "10.0.0.12:8000")
_ATTEMPTS = 3  # somebody else may take a port between its choice and its use

_NGINX = """
daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    {documented}
}}
"""


def program(kind: str) -> str | None:
    """Where Debian or another system keeps it, or None."""
    return shutil.which(kind, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


@dataclass(frozen=True)
class Proxy:
    """One kind of proxy, and what it needs. directory: for its files. certificate, key: for its TLS (PEM)."""

    kind: str
    directory: Path
    certificate: Path
    key: Path

    @asynccontextmanager
    async def before(self, servers: Sequence[int], edits: Mapping[str, str] | None = None) -> AsyncIterator[str]:
        """Runs it before the servers on these two ports; its `host:port`.

        edits: further changes to the documented configuration, old text to new; old text must be there.
        """
        for _ in range(_ATTEMPTS):
            port = _free_port()
            process = self._start(port, servers, edits or {})
            try:
                if await _listens(port, process):
                    yield f"127.0.0.1:{port}"
                    return
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()
                process.wait()
        raise AssertionError((self.directory / "errors").read_text())

    def _start(self, port: int, servers: Sequence[int], edits: Mapping[str, str]) -> subprocess.Popen[bytes]:
        text = documented(self.kind)
        bundle = self.directory / "bundle.pem"
        bundle.write_bytes(self.certificate.read_bytes() + self.key.read_bytes())
        own = {
            "nginx": {
                "listen 443": f"listen 127.0.0.1:{port}",
                "/etc/nginx/dreamzero-cert.pem": str(self.certificate),
                "/etc/nginx/dreamzero-key.pem": str(self.key),
            },
            "haproxy": {"bind :443": f"bind 127.0.0.1:{port}", "/etc/haproxy/dreamzero.pem": str(bundle)},
        }[self.kind]
        at = {address: f"127.0.0.1:{server}" for address, server in zip(_ADDRESSES, servers, strict=True)}
        for old, new in {**own, **at, **edits}.items():
            assert old in text, f"{old!r} is not in the {self.kind} configuration of docs/lab.md"
            text = text.replace(old, new)
        path = self.directory / f"{self.kind}.conf"
        path.write_text(_NGINX.format(documented=text) if self.kind == "nginx" else text)
        program_path = program(self.kind)
        assert program_path is not None
        arguments = ["-p", str(self.directory), "-c", str(path)] if self.kind == "nginx" else ["-db", "-f", str(path)]
        with (self.directory / "errors").open("wb") as errors:
            return subprocess.Popen([program_path, *arguments], stdout=errors, stderr=errors)


def documented(kind: str) -> str:
    """The one configuration of this kind in docs/lab.md."""
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", _DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def _listens(port: int, process: subprocess.Popen[bytes]) -> bool:
    async with asyncio.timeout(SECONDS):
        while process.poll() is None:
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return True
            await asyncio.sleep(0.02)
    return False
