"""A server that wants an API key: every request carries it, nothing that is printed does."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_server import FakeServer

from assay.errors import AssayError, UnreachableError
from assay_evaluate.client.client import Client
from assay_evaluate.client.journal import Identity, Journal, Request
from assay_evaluate.diagnosis.endpoint import find_endpoint
from assay_evaluate.serving.api_key import bearer
from assay_evaluate.serving.external import get
from assay_evaluate.serving.server import Server

KEY = "sk-hunter2"
WHO = Identity("checkpoint", "fingerprint", "suite")


def test_a_key_comes_from_the_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_SERVER", KEY)
    monkeypatch.delenv("NOT_THERE", raising=False)
    assert bearer("OF_THE_SERVER", "--api-key-env") == {"Authorization": "Bearer sk-hunter2"}
    assert bearer(None, "--api-key-env") == {}
    with pytest.raises(AssayError, match=r"^--api-key-env NOT_THERE: no such environment variable, or it is empty; export it"):
        bearer("NOT_THERE", "--api-key-env")
    with pytest.raises(AssayError, match=r"^--api-key-env: takes the name of an environment variable") as caught:
        bearer(KEY, "--api-key-env")
    assert KEY not in str(caught.value)
    for wrong in (f"{KEY}\n", f"{KEY} {KEY}", f"{KEY}\u00e9"):
        monkeypatch.setenv("OF_THE_SERVER", wrong)
        with pytest.raises(AssayError, match=r"^--api-key-env OF_THE_SERVER: its value has a space") as caught:
            bearer("OF_THE_SERVER", "--api-key-env")
        assert KEY not in str(caught.value)


def test_every_request_carries_the_key_and_no_record_does(tmp_path: Path) -> None:
    with FakeServer() as fake, Journal(tmp_path / "journal.db") as journal:
        fake.headers = {"Authorization": f"Bearer {KEY}"}
        server = Server(fake.base_url, "model", 4096, None, None, headers=fake.headers)  # type: ignore[arg-type]
        with Client(server, journal, WHO) as client:
            [reply] = client.ask([Request("t", "1", 0, "/v1/completions", {"prompt": "1 + 1", "max_tokens": 1})])
            assert client.post("/tokenize", {"prompt": "abc"}).data["count"] == 3
        assert (reply.status, reply.text) == ("answered", "#### 7")
        server.check_alive()
        assert find_endpoint(fake.base_url, headers=fake.headers).offer.completions
        assert KEY not in repr(server)
        with pytest.raises(AssayError, match=r"answers 401 at .*/health: "):
            Server(fake.base_url, "model", 4096, None, None).check_alive()  # type: ignore[arg-type]
        with pytest.raises(AssayError, match="answers 401") as caught:
            get(fake.base_url, "/version", what="the server", headers={"Authorization": f"Bearer {KEY}-not"})
        assert not isinstance(caught.value, UnreachableError) and KEY not in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if KEY.encode() in path.read_bytes()]
