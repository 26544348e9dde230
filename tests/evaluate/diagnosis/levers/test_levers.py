"""`assay diagnose lever`: statistics of structure against size, scripted servers whose lever is known, shrinking, bundle."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from fake_server import FakeServer, Scripted
from raw_server import RawServer
from server_behaviours import http

from assay.errors import MeasureError, ServeError
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.records.diagnosis.lever import Failure, LeverReport, Observation
from assay_evaluate.diagnosis.endpoint import ProbedEndpoint, find_endpoint
from assay_evaluate.diagnosis.levers.reproduction import command_of, port_of, reproduce, shrink
from assay_evaluate.diagnosis.levers.search import LeverSettings, choose_changes, compare_observations, find_levers, pick
from assay_evaluate.diagnosis.levers.settings import LEVERS, Facts, Setting, Start, with_setting
from assay_evaluate.serving.server import ServerSpec
from assay_evaluate.statistics.proportions import clopper_pearson

GARBLED = "the answer is \ufffd\ufffd\ufffd, I think, and it is long enough to be one"
HEALTHY = "the answer is 42"
HABIT = Setting(4)
"""Under it a garbled text is the same every time."""


# ------------------------------------------------------------------------------------------------ structure and size
def observation(*passes: list[tuple[int, str, int | None]], num_requests: int = 50) -> Observation:
    """Passes of failures (request, kind, position)."""
    result = tuple(
        tuple(Failure(request=str(r), kind=kind, position=position, detail="") for r, kind, position in failures)
        for failures in passes
    )
    asked = num_requests * len(passes)
    return Observation(
        setting={}, num_requests=asked, rate=clopper_pearson(sum(map(len, result)), asked), passes=result, seconds=0.0
    )


def effect_of(before: Observation, after: Observation) -> str:
    return choose_changes([compare_observations(before, after)])[0].effect


def test_structure_is_told_from_size() -> None:
    sometimes = observation(*[[(r, "x", r % 30) for r in range(k, 50, 3)] for k in (0, 1)])
    nothing = observation([], [])
    assert effect_of(sometimes, nothing) == "gone"
    assert effect_of(nothing, sometimes) == "appears"
    assert effect_of(nothing, nothing) == "none"
    assert effect_of(sometimes, sometimes) == "none"
    rarer = observation(*[[(r, "x", (7 * r) % 30) for r in range(k, 50, 17)] for k in (2, 5)])
    assert effect_of(sometimes, rarer) == "size"
    assert effect_of(observation([(1, "x", 0)], []), nothing) == "none"  # one failure may stay away by chance


def test_other_symptoms_positions_and_requests_are_structure() -> None:
    before = observation([(r, "x", r) for r in range(20)], [(r, "x", r) for r in range(20)])
    assert effect_of(before, observation([(r, "y", r) for r in range(20)], [(r, "y", r) for r in range(20)])) == "other kind"
    later = observation([(r, "x", 64 + r) for r in range(20)], [(r, "x", 64 + r) for r in range(20)])
    assert effect_of(before, later) == "moved"
    others = observation([(r, "x", r - 25) for r in range(25, 45)], [(r, "x", r - 25) for r in range(25, 45)])
    assert effect_of(before, others) == "moved"
    # the same failing of others says nothing where even repeats do not agree
    scattered = observation([(r, "x", r % 20) for r in range(0, 40, 2)], [(r, "x", r % 20) for r in range(1, 40, 2)])
    assert effect_of(scattered, others) == "none"


@pytest.mark.slow
def test_chance_names_no_lever() -> None:
    """Of 40 searches over nine levers on a failure that depends on none, one in a hundred may name one."""
    draw = random.Random(5)

    def now_and_then() -> Observation:
        return observation(*[[(r, "x", draw.randrange(40)) for r in range(50) if draw.random() < 0.3] for _ in range(2)])

    named = 0
    for _ in range(40):
        before = now_and_then()
        changes = choose_changes([compare_observations(before, now_and_then()) for _ in range(9)])
        named += any(change.effect in ("gone", "appears", "other kind", "moved") for change in changes)
    assert named <= 2


def test_the_reason_is_named_before_what_it_explains() -> None:
    assert pick([("concurrency", "gone"), ("n", "none"), ("max_num_seqs", "gone")]) == ("concurrency", ("max_num_seqs",))
    assert pick([("concurrency", "gone"), ("kv_cache", "gone"), ("max_num_seqs", "gone")])[0] == "kv_cache"
    assert pick([("concurrency", "moved"), ("speculation", "gone")]) == ("speculation", ("concurrency",))
    assert pick([("concurrency", "size"), ("eager", "none")]) == (None, ())


# ------------------------------------------------------------------------------------------------ scripted servers
class ScriptedVllm(FakeServer):
    """Fails as its rule says. `slot`: rows of a cache that are handed out in turn, as vLLM hands out its blocks."""

    def __init__(self, setting: Setting, fails: Callable[[ScriptedVllm, Setting], bool]) -> None:
        super().__init__(self._scripted)
        self.setting, self.fails = setting, fails
        self.slot = self.now = self.asked = 0
        self._asked: Counter[str] = Counter()
        self._counting = threading.Lock()

    def _scripted(self, body: dict[str, Any]) -> Scripted:
        if body.get("max_tokens", 1) < 8:
            return Scripted(HEALTHY)
        with self._counting:
            self.slot = (self.slot + 5) % (self.setting.kv_cache_blocks or 100)
            self.now = min(self._at_once, self.setting.max_num_seqs or 64)
            prompt = json.dumps(body["messages"])
            self.asked = self._asked[prompt]
            self._asked[prompt] += 1
            wrong = self.fails(self, self.setting)
        text = GARBLED if self.setting == HABIT else f"{GARBLED} {self.slot} {self.asked}"
        return Scripted(text if wrong else HEALTHY, delay_s=0.05)

    @property
    def at_times(self) -> bool:
        """Every other time a request is asked: never the second time in a row."""
        return self.asked % 2 == 0


def scripted(fails: Callable[[ScriptedVllm, Setting], bool]) -> Start:
    @contextmanager
    def start(setting: Setting) -> Iterator[ProbedEndpoint]:
        with ScriptedVllm(setting, fails) as server:
            yield find_endpoint(server.base_url)

    return start


RULES: dict[str, Callable[[ScriptedVllm, Setting], bool]] = {
    "concurrency": lambda server, setting: server.now > 1,
    "kv_cache": lambda server, setting: server.slot >= 60,
    "speculation": lambda server, setting: setting.speculation is not False and server.at_times,
    "none": lambda server, setting: server.at_times,
    "nothing": lambda server, setting: False,
}
ALL = {"block_size": 128, "speculation": True, "prefix_caching": True, "can_restart": True, "num_devices": 2}


def facts(endpoint: ProbedEndpoint) -> Facts:
    return Facts(kv_cache_blocks=100, **ALL)  # type: ignore[arg-type]


def search(rule: str, **more: Any) -> tuple[LeverReport, Any]:
    settings = LeverSettings(num_requests=12, concurrency=8, max_tokens=16, **more)
    return find_levers(scripted(RULES[rule]), settings, label=rule, facts=facts)


@pytest.mark.slow
def test_the_right_lever_of_all_is_named() -> None:
    report, _ = search("concurrency")
    assert (report.lever, report.also) == ("concurrency", ("max_num_seqs",))
    effects = {effect.lever: effect.effect for effect in report.effects}
    assert effects == dict.fromkeys(effects, "none") | {"concurrency": "gone", "max_num_seqs": "gone", "n": effects["n"]}
    assert set(effects) == set(LEVERS)
    assert "it depends on concurrency (8 -> 1: gone); max_num_seqs changes it too, because of concurrency" in report.sentence


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["kv_cache", "speculation"])
def test_the_right_lever_is_named(rule: str) -> None:
    report, _ = search(rule, levers=("concurrency", rule, "chunked_prefill"))
    assert (report.lever, report.also) == (rule, ())
    assert f"it depends on {rule} (" in report.sentence


@pytest.mark.slow
def test_a_failure_that_depends_on_nothing_has_no_lever() -> None:
    report, _ = search("none", levers=("concurrency", "speculation", "eager"))
    assert report.lever is None and report.also == ()
    assert "none of concurrency, speculation, eager changes how they fail" in report.sentence


def test_a_healthy_server_needs_no_lever() -> None:
    report, _ = search("nothing")
    assert report.effects == () and report.sentence.startswith("nothing failed in 24 requests")


def test_habits_of_the_model_are_no_failures() -> None:
    """A reply that is garbled alone, too, says nothing of the server."""
    start = scripted(lambda server, setting: True)
    result, _ = find_levers(
        start, LeverSettings(num_requests=8, concurrency=4, max_tokens=16), label="habit", base=HABIT, facts=facts
    )
    assert result.baseline.failures == ()


@pytest.mark.slow
def test_somebody_elses_server_is_only_asked() -> None:
    def bare(endpoint: ProbedEndpoint) -> Facts:
        return Facts()

    settings = LeverSettings(num_requests=12, concurrency=8, max_tokens=16)
    report, _ = find_levers(scripted(RULES["concurrency"]), settings, label="url", facts=bare)
    assert report.lever == "concurrency"
    untried = {effect.lever: effect.sentence for effect in report.effects if effect.effect == "not tried"}
    assert untried["kv_cache"] == "not tried: the server does not tell the size of its cache"
    assert untried["eager"] == (
        "not tried: it needs a server with other settings; give the checkpoint folder instead of the URL"
    )


@pytest.mark.slow
def test_a_setting_under_which_vllm_does_not_start_is_told() -> None:
    @contextmanager
    def start(setting: Setting) -> Iterator[ProbedEndpoint]:
        if setting.eager:
            raise ServeError("vLLM stopped before it was ready (exit status 1): no room\n  last lines: ...")
        with scripted(RULES["concurrency"])(setting) as endpoint:
            yield endpoint

    settings = LeverSettings(num_requests=12, concurrency=8, max_tokens=16, levers=("concurrency", "eager"))
    report, _ = find_levers(start, settings, label="eager", facts=facts)
    assert report.lever == "concurrency"
    assert report.effects[1].effect == "not tried"
    assert report.effects[1].sentence == (
        "not tried: vLLM does not start with eager on: vLLM stopped before it was ready (exit status 1): no room"
    )


def test_unknown_levers_are_refused() -> None:
    with pytest.raises(MeasureError, match="no lever called 'luck'; there are: concurrency, n, speculation"):
        search("none", levers=("luck",))


def test_settings_become_flags_of_vllm() -> None:
    profile = load_recipe(ProfileRecipe, "cpu-emulated")
    turned = with_setting(
        profile, Setting(8, kv_cache_blocks=50, max_num_seqs=2, prefix_caching=True, chunked_prefill=False, eager=True)
    )
    assert turned.vllm == {
        "dtype": "float32", "max-model-len": 4096, "max-logprobs": 128, "num-gpu-blocks-override": 50, "max-num-seqs": 2,
        "enable-prefix-caching": True, "enable-chunked-prefill": False, "max-num-batched-tokens": 4096, "enforce-eager": True,
        "compilation-config": {"custom_ops": ["-rotary_embedding"]},
    }  # fmt: skip
    assert with_setting(profile, Setting(8)).vllm == profile.vllm


# ------------------------------------------------------------------------------------------------ shrinking
@pytest.mark.parametrize("culprits", [{3}, {3, 17}, {0, 9, 31}, {30, 31}])
def test_shrinking_finds_exactly_the_culprits(culprits: set[int]) -> None:
    trials = 0

    def fails(subset: Any) -> bool:
        nonlocal trials
        trials += 1
        return culprits <= set(subset)

    assert shrink(range(32), fails, most_trials=200) == sorted(culprits)
    assert trials < 120


def test_shrinking_to_a_number_of_requests_and_within_its_budget() -> None:
    assert len(shrink(range(40), lambda subset: len(subset) >= 5, most_trials=300)) == 5
    calls = itertools.count()
    best = shrink(range(64), lambda subset: next(calls) >= 0 and 63 in subset, most_trials=3)
    assert next(calls) == 3 and 63 in best and len(best) < 64


# ------------------------------------------------------------------------------------------------ the bundle
def run_bundle(folder: Path, url: str, *words: str) -> tuple[int, str]:
    """The script with a bare Python: no site-packages, no assay."""
    command = [sys.executable, "-I", "-S", str(folder / "reproduce.py"), url, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_bundle_reproduces_on_the_faulty_server_only(tmp_path: Path) -> None:
    report, result = search("concurrency", levers=("concurrency", "eager"))
    done = reproduce(report, result, tmp_path / "bundle", None)
    assert 2 <= len(done.smallest) <= 4 and done.bundle == str(tmp_path / "bundle")
    assert sorted(path.name for path in (tmp_path / "bundle").iterdir()) == [
        "README.md", "levers.json", "reproduce.py", "requests.json", "server.sh",
    ]  # fmt: skip
    kept = json.loads((tmp_path / "bundle" / "requests.json").read_text())
    assert [request["id"] for request in kept["requests"]] == list(done.smallest)
    assert kept["concurrency"] == 8 and kept["lever"] == "concurrency"
    assert all("".join(chr(i) for i in request["expected"]) == HEALTHY[:16] for request in kept["requests"])
    assert LeverReport.load(tmp_path / "bundle" / "levers.json") == done
    with scripted(RULES["concurrency"])(Setting(8)) as faulty:
        code, text = run_bundle(tmp_path / "bundle", faulty.base_url)
        assert code == 1 and text.splitlines()[-1].endswith("requests failed: reproduced")
    with scripted(RULES["nothing"])(Setting(8)) as healthy:
        code, text = run_bundle(tmp_path / "bundle", healthy.base_url + "/v1", "--passes", "1")
        assert (code, text) == (0, f"0 of {len(done.smallest)} requests failed: not reproduced\n")
    code, text = run_bundle(tmp_path / "bundle", "http://127.0.0.1:9")
    assert code == 2 and "cannot be asked" in text and "Traceback" not in text


KEY = "hunter2-of-the-server"


@pytest.mark.slow
def test_the_bundle_asks_a_server_with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that assay starts have one. It comes from the environment, is in no file, and goes to no other address."""
    report, result = search("concurrency", levers=("concurrency", "eager"))
    bundle = tmp_path / "bundle"
    reproduce(report, result, bundle, None)
    with ScriptedVllm(Setting(8), RULES["concurrency"]) as server:
        server.headers = {"Authorization": f"Bearer {KEY}"}  # type: ignore[misc]
        code, text = run_bundle(bundle, server.base_url)
        assert code == 2 and "HTTP 401" in text and "VLLM_API_KEY" in text, "not asked is not reproduced"
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        assert run_bundle(bundle, server.base_url)[0] == 1
        monkeypatch.setenv("MINE", KEY)
        monkeypatch.delenv("VLLM_API_KEY")
        assert run_bundle(bundle, server.base_url, "--api-key-env", "MINE")[0] == 1
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        for reply in (
            http("", "307 Temporary Redirect", f"Location: {server.base_url}/v1/chat/completions"), http(KEY, "500 Oops"),
            http("[" * 100_000), http("5"), http('{"choices": 5}'), http('{"choices": [{"message": 5}]}'), b"SSH-2.0\r\n",
            http('{"choices": [{"text": "a", "token_ids": [1], "logprobs": {"tokens": 5}}]}'),
        ):  # fmt: skip
            with RawServer(reply) as odd:
                code, text = run_bundle(bundle, odd.base_url, "--passes", "1")
            assert (code, "Traceback" in text, KEY in text) == (1, False, False), text
    assert not [path for path in bundle.iterdir() if KEY in path.read_text()]


def test_the_bundle_asks_where_its_server_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """server.sh has no key and no secret of this environment; reproduce.py asks it by default."""
    monkeypatch.setenv("HF_TOKEN", KEY)
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    profile = load_recipe(ProfileRecipe, "cpu-emulated").model_copy(update={"interpreter": sys.executable})
    spec = ServerSpec(tmp_path, profile, Serving(), speculate=False, log_path=tmp_path / "log")
    command, environment = command_of(spec, Setting(8))
    assert command is not None and command[command.index("--port") + 1] == "8000" == str(port_of(spec))
    assert KEY not in str((command, environment))


@pytest.mark.slow
def test_the_command_writes_the_bundle(run: Run, tmp_path: Path) -> None:
    with ScriptedVllm(Setting(8), RULES["concurrency"]) as server:
        words = ("--concurrency", "8", "--requests", "12", "--max-tokens", "16")
        code, out, err = run("lever", server.base_url, "--levers", "concurrency,n", "--out", "found", *words)
    assert code == 1, err
    assert "it depends on concurrency (8 -> 1: gone)" in out.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["found"]
    assert LeverReport.load(Path("found/levers.json")).bundle == "found" and Path("found/reproduce.py").is_file()
    with FakeServer() as healthy:
        code, out, _ = run("lever", healthy.base_url, "--levers", "concurrency", *words, "--json")
    assert code == 0 and json.loads(out)["sentence"].startswith("nothing failed")
