"""Loading: YAML, defaults lists, references and overrides to a settings object, and back."""

import copy
import string
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hybridflow.config import (
    AliasChoices,
    ConfigError,
    Field,
    check_config,
    describe_config,
    load_config,
    settings,
    to_yaml,
)


@settings
class Optimizer:
    """How weights move."""

    lr: float = Field(default=1e-3, gt=0.0)
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the moments."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate."""


@settings
class Actor:
    """Who acts."""

    optimizer: Optimizer = Field(default_factory=Optimizer)
    """How weights move."""
    max_tokens: int = Field(default=128, ge=1)
    """Longest response."""


@settings
class Native:
    """Our engine."""

    kind: Literal["native"] = "native"
    """Which."""
    max_rows: int = 8
    """Rows at once."""


@settings
class Served:
    """An engine behind an address."""

    kind: Literal["served"] = "served"
    """Which."""
    address: str
    """Where."""


@settings
class Root:
    """A root."""

    model: str
    """Directory of the model."""
    actor: Actor = Field(default_factory=Actor)
    """Who acts."""
    reference: Actor | None = None
    """Who is compared with."""
    engine: Annotated[Native | Served, Field(discriminator="kind")] = Field(default_factory=Native)
    """Who generates."""
    sources: tuple[Optimizer, ...] = ()
    """Several of a kind."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Passed on as it is."""
    note: str | None = None
    """Free text."""


FILES = {
    "my.yaml": "defaults: [base, {size: small}, _self_]\nmodel: ${oc.env:HF_TEST_MODEL,tiny}\nactor:\n  optimizer:\n    lr: 2e-4\n",
    "base.yaml": "actor:\n  max_tokens: 64\n  optimizer:\n    lr: 1e-4\n",
    "size/small.yaml": "# @package _global_\nactor:\n  max_tokens: 32\n",
    "size/large.yaml": "# @package _global_\nactor:\n  max_tokens: 256\n",
    "broken.yaml": "model: x\nactor: [1,\nnote: y\n",
    "twice.yaml": "model: x\nmodel: y\n",
    "list.yaml": "- 1\n- 2\n",
    "asks.yaml": "model: ???\nactor:\n  max_tokens: ???\n",
    "circle.yaml": "defaults:\n  - circle\n",
    "nowhere.yaml": "defaults:\n  - size: huge\n  - _self_\n",
    "env.yaml": "model: ${oc.env:HF_TEST_UNSET}\n",
    "refers.yaml": "model: ${nothing.here}\n",
    "refers_default.yaml": "model: x\nnote: ${actor.optimizer.schedule}\n",
    "resolver.yaml": "model: ${magic:1}\n",
    "syntax.yaml": "model: ${oc.env\n",
    "when.yaml": "model: x\nextra:\n  data: !!binary aGVsbG8=\n",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("configs")
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    (root / "latin.yaml").write_bytes(b"model: caf\xe9\n")
    return root


def load(directory: Path, *overrides: str, name: str = "my") -> Root:
    return load_config(Root, config_path=directory, config_name=name, overrides=overrides)


def fails(directory: Path, *overrides: str, name: str = "my") -> str:
    with pytest.raises(ConfigError) as caught:
        load(directory, *overrides, name=name)
    return str(caught.value)


def test_later_files_win_and_references_resolve(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = load(directory)
    assert (root.model, root.actor.max_tokens, root.actor.optimizer.lr) == ("tiny", 32, 2e-4)
    monkeypatch.setenv("HF_TEST_MODEL", "/models/big")
    assert load(directory, name="my.yaml").model == "/models/big"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.optimizer.lr=3e-4", lambda root: root.actor.optimizer.lr == 3e-4),
        ("actor.optimizer.lr=1", lambda root: root.actor.optimizer.lr == 1.0),
        ("actor.optimizer.schedule=cosine", lambda root: root.actor.optimizer.schedule == "cosine"),
        ("+actor.optimizer.schedule=cosine", lambda root: root.actor.optimizer.schedule == "cosine"),
        ("++actor.optimizer.lr=5e-4", lambda root: root.actor.optimizer.lr == 5e-4),
        ("actor.optimizer.betas=[0.8,0.9]", lambda root: root.actor.optimizer.betas == (0.8, 0.9)),
        (
            "actor.optimizer={lr:1e-5,schedule:linear}",
            lambda root: root.actor.optimizer == Optimizer(lr=1e-5, schedule="linear"),
        ),
        ("~actor.optimizer.lr", lambda root: root.actor.optimizer.lr == 1e-3),
        ("size=large", lambda root: root.actor.max_tokens == 256),
        ("reference.max_tokens=5", lambda root: root.reference == Actor(max_tokens=5)),
        ("engine={kind:served,address:a}", lambda root: root.engine == Served(address="a")),
        ("engine={kind:native,max_rows:3}", lambda root: root.engine == Native(max_rows=3)),
        ("sources=[{lr:1.0},{lr:2.0}]", lambda root: [source.lr for source in root.sources] == [1.0, 2.0]),
        ("extra.any.thing=[1,two]", lambda root: root.extra == {"any": {"thing": [1, "two"]}}),
        ("note=package.module:function", lambda root: root.note == "package.module:function"),
        ("note=null", lambda root: root.note is None),
        ("note='a, b'", lambda root: root.note == "a, b"),
        ("model=${oc.env:HOME}", lambda root: root.model.startswith("/")),
    ],
)
def test_overrides(directory: Path, override: str, expected: Any) -> None:
    assert expected(load(directory, override))


def test_an_override_reaches_into_a_list(directory: Path) -> None:
    root = load(directory, "sources=[{lr:1.0},{lr:2.0}]", "sources.1.lr=3.0")
    assert root.sources == (Optimizer(lr=1.0), Optimizer(lr=3.0))


def test_the_shipped_configs_stand_behind_the_users(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridflow.config import composition

    (tmp_path / "shipped.yaml").write_text("model: shipped\nnote: shipped\n")
    (tmp_path / "base.yaml").write_text("model: never read\n")
    (directory / "mine.yaml").write_text("defaults:\n  - shipped\n  - base\n  - _self_\nnote: mine\n")
    monkeypatch.setattr(composition, "SHIPPED", tmp_path)
    assert load(directory, name="shipped").note == "shipped"
    root = load(directory, name="mine")
    assert (root.model, root.note, root.actor.max_tokens) == ("shipped", "mine", 64)
    assert load_config(Root, config_name="shipped").model == "shipped"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor.optimizer.lrr=3"],
            "unknown key 'actor.optimizer.lrr' (value 3): the nearest key is 'actor.optimizer.lr'; correct it or take it out",
        ),
        (
            ["+actor.lr=3"],
            "unknown key 'actor.lr' (value 3): the nearest key is 'actor.optimizer.lr'; correct it or take it out",
        ),
        (
            ["actr.max_tokens=3"],
            "unknown key 'actr.max_tokens' (value 3): the nearest key is 'actor.max_tokens'; correct it or take it out",
        ),
        (
            ["+zzz=qqq"],
            "unknown key 'zzz' (value 'qqq'): the keys of the configuration are "
            "actor, engine, extra, model, note, reference, sources; take it out or use one of these",
        ),
        (
            ["~actor.max_tokns"],
            "override '~actor.max_tokns': actor.max_tokns is not in the YAML; "
            "take the override out or write the nearest key, 'actor.max_tokens'",
        ),
        (
            ["+actor.max_tokens=3"],
            "override '+actor.max_tokens=3': actor.max_tokens is set already; write actor.max_tokens=3 to change it",
        ),
        (
            ["actor.max_tokens=0"],
            "actor.max_tokens is 0 and must be greater than or equal to 1; correct it or leave it at its default, 128",
        ),
        (
            ["actor.max_tokens=many"],
            "actor.max_tokens is 'many' and must be a whole number; correct it or leave it at its default, 128",
        ),
        (
            ["actor.max_tokens=3.0"],
            "actor.max_tokens is 3.0 and must be a whole number; correct it or leave it at its default, 128",
        ),
        (["actor=3"], "actor is 3 and must be a section of keys; write actor.max_tokens=3"),
        (["reference=8"], "reference is 8 and must be a section of keys; write reference.max_tokens=8"),
        (["actor=0"], "actor is 0 and must be a section of keys; write its keys, such as actor.max_tokens"),
        (
            ["actor.optimizer=fast"],
            "actor.optimizer is 'fast' and must be a section of keys; write its keys, such as actor.optimizer.lr",
        ),
        (["actor=null"], "actor is null and must be a section of keys; correct it or leave it out"),
        (
            ["+actor.qq=3"],
            "unknown key 'actor.qq' (value 3): the keys of 'actor' are max_tokens, optimizer; take it out or use one of these",
        ),
        (
            ["actor.max_tokens.x=3"],
            "unknown key 'actor.max_tokens.x' (value 3): "
            "the nearest key is 'actor.max_tokens'; correct it or take it out",
        ),
        (
            ["actor.optimizer.betas=[1,2,3]"],
            "actor.optimizer.betas is [1, 2, 3] and must have at most 2 items; "
            "correct it or leave it at its default, (0.9, 0.95)",
        ),
        (
            ["actor.optimizer.betas=[0.9]"],
            "actor.optimizer.betas.1 is not set, and its list must have at least 2 items; add it",
        ),
        (
            ["actor.optimizer.schedule=cosin"],
            "actor.optimizer.schedule is 'cosin'; write one of constant, linear, cosine (the nearest is cosine)",
        ),
        (["engine.kind=serve"], "engine.kind is 'serve'; write one of native, served (the nearest is served)"),
        (["engine={kind:served}"], "engine.address is required and not set; set engine.address (Where)"),
        (["engine.max_rows=3"], "engine.kind is required and not set; it says which kind engine is"),
        (
            ["engine.max_row=3"],
            "unknown key 'engine.max_row' (value 3): the nearest key is 'engine.max_rows'; correct it or take it out",
        ),
        (
            ["sources=[{lr:1.0},{lr:x}]"],
            "sources.1.lr is 'x' and must be a number; correct it or leave it at its default, 0.001",
        ),
        (
            ["sources.0.lr=1"],
            "sources is {'0': {'lr': 1}} and must be a list; correct it or leave it at its default, ()",
        ),
        (
            ["sources=[{lr:1.0}]", "sources.3.lr=1"],
            "override 'sources.3.lr=1' cannot be applied (list index out of range); correct it",
        ),
        (["note=3"], "note is 3 and must be a string; correct it or leave it at its default, null"),
        (["~model"], "model is required and not set; set model (Directory of the model)"),
        (["actor.max_tokens"], "override 'actor.max_tokens' has no '='; write actor.max_tokens=VALUE"),
        (["runs/a/b"], "override 'runs/a/b' has no '='; write KEY=runs/a/b"),
        (["=3"], "override '=3' has no key; write KEY=VALUE"),
        (
            ["note=a(b"],
            "override 'note=a(b' cannot be read; quote it for the shell and for itself, as in 'note=\"a(b\"'",
        ),
        (["note=a,b"], "override 'note=a,b' lists several values; write a list, note=[a,b], or quote it as one string"),
        (
            ["size=larg"],
            "configuration 'my' asks for 'size/larg', which does not exist, only large, small; the nearest is 'large'",
        ),
        (
            ["actor.max_tokens=0", "note=3"],
            "actor.max_tokens is 0 and must be greater than or equal to 1; correct it or leave it at its default, 128\n"
            "note is 3 and must be a string; correct it or leave it at its default, null",
        ),
    ],
)
def test_a_wrong_override_is_one_sentence(directory: Path, overrides: list[str], message: str) -> None:
    assert fails(directory, *overrides) == message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "broken",
            "{directory}/broken.yaml, line 4 is not valid YAML (expected ',' or ']', but got '<stream end>'); correct that line",
        ),
        ("twice", "{directory}/twice.yaml, line 2 is not valid YAML (found duplicate key model); correct that line"),
        (
            "list",
            "the configuration cannot be composed: primary config 'list' must be a DictConfig, got ListConfig; correct it",
        ),
        ("latin", "a file of configuration 'latin' is not UTF-8 text (invalid continuation byte); save it as UTF-8"),
        (
            "asks",
            "model is required and not set; set model=VALUE\n"
            "actor.max_tokens is required and not set; set actor.max_tokens=VALUE",
        ),
        ("circle", "the defaults list of 'circle' comes back to itself; take the circle out"),
        (
            "nowhere",
            "configuration 'nowhere' asks for 'size/huge', which does not exist, only large, small; correct the name",
        ),
        (
            "env",
            "model needs the environment variable HF_TEST_UNSET, which is not set; set it, or write ${oc.env:HF_TEST_UNSET,DEFAULT}",
        ),
        ("refers", "model refers to 'nothing.here', which does not exist; set nothing.here or correct the reference"),
        (
            "refers_default",
            "note refers to 'actor.optimizer.schedule', which is left at its default and not in the YAML; "
            "set actor.optimizer.schedule or correct the reference",
        ),
        (
            "resolver",
            "model holds a reference that cannot be resolved (Unsupported interpolation type magic); correct it",
        ),
        ("syntax", "the configuration cannot be composed: no viable alternative at input '${oc.env'; correct it"),
        ("when", "the configuration holds b'hello', a bytes; write it as a string, number, list or mapping"),
    ],
)
def test_a_wrong_file_is_one_sentence(directory: Path, name: str, message: str) -> None:
    assert fails(directory, name=name) == message.replace("{directory}", str(directory))


def test_what_is_still_to_be_set_is_described_as_such_and_all_else_is_checked(directory: Path) -> None:
    described = describe_config(Root, config_path=directory, config_name="asks", overrides=["note=a"])
    lines = described.splitlines()
    assert lines[:3] == ["# A root.", "# Directory of the model.", "model: ???"]
    assert {"  # Longest response.", "  max_tokens: ???", "    lr: 0.001", "note: a"} <= set(lines)
    (directory / "described.yaml").write_text(described)
    assert fails(directory, name="described").count(" is required and not set") == 2
    assert load(directory, "model=m", "actor.max_tokens=7", name="described").actor == Actor(max_tokens=7)
    with pytest.raises(ConfigError, match="^actor.optimizer.lr is 0 and must be greater than 0"):
        describe_config(Root, config_path=directory, config_name="asks", overrides=["actor.optimizer.lr=0"])
    whole = describe_config(Root, config_path=directory, config_name="base", overrides=["+model=m"])
    assert yaml.safe_load(whole) == yaml.safe_load(to_yaml(load(directory, "+model=m", name="base")))


def test_a_missing_file_lists_what_exists(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = fails(directory, name="bass")
    assert message.startswith(
        f"config name 'bass' does not exist in {directory}, which with the shipped ones has asks, base, "
    )
    assert message.endswith("the nearest is 'base'") and "\n" not in message
    with pytest.raises(ConfigError, match="^config path 'no/where' does not exist; pass a folder of YAML files$"):
        load_config(Root, config_path="no/where", config_name="my")
    with pytest.raises(ConfigError, match="is a file; pass its folder as --config-path and 'my' as --config-name$"):
        load_config(Root, config_path=directory / "my.yaml", config_name="my")
    (tmp_path / "local.yaml").write_text("model: x\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="for local.yaml pass --config-path . --config-name local$"):
        load_config(Root, config_name="local")


def test_plain_values_are_checked_alike() -> None:
    root = check_config(Root, {"model": "x", "actor": {"optimizer": {"lr": 1}}, "sources": [{}, {"lr": 2.0}]})
    assert root == Root(model="x", actor=Actor(optimizer=Optimizer(lr=1.0)), sources=(Optimizer(), Optimizer(lr=2.0)))
    with pytest.raises(
        ConfigError, match=r"^unknown key 'actor.optim' \(value \{\}\): the nearest key is 'actor.optimizer'"
    ):
        check_config(Root, {"model": "x", "actor": {"optim": {}}})


@settings
class Trainer:
    """A section whose object is not what its class says, twice."""

    optimizer: Optimizer = Field(default_factory=lambda: Optimizer(lr=0.5))
    """How weights move."""
    critic: Optimizer | None = Field(default_factory=lambda: Optimizer(lr=0.25, schedule="linear"))
    """How the critic's move."""
    betas: tuple[float, ...] = (0.1, 0.2)
    """A list."""
    degree: int = Field(default=1, validation_alias=AliasChoices("degree", "size"))
    """A key of two names."""


@settings
class Differs:
    """A root whose sections have objects of their own."""

    trainer: Trainer = Field(default_factory=lambda: Trainer(optimizer=Optimizer(lr=0.125), degree=4, betas=(0.3,)))
    """Who trains."""
    plain: Trainer | None = None
    """Who trains too, if given."""
    several: tuple[Trainer, ...] = ()
    """Some more."""
    by_name: dict[str, Trainer] = Field(default_factory=dict)
    """Some with names."""
    engine: Annotated[Native | Served, Field(discriminator="kind")] = Field(default_factory=lambda: Native(max_rows=3))
    """Who generates."""


OWN, ROOTS = Trainer(), Differs().trainer


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"trainer": {}}, Differs()),
        ({"trainer": {"degree": 2}}, Differs(trainer=replace(ROOTS, degree=2))),
        ({"trainer": {"size": 2}}, Differs(trainer=replace(ROOTS, degree=2))),
        ({"trainer": {"betas": []}}, Differs(trainer=replace(ROOTS, betas=()))),
        (
            {"trainer": {"optimizer": {"schedule": "cosine"}}},
            Differs(trainer=replace(ROOTS, optimizer=Optimizer(lr=0.125, schedule="cosine"))),
        ),
        (
            {"trainer": {"critic": {"lr": 2.0}}},
            Differs(trainer=replace(ROOTS, critic=Optimizer(lr=2.0, schedule="linear"))),
        ),
        ({"trainer": {"critic": None}}, Differs(trainer=replace(ROOTS, critic=None))),
        ({"plain": {}}, Differs(plain=OWN)),
        (
            {"plain": {"optimizer": {"schedule": "cosine"}}},
            Differs(plain=replace(OWN, optimizer=Optimizer(lr=0.5, schedule="cosine"))),
        ),
        (
            {"several": [{}, {"critic": {"lr": 2.0}}]},
            Differs(several=(OWN, replace(OWN, critic=Optimizer(lr=2.0, schedule="linear")))),
        ),
        (
            {"by_name": {"a": {"optimizer": {"betas": [0.5, 0.5]}}}},
            Differs(by_name={"a": replace(OWN, optimizer=Optimizer(lr=0.5, betas=(0.5, 0.5)))}),
        ),
        ({"engine": {"kind": "native"}}, Differs(engine=Native())),
        ({"engine": {"kind": "served", "address": "x"}}, Differs(engine=Served(address="x"))),
    ],
)
def test_a_section_keeps_its_own_defaults_beside_the_keys_that_are_given(
    values: dict[str, Any], expected: Differs
) -> None:
    given = copy.deepcopy(values)
    assert check_config(Differs, values) == expected
    assert values == given


def test_a_wrong_value_in_a_section_is_told_the_sections_own_default() -> None:
    with pytest.raises(ConfigError, match="^trainer.optimizer.lr is 0 .*leave it at its default, 0.125$"):
        check_config(Differs, {"trainer": {"optimizer": {"lr": 0}}})
    with pytest.raises(ConfigError, match="^plain.optimizer.lr is 0 .*leave it at its default, 0.5$"):
        check_config(Differs, {"plain": {"optimizer": {"lr": 0}}})
    with pytest.raises(ConfigError, match="^trainer.size and trainer.degree are two names of one setting"):
        check_config(Differs, {"trainer": {"size": 2, "degree": 2}})


ALPHABET = string.ascii_letters + string.digits + " ${}\\'\"#:,[]\n\t?!&*|>%@`é漢"
TEXTS = st.text(alphabet=ALPHABET, max_size=20).filter(lambda text: text != "???")
VALUES = (
    st.none()
    | TEXTS
    | st.from_regex(r"[-+]?[0-9._]{1,3}[eE:]?[-+]?[0-9]{0,2}", fullmatch=True)
    | st.integers()
    | st.lists(st.booleans(), max_size=3)
)


@hypothesis_settings(max_examples=20, deadline=None)
@given(
    text=TEXTS,
    note=st.none() | TEXTS,
    lr=st.floats(min_value=1e-300, allow_nan=False, allow_infinity=False),
    extra=st.dictionaries(st.sampled_from(["a", "b c", "0"]), VALUES, max_size=3),
)
@example(text="1e3", note="0E0", lr=1.0, extra={"a": "-1_0e+5", "b c": ["2E2"]})
def test_written_yaml_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, text: str, note: str | None, lr: float, extra: dict[str, Any]
) -> None:
    root = Root(
        model=text, note=note, actor=Actor(optimizer=Optimizer(lr=lr)), extra=extra, engine=Served(address=text)
    )
    directory: Path = tmp_path_factory.mktemp("written")
    (directory / "config.yaml").write_text(to_yaml(root), encoding="utf-8")
    assert load_config(Root, config_path=directory, config_name="config") == root
    described = describe_config(Root, config_path=directory, config_name="config")
    (directory / "described.yaml").write_text(described, encoding="utf-8")
    assert load_config(Root, config_path=directory, config_name="described") == root


def test_a_function_is_written_as_its_import_path() -> None:
    assert "note: hybridflow.config.load:to_yaml" in to_yaml(Root(model="x", extra={"note": to_yaml}))
