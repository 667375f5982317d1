"""The agent loop for verl, in verl's own workers: several Ray actors, behind verl's client and load balancer."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import ray
from scripted import ROLLOUT, Verl, assert_equal, assert_idle, figures

from obsspec.errors import InputError
from obsspec.integrations import verl as integration
from obsspec.training.transitions import Transitions


@pytest.fixture(scope="module")
def verl(cluster: None, base: str, loops: str) -> Verl:
    return Verl(base, loops)


def test_samples_are_those_of_verls_own_loop(verl: Verl) -> None:
    verl.take(0.02)
    plain = verl.samples("tool_agent", 50, 4)
    requests = verl.counted()["requests"]
    ahead = verl.samples("obsspec", 50, 4)
    assert_equal(plain, ahead)
    own, timing = figures(ahead), ahead.meta_info["timing"]
    assert own["obsspec_hits"] > 20, own
    assert own["obsspec_attempted"] > own["obsspec_hits"], own
    assert 0 < own["obsspec_hidden_seconds"] < own["obsspec_tool_seconds"], own
    assert timing["agent_loop/obsspec_hits"] == own["obsspec_hits"]
    assert "agent_loop/obsspec_hits" not in plain.meta_info["timing"]
    # Beyond verl's own requests there are those that were speculative and for nothing, and no others.
    counted = verl.counted()
    assert 0 < counted["requests"] - 2 * requests <= counted["speculative"]
    assert_idle(verl)


def test_without_depth_it_is_verls_own(verl: Verl) -> None:
    before = verl.counted()
    never = verl.samples("never", 4, 2)
    assert_equal(verl.samples("tool_agent", 4, 2), never)
    assert not any(figures(never).values())
    assert verl.counted()["speculative"] == before["speculative"]


def test_what_was_begun_for_nothing_ends_in_its_server(verl: Verl) -> None:
    """A generation takes far longer than any tool: what is begun on a wrong draft is cancelled long before its end."""
    verl.take(1.0)
    before = verl.counted()
    ahead = figures(verl.samples("novice", 8, 8))
    lost = ahead["obsspec_attempted"] - ahead["obsspec_hits"]
    assert lost > 0
    assert verl.counted()["aborted"] - before["aborted"] >= lost
    assert_idle(verl)


@pytest.mark.parametrize(
    "limits",
    [
        ["multi_turn.max_assistant_turns=3", "response_length=900"],
        [
            *("multi_turn.max_user_turns=2", "multi_turn.max_tool_response_length=20"),
            *("multi_turn.max_parallel_calls=1", "calculate_log_probs=false"),
        ],
    ],
)
def test_samples_end_where_verls_do(cluster: None, base: str, loops: str, limits: list[str]) -> None:
    verl = Verl(base, loops, *(f"{ROLLOUT}.{limit}" for limit in limits))
    verl.take(0.05)
    plain = verl.samples("tool_agent", 12, 4)
    hits = 0.0
    for _ in range(2):  # In the second one memory knows what tools answer.
        ahead = verl.samples("obsspec", 12, 4)
        assert_equal(plain, ahead)
        hits += figures(ahead)["obsspec_hits"]
    assert hits > 0


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"depth": -1}, "depth -1: must be a whole number of at least 0"),
        ({"breadth": "two"}, "breadth 'two': must be a whole number of at least 1"),
        ({"predictor": "rules,oracle"}, "predictor oracle: not one of rules, memory, language_model"),
        ({"predictor": "language_model"}, "world_model: is missing, and predictor language_model needs it"),
        (
            {"predictor": "language_model", "world_model": "http://x"},
            "world_model_tokenizer: is missing, and predictor language_model needs it",
        ),
        ({"world_model": "http://x"}, "world_model: only predictor language_model uses it; add that"),
        ({"depht": 2}, "depht: no such key; did you mean depth?"),
    ],
)
def test_a_wrong_key_or_value_is_named(keys: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match="agent loop obsspec: ") as raised:
        integration.SpeculativeToolAgentLoop(**keys)
    assert named in str(raised.value)


def test_what_another_verl_lacks_is_listed() -> None:
    assert integration.lacking() == []
    there = "verl.workers.rollout.llm_server:LLMServerClient.generate"
    gone = ["verl.workers.rollout.llm_server:LLMServerClient.was_renamed", "verl.has_moved:LLMServerClient"]
    assert integration.lacking([there, *gone]) == gone


def test_every_call_goes_to_the_co_training(cluster: None, base: str, tmp_path: Path) -> None:
    """Once, with what verl made of the answer, and whichever worker it came from."""

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({"exact_rate": 0.0})

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            with store_lock:
                added, homeless = store.receive(content)
            self._reply({"added": added, "without_beginning": homeless})

        def _reply(self, value: object) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    file, store_lock = tmp_path / "loops.yaml", threading.Lock()
    service = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    target = "obsspec.integrations.verl.SpeculativeToolAgentLoop"
    url = f"http://127.0.0.1:{service.server_port}"
    file.write_text(f"- {{name: obsspec, _target_: {target}, transitions: '{url}'}}\n")
    with Transitions.open(tmp_path / "transitions.sqlite") as store:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        samples = Verl(base, str(file)).samples("obsspec", 6, 3)
        calls = figures(samples)["obsspec_tool_calls"]
        for _ in range(200):
            with store_lock:
                sent = list(store.after(0))
            if len(sent) >= calls:
                break
            time.sleep(0.05)
        service.shutdown()
    assert len(sent) == calls > 20
    answers = [each.observation.text for each in sent]
    assert any("...(truncated)..." in answer for answer in answers)
    assert any(answer.startswith("Unknown function 'teapot'") for answer in answers)
    assert {each.query.instruction for each in sent} <= {f"Do task {number}." for number in range(6)}
    assert all("shell" not in each.query.command for each in sent if each.observation.text.startswith("ran "))


def test_a_worker_that_dies_leaves_nothing_waiting(verl: Verl, base: str, loops: str) -> None:
    """verl gives the batch up; the servers end what they were asked, and other workers go on."""
    other = Verl(base, loops)
    other.take(0.3)
    threading.Timer(1.0, lambda: ray.kill(other.manager.agent_loop_workers[0])).start()
    with pytest.raises(ray.exceptions.RayActorError):
        other.samples("obsspec", 8, 4)
    assert_idle(other)
    verl.take(0.01)
    assert_equal(verl.samples("tool_agent", 4, 4), verl.samples("obsspec", 4, 4))
