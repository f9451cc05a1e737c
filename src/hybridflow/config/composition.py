"""YAML files, defaults lists and overrides to one plain mapping, by Hydra's compose. Importing this file imports Hydra."""

import importlib.resources
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from hybridflow.config import schema
from hybridflow.config.errors import ConfigError
from hybridflow.config.explain import explain_unknown, shown

MISSING = "???"
SHIPPED = Path(str(importlib.resources.files("hybridflow"))) / "configs"


class ShippedConfigs(SearchPathPlugin):
    """Puts the shipped YAML behind the user's own directory, so that a user's `defaults: [rl, _self_]` finds it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("hybridflow", f"file://{SHIPPED}")


def compose_values(
    cls: type,
    *,
    config_path: str | Path | None,
    config_name: str,
    overrides: Sequence[str],
    keep_missing: bool = False,
) -> dict[str, Any]:
    """The composed, resolved configuration as plain values. `cls` says which keys exist; its values are not checked here.

    config_path: the user's directory of YAML, searched before the shipped one; None for the shipped one alone.
    config_name: a file there, with or without `.yaml`.
    overrides:   as in Hydra. Differs from it: a plain `a.b=c` may also set a key that `cls` has and the YAML leaves out.
    keep_missing: a `???` stays; else it is refused.
    """
    directory = _existing_directory(config_path)
    name = config_name.removesuffix(".yaml").removesuffix(".yml")
    _require_file(directory, name)
    parsed = [_parse(text) for text in overrides]
    lines = [_widen(cls, override, directory) for override in parsed]
    try:
        config = _compose(directory, name, lines)
        if not keep_missing:
            _refuse_missing(config)
        return _resolve(cls, config)
    except MissingConfigException as error:
        raise ConfigError(_explain_missing_choice(name, error)) from None
    except ConfigCompositionException as error:
        raise ConfigError(_explain_composition(cls, parsed, error)) from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_explain_yaml(error)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"a file of configuration '{name}' is not UTF-8 text ({error.reason}); save it as UTF-8"
        ) from None
    except RecursionError:
        raise ConfigError(f"the defaults list of '{name}' comes back to itself; take the circle out") from None
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"configuration '{name}' cannot be composed ({_one_line(str(error))}); correct it") from None


def _compose(directory: Path, name: str, overrides: list[str]) -> DictConfig:
    Plugins.instance().register(ShippedConfigs)
    with initialize_config_dir(str(directory), job_name="hybridflow", version_base="1.3"):
        return compose(name, overrides)


def _refuse_missing(config: DictConfig) -> None:
    missing = [".".join(path) for path in iter_missing(OmegaConf.to_container(config, resolve=False))]
    if missing:
        raise ConfigError("\n".join(f"{key} is required and not set; set {key}=VALUE" for key in missing))


def _resolve(cls: type, config: DictConfig) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain_reference(cls, error)) from None
    return {str(key): value for key, value in dict(values).items()}  # type: ignore[arg-type]


def iter_missing(node: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths at which plain values say `???`."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if value == MISSING:
            yield (*above, str(key))
        yield from iter_missing(value, (*above, str(key)))


def _existing_directory(config_path: str | Path | None) -> Path:
    directory = SHIPPED if config_path is None else Path(config_path).expanduser().resolve()
    if directory.is_file():
        raise ConfigError(
            f"config path '{config_path}' is a file; pass its folder as --config-path and '{directory.stem}' as --config-name"
        )
    if not directory.is_dir():
        raise ConfigError(f"config path '{config_path}' does not exist; pass a folder of YAML files")
    return directory


def _require_file(directory: Path, name: str) -> None:
    if any((place / f"{name}.yaml").is_file() for place in (directory, SHIPPED)):
        return
    found = list(dict.fromkeys(_iter_names(directory)))
    near = schema.nearest(name, found)
    hint = f"the nearest is '{near}'" if near else "use one of these"
    if directory == SHIPPED and Path(f"{name}.yaml").is_file():
        folder = Path(name).parent
        hint = f"for {name}.yaml pass --config-path {folder} --config-name {Path(name).name}"
    raise ConfigError(
        f"config name '{name}' does not exist in {directory}, which with the shipped ones has {', '.join(found)}; {hint}"
    )


def _iter_names(directory: Path) -> Iterator[str]:
    for place in (directory, SHIPPED):
        yield from sorted(path.stem for path in place.glob("*.yaml"))


def _parse(text: str) -> Override:
    if text.startswith("="):
        raise ConfigError(f"override '{text}' has no key; write KEY=VALUE")
    if "=" not in text and not text.startswith("~"):
        example = f"KEY={text}" if "/" in text else f"{text}=VALUE"
        raise ConfigError(f"override '{text}' has no '='; write {example}")
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except OverrideParseException:
        key, _, value = text.partition("=")
        quoted = value.replace("[", '["').replace("]", '"]') if value.startswith("[") else f'"{value}"'
        raise ConfigError(
            f"override '{text}' cannot be read; quote it for the shell and for itself, as in '{key}={quoted}'"
        ) from None
    if override.is_sweep_override():
        key, _, value = text.partition("=")
        raise ConfigError(
            f"override '{text}' lists several values; write a list, {key}=[{value}], or quote it as one string"
        )
    return override


def _widen(cls: type, override: Override, directory: Path) -> str:
    """Let a plain override reach a key that the class has and the YAML leaves to its default; groups stay as they are."""
    key = override.key_or_group
    is_group = any((place / key).is_dir() for place in (directory, SHIPPED))
    plain = override.is_delete() is False and override.is_add() is False and override.is_force_add() is False
    if plain and override.package is None and not is_group and schema.is_known(cls, key):
        return _widened(override.input_line)
    return str(override.input_line)


def _widened(line: str | None) -> str:
    return f"++{line}"


def _explain_composition(cls: type, overrides: list[Override], error: ConfigCompositionException) -> str:
    message = str(error) or str(error.__cause__)
    for override in overrides:
        key, line = override.key_or_group, override.input_line
        if message == f"Error merging override {_widened(line)}":
            return f"override '{line}' cannot be applied ({_one_line(str(error.__cause__))}); correct it"
        if f"'{key}'" not in message and f"'{line}'" not in message:
            continue
        if override.is_add() and "already" in message:
            return f"override '{line}': {key} is set already; write {str(line)[1:]} to change it"
        if override.is_delete() and "does not exist" in message:
            return f"override '{line}': {key} is not in the YAML; take the override out{_meant(cls, key)}"
        if not schema.is_known(cls, key) and "/" not in key and override.package is None:
            return explain_unknown(cls, tuple(key.split(".")), shown(override.value()))
    return f"the configuration cannot be composed: {_one_line(message)}; correct it"


def _meant(cls: type, key: str) -> str:
    near = None if schema.is_known(cls, key) else schema.nearest_key(cls, tuple(key.split(".")))
    return f" or write the nearest key, '{near}'" if near else ""


def _explain_missing_choice(name: str, error: MissingConfigException) -> str:
    options = list(error.options or [])
    wanted = error.missing_cfg_file
    near = schema.nearest(str(wanted).rpartition("/")[2], options)
    remedy = f"the nearest is '{near}'" if near else "correct the name"
    among = f", only {', '.join(options)}" if options else ""
    return f"configuration '{name}' asks for '{wanted}', which does not exist{among}; {remedy}"


def _explain_yaml(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"{mark.name}, line {mark.line + 1}" if mark else "the configuration"
    return f"{place} is not valid YAML ({_one_line(error.problem or error.context or 'it cannot be read')}); correct that line"


def _explain_reference(cls: type, error: OmegaConfBaseException) -> str:
    """A `${...}` that leads nowhere. The message of OmegaConf holds what is missing between quotes."""
    key, message = error.full_key, _one_line(error.msg or str(error))
    quoted = message.split("'")[1] if message.count("'") >= 2 else ""
    if "Environment variable" in message:
        return f"{key} needs the environment variable {quoted}, which is not set; set it, or write ${{oc.env:{quoted},DEFAULT}}"
    if isinstance(error, InterpolationKeyError):
        why = "is left at its default and not in the YAML" if schema.is_known(cls, quoted) else "does not exist"
        return f"{key} refers to '{quoted}', which {why}; set {quoted} or correct the reference"
    return f"{key} holds a reference that cannot be resolved ({message}); correct it"


def _one_line(text: str) -> str:
    return " ".join(text.split("\n    full_key:")[0].split())
