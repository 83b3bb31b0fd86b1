"""`vllm serve` as a process, with its log."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engines import environment


@dataclass(frozen=True)
class Server:
    """Where a server answers, and what it has written."""

    url: str
    log_file: Path

    def get(self, path: str) -> str:
        """Body of a page."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def log(self) -> str:
        """Everything so far."""
        return self.log_file.read_text()


@contextmanager
def serve(
    folder: Path, model: Path, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run ``vllm serve model options`` until the block ends.

    Raises:
        AssertionError: it ended, or did not answer in four minutes; the text has its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", folder / "serve.log")
    command = [Path(sys.executable).parent / "vllm", "serve", model, "--port", str(port)]
    with server.log_file.open("w") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", *options],
            env=environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **(env or {})}),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(server, process)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


def _wait(server: Server, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(480):
        if process.poll() is not None:
            raise AssertionError(f"vllm serve ended with {process.returncode}:\n{server.log()}")
        try:
            server.get("/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(f"vllm serve did not answer:\n{server.log()}")
