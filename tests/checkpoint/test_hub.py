"""Hub ids: downloaded from a hub of the test's own, found in the cache, and what is said when neither is possible."""

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer

from engine.checkpoint.error import CheckpointError
from engine.checkpoint.hub import locate
from engine.checkpoint.open import open_checkpoint
from engine.startup import PolicyLoadError
from tests.checkpoints import actions_of, change_json, tiny_checkpoint
from tests.process import LOADING, Process

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "lab/tiny"


class Hub(ThreadingHTTPServer):
    """A hub that has one repository, REPO, with the files of a directory; revisions `main` and `v2` are one commit."""

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.directory = directory
        self.fetched: set[str] = set()
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        path = self.path.partition("?")[0]
        files = {str(f.relative_to(self.server.directory)): f for f in self.server.directory.rglob("*") if f.is_file()}
        api, file = f"/api/models/{REPO}", path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")
        if path in (f"{api}/revision/main", f"{api}/revision/v2"):
            self._json(200, {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        elif path == f"{api}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": f.stat().st_size, "oid": _blob(name)}
                for name, f in files.items()
            ]
            self._json(200, tree)
        elif file in files:
            content = files[file].read_bytes()
            self.send_response(200)
            self.send_header("ETag", f'"{_blob(file)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                self.server.fetched.add(file)
                self.wfile.write(content)
        else:
            code = "RevisionNotFound" if path.startswith(f"{api}/revision/") else "RepoNotFound"
            self._json(404, {"error": code}, code)

    def _json(self, status: int, value: Any, error: str | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the test's stderr."""


def _blob(file: str) -> str:
    return hashlib.sha1(file.encode()).hexdigest()


@contextmanager
def hub(directory: Path) -> Iterator[Hub]:
    with Hub(directory) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield serving
        finally:
            serving.shutdown()
            thread.join()


def environment(home: Path, **changes: str) -> dict[str, str]:
    """Of a process whose hub cache is `home`; settings of whoever runs the tests do not matter."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return mine | {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"} | changes


def inspect(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.checkpoint", "inspect", *arguments]
    home = Path(settings.pop("home"))
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment(home, **settings)
    )


def refusal(repo: str, revision: str | None, home: Path, **settings: str) -> str:
    """The line that a process of its own gets for a hub id, where all there is to find out needs no model."""
    program = f"""
from engine.checkpoint.error import CheckpointError
from engine.checkpoint.hub import CHECKPOINT_FILES, locate
try:
    locate({repo!r}, {revision!r}, CHECKPOINT_FILES, "--checkpoint")
except CheckpointError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment(home, **settings), check=True,
    )  # fmt: skip
    (line,) = run.stdout.splitlines()
    return line


def cached(home: Path, repo: str, directory: Path, revision: str = "main") -> None:
    """Lay a directory out as the hub's cache does."""
    folder = home / "hub" / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / revision).write_text(COMMIT)
    shutil.copytree(directory, folder / "snapshots" / COMMIT)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process's hub cache, without a network; the library read its environment long ago."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    return tmp_path / "home"


@pytest.mark.slow
def test_a_hub_id_is_fetched_once_and_no_pickle_with_it(tmp_path: Path) -> None:
    directory, home = tiny_checkpoint(tmp_path / "tiny"), tmp_path / "home"
    for name in ("pytorch_model.bin", "optimizer.pt", "README.md", "training_args.bin", "run.py"):
        (directory / name).write_bytes(b"no")
    with hub(directory) as serving:
        first = inspect(REPO, "--revision", "v2", home=str(home), HF_ENDPOINT=serving.url, HF_TOKEN="hf_secret")
        assert first.returncode == 0, first.stderr
        assert serving.fetched == {
            "config.json", "model.safetensors", "experiment_cfg/metadata.json", "experiment_cfg/conf.yaml"
        }  # fmt: skip
        assert "Bearer hf_secret" in serving.tokens
        assert "394 entries in 1 file" in first.stdout
        assert "100%" in first.stderr, "the download shows its progress"
        assert "hf_secret" not in first.stdout + first.stderr
        serving.fetched.clear()
        again = inspect(REPO, "--revision", "v2", home=str(home), HF_ENDPOINT=serving.url)
        assert (again.returncode, again.stdout, serving.fetched) == (0, first.stdout, set())
    offline = inspect(REPO, "--revision", "v2", home=str(home), HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, first.stdout)


@pytest.mark.parametrize(
    ("repo", "revision", "message"),
    [
        (REPO, "v3", "the hub has no revision 'v3' of it; try another --revision"),
        ("lab/other", None, "on the hub it is private or does not exist: check the name"),
    ],
)
def test_what_the_hub_does_not_have(tmp_path: Path, repo: str, revision: str | None, message: str) -> None:
    with hub(tiny_checkpoint(tmp_path / "tiny")) as serving:
        line = refusal(repo, revision, home=tmp_path / "home", HF_ENDPOINT=serving.url)
    assert line.startswith(f"--checkpoint {repo}")
    assert message in line


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub was not reached ("),
    ],
)
def test_without_network_the_error_says_what_to_do(tmp_path: Path, settings: dict[str, str], why: str) -> None:
    line = refusal("GEAR-Dreams/DreamZero-DROID", "v2", home=tmp_path / "home", **settings)
    for part in (
        "--checkpoint GEAR-Dreams/DreamZero-DROID is not here, and ",
        why,
        "run `hf download GEAR-Dreams/DreamZero-DROID --revision v2` where there is a network",
        "give the folder as --checkpoint DIR",
        str(tmp_path / "home"),
    ):
        assert part in line


@pytest.mark.slow
async def test_the_server_says_it_with_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.policy_server.test_process.ENVIRONMENT", environment(tmp_path, HF_HUB_OFFLINE="1"))
    running = Process("--checkpoint", "GEAR-Dreams/DreamZero-DROID", "--port", "0")
    assert await asyncio.to_thread(running.end, LOADING) == 2, running.log
    (line,) = [line for line in running.log if "ERROR" in line]
    assert "run `hf download GEAR-Dreams/DreamZero-DROID`" in line


def test_a_cached_hub_id_serves_without_network(tmp_path: Path, offline: Path) -> None:
    cached(offline, REPO, tiny_checkpoint(tmp_path / "tiny"))
    np.testing.assert_array_equal(actions_of(REPO), actions_of("tiny"))


def test_a_revision_is_looked_up_in_the_cache(tmp_path: Path, offline: Path) -> None:
    cached(offline, REPO, tiny_checkpoint(tmp_path / "tiny"), revision="v2")
    assert open_checkpoint(REPO, revision="v2").name == REPO
    with pytest.raises(CheckpointError, match="run `hf download lab/tiny`"):
        open_checkpoint(REPO)


def test_a_directory_is_taken_before_a_hub_id_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_checkpoint(tmp_path / "lab" / "tiny")
    assert locate("lab/tiny", None, (), "--checkpoint") == Path("lab/tiny")


def tokenizer(directory: Path) -> Path:
    ByT5Tokenizer().save_pretrained(directory)
    return directory


def without_tokenizer(directory: Path) -> Path:
    """A checkpoint whose tokenizer is the release's."""
    tiny_checkpoint(directory)
    change_json(directory / "config.json", lambda config: config.pop("tokenizer"))
    return directory


def test_a_tokenizer_from_a_directory(tmp_path: Path) -> None:
    checkpoint, words = without_tokenizer(tmp_path / "tiny"), tokenizer(tmp_path / "words")
    np.testing.assert_array_equal(actions_of(checkpoint, tokenizer=str(words)), actions_of("tiny"))


def test_the_release_s_tokenizer_comes_from_the_hub_s_cache(tmp_path: Path, offline: Path) -> None:
    cached(offline, "google/umt5-xxl", tokenizer(tmp_path / "words"))
    np.testing.assert_array_equal(actions_of(without_tokenizer(tmp_path / "tiny")), actions_of("tiny"))


def test_the_release_s_tokenizer_without_network(tmp_path: Path, offline: Path) -> None:
    with pytest.raises(PolicyLoadError, match=r"--tokenizer google/umt5-xxl is not here.*as --tokenizer DIR"):
        actions_of(without_tokenizer(tmp_path / "tiny"))


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(PolicyLoadError, match=r"--tokenizer .*empty: .* holds no tokenizer that can be read") as error:
        actions_of(without_tokenizer(tmp_path / "tiny"), tokenizer=str(tmp_path / "empty"))
    assert "\n" not in str(error.value)


def test_a_tokenizer_with_more_words_than_the_model_is_refused(tmp_path: Path) -> None:
    words = ByT5Tokenizer(extra_ids=200)
    words.save_pretrained(tmp_path / "words")
    with pytest.raises(PolicyLoadError, match="has 459 tokens, more than the text encoder knows: 384"):
        actions_of(without_tokenizer(tmp_path / "tiny"), tokenizer=str(tmp_path / "words"))


def test_a_pickle_in_a_tokenizer_s_place_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    torch.save({"a": 1}, tmp_path / "words" / "tokenizer.json")
    with pytest.raises(PolicyLoadError, match="holds no tokenizer that can be read"):
        actions_of(without_tokenizer(tmp_path / "tiny"), tokenizer=str(tmp_path / "words"))
