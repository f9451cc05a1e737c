"""Which engine generates, and what is refused before anything starts."""

import pytest

from hybridflow.config import ConfigError
from hybridflow.roles.engines import RolloutSettings, resolve_rollout
from hybridflow.roles.policy import ModelSettings
from hybridflow.rollout.choice import Choice, Measured, choose_engine
from hybridflow.rollout.vllm import VllmSettings

TABLE = (Measured("small", 0.5e9, 30e3, 15e3, "H200"), Measured("large", 7e9, 20e3, 25e3, "H200"))
BOTH = {"vllm", "sglang"}


@pytest.mark.parametrize(
    ("facts", "name", "told"),
    [
        ({"on_gpu": False, "installed": BOTH}, "native", "on a CPU"),
        ({"on_gpu": True, "installed": {"sglang"}, "parameters": 7e9}, "native", "vLLM is not installed"),
        (
            {"on_gpu": True, "installed": BOTH, "parameters": 8e9},
            "vllm",
            "for large on one H200, native 20,000 and vLLM 25,000",
        ),
        ({"on_gpu": True, "installed": BOTH, "parameters": 1.5e9}, "native", "for small on one H200"),
        ({"on_gpu": True, "installed": BOTH, "parameters": 8e9, "numerics": "exact"}, "native", "numerics=exact"),
        ({"on_gpu": True, "installed": BOTH, "parameters": 8e9, "measured": ()}, "native", "nothing measured"),
    ],
)
def test_auto_takes_what_is_there_and_measured_faster_and_says_why(facts, name, told):
    choice = choose_engine("auto", **{"measured": TABLE, **facts})
    assert choice.name == name and told in choice.reason and str(choice) == f"{name}: {choice.reason}"


def test_what_is_asked_for_is_taken():
    for name in ("native", "vllm", "sglang"):
        assert choose_engine(name, installed=BOTH, on_gpu=True) == Choice(name, "as rollout.engine says")
    for name in ("vllm", "auto"):
        served = choose_engine(name, installed=(), on_gpu=False, url="http://127.0.0.1:8000")
        assert served == Choice("vllm", "the server at http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("wanted", "facts", "message"),
    [
        ("vllm", {"installed": ()}, "'vllm' is not installed; pip install vllm"),
        ("sglang", {"installed": {"vllm"}}, "'sglang' is not installed; pip install sglang"),
        ("sglang", {"installed": BOTH, "on_gpu": False}, "needs a GPU"),
        ("vllm", {"installed": BOTH, "numerics": "exact"}, "set rollout.engine=native"),
        ("hf", {"installed": BOTH}, "'hf' is no engine"),
        ("native", {"installed": BOTH, "url": "http://a:1"}, "rollout.vllm.url: 'http://a:1' is a vLLM server"),
        ("sglang", {"installed": BOTH, "url": "http://a:1"}, "rollout.engine is sglang; set rollout.engine=vllm"),
    ],
)
def test_an_engine_that_cannot_be_had_is_refused_with_the_remedy(wanted, facts, message):
    with pytest.raises(ConfigError, match=message):
        choose_engine(wanted, **{"on_gpu": True, **facts})


def test_settings_that_would_not_be_honoured_are_refused():
    VllmSettings(url="http://127.0.0.1:8000", connections=4, weights_dir="/data", max_model_len=100)
    with pytest.raises(ConfigError, match="tensor_parallel_size is the server's own to set"):
        VllmSettings(url="http://127.0.0.1:8000", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="connections belongs to a server"):
        VllmSettings(connections=4)
    with pytest.raises(ConfigError, match="url"):
        VllmSettings(url="127.0.0.1:8000")
    with pytest.raises(ConfigError, match="engine"):
        RolloutSettings(engine="vllm-0")


def test_a_run_resolves_its_engine_once_and_a_server_serves_one_worker():
    model = ModelSettings(path="anywhere", device="cpu")
    resolved, choice = resolve_rollout(model, RolloutSettings(), "fast", 4, None)
    assert (resolved.engine, resolved.keeps_weights, choice.name) == ("native", False, "native")
    served = RolloutSettings(engine="vllm", vllm=VllmSettings(url="http://127.0.0.1:1"))
    resolved, _ = resolve_rollout(model, served, "fast", 1, None)
    assert resolved.keeps_weights and resolved.is_remote
    with pytest.raises(ConfigError, match="2 would generate with it"):
        resolve_rollout(model, served, "fast", 2, "gpu")
