"""Typed settings: how they are declared, loaded and checked."""

from hybridflow.config.errors import ConfigError, HybridflowError
from hybridflow.config.load import check_config, describe_config, load_config, to_yaml
from hybridflow.config.settings import AliasChoices, Field, settings

__all__ = [
    "AliasChoices",
    "ConfigError",
    "Field",
    "HybridflowError",
    "check_config",
    "describe_config",
    "load_config",
    "settings",
    "to_yaml",
]
