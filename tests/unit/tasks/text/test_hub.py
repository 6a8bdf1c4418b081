"""Models by their names on a hub: a server on loopback that answers as the Hugging Face hub does."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.tasks.text.pretrained import fetch_folder, pretrained_on_all
from hvdtrain.tasks.text.weights import load_pretrained
from tests import refusals
from tests.refusals import require_facts
from tests.unit.tasks.text.berts import VOCABULARY, masked_lm, saved

COMMIT = "c0ffee" * 6 + "c0ff"
NAME = "someone/tiny-bert"


class Hub:
    """The files of one model; what it was asked for."""

    def __init__(self, folder):
        self.folder, self.asked, self.git = folder, [], False  # whether files are named by git's hash
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.answer(with_body=False)

            def do_GET(self):
                self.answer(with_body=True)

            def answer(self, *, with_body):
                path, name = self.path.partition("?")[0], self.path.rpartition("/")[2]
                content = hub.content(path)
                known, content = content is not None, content or b""
                if with_body and "/resolve/" in path:
                    hub.asked.append(name)
                self.send_response(200 if known else 404)
                self.send_header("X-Repo-Commit", COMMIT)
                whole = (
                    hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False)
                    if hub.git
                    else hashlib.sha256(content)
                )
                self.send_header("ETag", f'"{whole.hexdigest()}"')
                self.send_header("Content-Length", str(len(content)))
                if not known:
                    here = self.path.startswith(f"/{NAME}/")
                    self.send_header("X-Error-Code", "EntryNotFound" if here else "RepoNotFound")
                self.end_headers()
                if with_body:
                    self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def content(self, path):
        """What is at this path; None for nothing."""
        files = sorted(self.folder.iterdir())
        if path in (f"/api/models/{NAME}", f"/api/models/{NAME}/revision/main"):
            siblings = [{"rfilename": file.name} for file in files]
            return json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode()
        if path == f"/api/models/{NAME}/tree/{COMMIT}":
            tree = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40} for file in files]
            return json.dumps(tree).encode()
        file = self.folder / path.rpartition("/")[2]
        return file.read_bytes() if path.startswith(f"/{NAME}/resolve/") and file.is_file() else None

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    hub = Hub(saved(tmp_path / "on the hub", masked_lm()))
    template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield hub
    hub.close()


def test_a_model_is_downloaded_once(hub):
    model = masked_lm(seed=1)
    found = pretrained_on_all(SerialComm(), NAME)
    load_pretrained(model, found)
    assert found.vocabulary.tokens == VOCABULARY
    assert torch.equal(model.cls["predictions"].bias, masked_lm().cls["predictions"].bias)
    assert sorted(hub.asked) == ["config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"]
    pretrained_on_all(SerialComm(), NAME)
    assert len(hub.asked) == 4


def test_a_model_may_have_pickled_weights_and_no_word_of_its_tokenizer(hub):
    (hub.folder / "tokenizer_config.json").unlink()
    (hub.folder / "model.safetensors").unlink()
    torch.save(masked_lm(seed=3).state_dict(), hub.folder / "pytorch_model.bin")
    model = masked_lm(seed=1)
    load_pretrained(model, pretrained_on_all(SerialComm(), NAME))
    assert torch.equal(model.cls["predictions"].bias, masked_lm(seed=3).cls["predictions"].bias)
    assert sorted(hub.asked) == ["config.json", "pytorch_model.bin", "vocab.txt"]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_in_several_files_are_downloaded_with_their_index(hub, name):
    weights, (stem, suffix) = masked_lm(seed=3).state_dict(), name.split(".")
    (hub.folder / "model.safetensors").unlink()
    part = f"{stem}-00001-of-00001.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(weights, hub.folder / part)
    (hub.folder / f"{name}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(weights, part)}))
    (hub.folder / "added_tokens.json").write_text("{}")
    model = masked_lm(seed=1)
    load_pretrained(model, pretrained_on_all(SerialComm(), NAME))
    assert torch.equal(model.cls["predictions"].bias, masked_lm(seed=3).cls["predictions"].bias)
    assert {part, f"{name}.index.json", "added_tokens.json"} < set(hub.asked)


def test_a_folder_goes_before_a_name(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / NAME, masked_lm())
    assert str(fetch_folder(NAME)) == NAME
    assert not hub.asked


def refused(name):
    return refusals.refused(lambda: pretrained_on_all(SerialComm(), name), f"--pretrained {name}: ")


@pytest.mark.parametrize("tag", ["sha256", "git"])
def test_a_vocabulary_that_was_torn_in_the_hubs_cache_is_named(hub, tag):
    """By so few tokens that the model might have had room for more."""
    hub.git = tag == "git"
    found = pretrained_on_all(SerialComm(), NAME)
    blob = (found.folder / "vocab.txt").resolve()
    blob.write_text("\n".join(VOCABULARY[:-1]) + "\n")
    require_facts(refused(NAME), f"vocab.txt is damaged ... Delete {blob}")
    blob.unlink()
    assert pretrained_on_all(SerialComm(), NAME).vocabulary.tokens == VOCABULARY


def test_an_unknown_name_is_refused(hub):
    require_facts(refused("someone/else"), "no such folder ... cannot be downloaded")


def test_a_hub_out_of_reach_names_the_way_out(hub):
    hub.close()
    require_facts(refused(NAME), "cannot be downloaded ... pass its folder")
